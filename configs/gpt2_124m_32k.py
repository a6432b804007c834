"""GPT-2 small's size on rows of 32k tokens, RoPE in place of learned positions. 2.5B tokens, 20 a parameter, of your
own text: the embedded books have 2.6M."""
from config import change
from configs.gpt2_124m import config as base

config = change(
    base,
    data=dict(seq_len=32 * 1024, batch=1),
    model=dict(position="rope", rope_theta=500_000.0, bias=False, vocab_multiple=128),
    optim=dict(schedule="wsd", warmup_steps=200),
    train=dict(max_steps=4800, tokens_per_step=512 * 1024, eval_every=200, eval_tokens=256 * 1024,
               checkpoint_every=200),
    log=dict(every=5),
)
