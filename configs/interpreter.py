"""The Triton kernels train on a CPU, through Triton's interpreter: slow, but these very kernels."""
from config import change
from configs.debug import config as base

config = change(
    base,
    data=dict(seq_len=128, batch=1),
    model=dict(n_head=1, attention="flash_attn2"),
    train=dict(max_steps=5, tokens_per_step=128, final_eval_tokens=256, eval_every=0, checkpoint_every=0),
)
