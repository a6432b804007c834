"""GPT-2 XL, exactly: 1,557,611,200 parameters."""
from config import change
from configs.gpt2_124m import config as base

config = change(base, data=dict(batch=8), model=dict(n_layer=48, n_head=25, d_model=1600),
                optim=dict(lr=2e-4, min_lr=2e-5))
