"""Twenty steps in seconds: does everything still run?"""
from config import change
from configs.quickstart import config as base

config = change(
    base,
    data=dict(seq_len=256, batch=2),
    model=dict(n_layer=2, d_model=64, n_head=2),
    optim=dict(warmup_steps=5),
    train=dict(max_steps=20, tokens_per_step=1024, eval_every=10, eval_tokens=8 * 1024,
               final_eval_tokens=64 * 1024, checkpoint_every=10),
    log=dict(every=1),
    wandb=dict(mode="disabled"),
)
