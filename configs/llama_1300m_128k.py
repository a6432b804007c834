"""A Llama-like model of 1.27B parameters (RMSNorm, RoPE, SwiGLU, 4 query heads on one of K and V) on rows of 128k
tokens. 25B tokens, 20 a parameter, of your own text. Windows on three layers of four: --model.window 4096
--model.window-pattern LSSS."""
from config import change
from configs.gpt2_124m_32k import config as base

config = change(
    base,
    data=dict(seq_len=128 * 1024),
    model=dict(n_layer=24, n_head=16, n_kv_head=4, d_model=2048, norm="rmsnorm", mlp="swiglu", tied_embeddings=False),
    optim=dict(lr=3e-4, min_lr=3e-5, warmup_steps=500),
    train=dict(max_steps=24_000, tokens_per_step=1024 * 1024, checkpointing="selective"),
    log=dict(every=1),
)
