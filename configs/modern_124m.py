"""A model of GPT-2 small's size as built now: RMSNorm, RoPE, grouped queries, qk-norm, SwiGLU, windows, no biases."""
from config import change
from configs.gpt2_124m import config as base

config = change(
    base,
    data=dict(seq_len=4 * 1024, batch=4),
    model=dict(n_kv_head=4, norm="rmsnorm", position="rope", qk_norm=True, mlp="swiglu", bias=False, vocab_multiple=128,
               window=1024, window_pattern="LSSS", rope_theta=100_000.0),
)
