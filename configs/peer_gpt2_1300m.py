"""The same of 1.3B parameters (24 layers, width 2048, 16 heads of 128) on rows of 16k tokens."""
from config import change
from configs.peer_gpt2_124m import config as base

config = change(base, data=dict(seq_len=16 * 1024), model=dict(n_layer=24, n_head=16, d_model=2048))
