"""nanoGPT's GPT-2 small, which has no biases, on rows of 64k tokens, dense causal: what its own loop is compared on."""
from config import change
from configs.gpt2_124m import config as base

config = change(
    base,
    data=dict(seq_len=64 * 1024, batch=1, document_mask=False),
    model=dict(bias=False, vocab_multiple=128),
    train=dict(max_steps=100, tokens_per_step=0, eval_every=0, checkpoint_every=0, final_eval_tokens=256 * 1024),
    log=dict(every=1),
)
