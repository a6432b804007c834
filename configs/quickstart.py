"""Four minutes on two CPU cores: a byte-level GPT on the embedded books, rows of 2048 bytes."""
from config import Config, Data, Log, Model, Optim, Train

config = Config(
    data=Data(source="books", tokenizer="bytes", seq_len=2048, batch=1),
    model=Model(n_layer=4, n_head=2, d_model=128, norm="rmsnorm", position="rope", qk_norm=True, bias=False),
    optim=Optim(lr=3e-3, min_lr=3e-4, warmup_steps=40),
    train=Train(max_steps=600, eval_every=200, eval_tokens=64 * 1024, checkpoint_every=200),
    log=Log(every=10),
)
