"""GPT-2 small, exactly: 124,439,808 parameters. On the embedded books; point data.source at your own text."""
from config import Config, Data, Model, Optim, Train

config = Config(
    data=Data(source="books", tokenizer="gpt2", seq_len=1024, batch=16),
    model=Model(n_layer=12, n_head=12, d_model=768),
    optim=Optim(lr=6e-4, min_lr=6e-5, warmup_steps=100),
    train=Train(max_steps=1000, tokens_per_step=64 * 1024),
)
