"""GPT-2 small on rows of 8k tokens, attention over the whole row: what the backends are compared on."""
from config import change
from configs.gpt2_124m import config as base

config = change(
    base,
    data=dict(seq_len=8 * 1024, batch=4, document_mask=False),
    model=dict(vocab_multiple=128),
    optim=dict(warmup_steps=40),
    train=dict(max_steps=200, tokens_per_step=32 * 1024, eval_every=0, checkpoint_every=0,
               final_eval_tokens=256 * 1024),
    log=dict(every=1),
)
