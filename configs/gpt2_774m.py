"""GPT-2 large, exactly: 774,030,080 parameters."""
from config import change
from configs.gpt2_124m import config as base

config = change(base, model=dict(n_layer=36, n_head=20, d_model=1280), optim=dict(lr=2.5e-4, min_lr=2.5e-5))
