"""GPT-2 medium, exactly: 354,823,168 parameters."""
from config import change
from configs.gpt2_124m import config as base

config = change(base, model=dict(n_layer=24, n_head=16, d_model=1024), optim=dict(lr=3e-4, min_lr=3e-5))
