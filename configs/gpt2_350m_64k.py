"""GPT-2 medium's size on rows of 64k tokens. 7B tokens, 20 a parameter, of your own text."""
from config import change
from configs.gpt2_124m_32k import config as base

config = change(
    base,
    data=dict(seq_len=64 * 1024),
    model=dict(n_layer=24, n_head=16, d_model=1024),
    optim=dict(lr=3e-4, min_lr=3e-5),
    train=dict(max_steps=13_500),
)
