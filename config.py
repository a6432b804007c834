"""Every knob on one page: a frozen dataclass tree, its file + command-line loader, and the rules between fields.

A config file is Python that names one `config`; another imports it and calls `change`. The command line overrides both.
Constructors do not check: `load` checks every field's type, then `validate` the rules that join several.
"""
import contextlib
import dataclasses
import difflib
import io
import json
import re
import runpy
import sys
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Attention = Literal["auto", "flash_attn2", "flash_attn2:triton", "sdpa", "sdpa:flash", "sdpa:cudnn", "sdpa:efficient",
                    "sdpa:math", "flex", "reference"]


@dataclass(frozen=True, kw_only=True)
class Run:
    name: str = ""
    """Name of the run, in W&B too; empty: the name of the config file."""
    dir: str = ""
    """Folder that keeps the run; empty: runs/NAME, or runs/NAME-2 and so on where that is taken."""
    seed: int = 1337
    """Seeds the weights and the order of the data."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """auto: the GPU if there is one."""


@dataclass(frozen=True, kw_only=True)
class Data:
    source: str = "books"
    """books (the embedded corpus), or a file, folder or glob of txt, jsonl or parquet."""
    text_column: str = "text"
    """Column that holds the text in jsonl and parquet files."""
    tokenizer: Literal["bytes", "gpt2"] = "bytes"
    """bytes: 256 values and an end id; gpt2: its byte-level BPE, 50,257 ids."""
    dir: str = ""
    """Folder of the token shards; empty: data/shards/SOURCE-TOKENIZER, prepared when absent."""
    val_fraction: float = 0.05
    """Share of documents held out, by hash of the text (books: named works are held out instead)."""
    seq_len: int = 1024
    """T: tokens in a row."""
    batch: int = 1
    """Rows in one micro-batch of one rank."""
    document_mask: bool = True
    """Tokens attend only inside their own document; False: over the whole row."""


@dataclass(frozen=True, kw_only=True)
class Model:
    n_layer: int = 12
    n_head: int = 12
    n_kv_head: int = 0
    """Heads of K and V (grouped-query attention); 0: n_head."""
    d_model: int = 768
    d_ff: int = 0
    """Width of the MLP; 0: 4 d_model for gelu, 8/3 d_model rounded up to a multiple of 64 for swiglu."""
    mlp: Literal["gelu", "swiglu"] = "gelu"
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"
    position: Literal["learned", "rope"] = "learned"
    rope_theta: float = 10_000.0
    qk_norm: bool = False
    """RMSNorm on the heads of q and k, before RoPE."""
    bias: bool = True
    """Biases in linear layers and LayerNorm."""
    tied_embeddings: bool = True
    vocab_multiple: int = 1
    """Rows of the embedding are padded up to a multiple of this, 128 being faster on a GPU, as ids that never come."""
    window: int = 0
    """W: number of keys a query of an S layer sees, itself included."""
    window_pattern: str = "L"
    """One letter a layer, repeated: L sees the whole row, S the last `window` keys. "LSSS" is one in four."""
    attention: Attention = "auto"
    """auto: flash_attn2 on a GPU, sdpa on a CPU. sdpa:NAME forces one of torch's kernels, flash_attn2:triton ours."""


@dataclass(frozen=True, kw_only=True)
class Optim:
    name: Literal["adamw", "muon"] = "adamw"
    """muon: for the matrices of the blocks, AdamW for the rest."""
    lr: float = 6e-4
    min_lr: float = 6e-5
    """Learning rate at the end."""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """From lr to min_lr all along the run, or (warm-up, stable, decay) over its last decay_fraction."""
    decay_fraction: float = 0.2
    """Of all steps, for wsd."""
    warmup_steps: int = 100
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    """On matrices only."""
    grad_clip: float = 1.0
    """Largest norm of the whole gradient; 0: no clipping."""


@dataclass(frozen=True, kw_only=True)
class Train:
    max_steps: int = 1000
    tokens_per_step: int = 0
    """Tokens of one optimizer step over all ranks; 0: one micro-batch a rank. More: gradient accumulation."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Autocast dtype; auto: bfloat16 on a GPU, float32 on a CPU."""
    compile: Literal["auto", "on", "off"] = "auto"
    """torch.compile; auto: on for a GPU."""
    checkpointing: Literal["none", "selective", "full"] = "none"
    """What the backward computes again: no product, all but attention, everything. Less memory, slower."""
    offload: bool = False
    """The blocks' inputs wait for the backward in host memory; with selective or full."""
    mlp_chunk: int = 0
    """Tokens that the MLP takes at a time, which then keeps only its input; 0: the whole row."""
    deterministic: bool = False
    """Bit-for-bit repeatable, with slower kernels where that needs them."""
    evaluate: bool = True
    """On held-out tokens, on the way and at the end."""
    eval_every: int = 250
    """Steps between evaluations; 0: at the end only."""
    eval_tokens: int = 100_000
    """Held-out tokens of an evaluation on the way, the same ones every time; 0: the whole split."""
    final_eval_tokens: int = 0
    """The same for the evaluation at the end."""
    checkpoint_every: int = 250
    """Steps between checkpoints; 0: at the end only."""
    save: bool = True
    """Write checkpoints; without them the run cannot be resumed."""
    profile_step: int = 0
    """The step whose kernels are written to kernels.json; 0: none."""


@dataclass(frozen=True, kw_only=True)
class Log:
    every: int = 10
    """Steps between two rows in metrics.jsonl, W&B and the terminal."""


@dataclass(frozen=True, kw_only=True)
class Metrics:
    peak_tflops: float = 0.0
    """Dense peak of one device in TFLOP/s at the training dtype, for MFU; 0: looked up by device name."""


@dataclass(frozen=True, kw_only=True)
class Wandb:
    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    """auto: WANDB_MODE if set, else online if logged in, else offline. Never asks."""
    project: str = "nanolong"
    group: str = ""
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Config:
    run: Run = field(default_factory=Run)
    data: Data = field(default_factory=Data)
    model: Model = field(default_factory=Model)
    optim: Optim = field(default_factory=Optim)
    train: Train = field(default_factory=Train)
    log: Log = field(default_factory=Log)
    metrics: Metrics = field(default_factory=Metrics)
    wandb: Wandb = field(default_factory=Wandb)


POSITIVE = {"data.seq_len", "data.batch", "model.n_layer", "model.n_head", "model.d_model", "model.rope_theta",
            "model.vocab_multiple", "optim.lr", "optim.eps", "log.every"}       # every other number may be 0 too


def change(base: Config, **sections: dict) -> Config:
    """A copy of `base` with some fields replaced: change(base, data=dict(seq_len=4096)). ValueError: no such field."""
    for section, fields in sections.items():
        _known(section, base, "config section")
        part = getattr(base, section)
        for name in fields:
            _known(name, part, f"field of {section}")
        base = dataclasses.replace(base, **{section: dataclasses.replace(part, **fields)})
    return base


def load(path: str | Path, argv: list[str] = ()) -> Config:
    """The config of a Python file, or of a run folder's config.json, with the command line's overrides, validated.

    ValueError names the field, its value and the rule, or the flag and the nearest one."""
    import tyro
    path = Path(path)
    config = from_json(path / "config.json") if path.is_dir() else _from_python(path)
    check_types(config)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            config = tyro.cli(Config, default=config, args=list(argv), prog=f"train.py {path}")
    except SystemExit as stop:
        if not stop.code:                                   # --help
            raise
        raise ValueError(re.sub(r"[─│╭╮╰╯\s]+", " ", said.getvalue()).strip()) from None
    validate(config)
    return config


def take_plan(argv: list[str]) -> tuple[list[str], str | None]:
    """Without --plan, and what it says: None, there is none; "" or a GPU's name, after it or after a "="."""
    at = next((i for i, word in enumerate(argv) if word.partition("=")[0] == "--plan"), None)
    if at is None:
        return argv, None
    _, equals, gpu = argv[at].partition("=")
    named = not equals and at > 0 and at + 1 < len(argv) and not argv[at + 1].startswith("--")
    return argv[:at] + argv[at + 1 + named:], argv[at + 1] if named else gpu


def to_json(config: Config) -> str:
    return json.dumps(dataclasses.asdict(config), indent=2) + "\n"


def from_json(path: Path) -> Config:
    if not path.is_file():
        raise ValueError(f"{path.parent} is not a run folder: it has no config.json")
    try:
        sections = json.loads(path.read_text())
        sections["wandb"]["tags"] = tuple(sections["wandb"]["tags"])      # JSON has no tuples
        return change(Config(), **sections)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: {error!r}") from error


def differences(old: Config, new: Config) -> list[str]:
    """Fields that differ, each as "section.name OLD -> NEW"."""
    return [f"{section.name}.{name} {value!r} -> {now!r}" for section in dataclasses.fields(Config)
            for name, value in vars(getattr(old, section.name)).items()
            if (now := getattr(getattr(new, section.name), name)) != value]


def _from_python(path: Path) -> Config:
    if not path.is_file():
        known = [p.stem for p in Path(__file__).parent.joinpath("configs").glob("*.py")]
        close = difflib.get_close_matches(path.stem, known, n=1)
        hint = f"; nearest in configs/: {close[0]}.py" if close else ""
        raise ValueError(f"no config file {str(path)!r}{hint}")
    try:
        names = runpy.run_path(str(path))
    except Exception as error:
        raise ValueError(f"{path}: {type(error).__name__}: {error}{_nearest_keyword(str(error))}") from error
    if not isinstance(names.get("config"), Config):
        raise ValueError(f"{path} must define `config`, a config.Config; found {type(names.get('config')).__name__}")
    return names["config"]


def check_types(config: Config) -> None:
    """Field by field: typeguard on a dataclass as a whole looks at nothing inside it."""
    import typeguard
    for section in dataclasses.fields(config):
        part, kind = getattr(config, section.name), section.type
        if not isinstance(part, kind):
            raise ValueError(f"{section.name} must be a config.{kind.__name__}, not {part!r}")
        for name, hint in typing.get_type_hints(kind).items():
            value = getattr(part, name)
            try:
                typeguard.check_type(value, hint, collection_check_strategy=typeguard.CollectionCheckStrategy.ALL_ITEMS)
                _rule(hint is bool or not isinstance(value, bool), "True is an int to Python, not to us")
            except (typeguard.TypeCheckError, ValueError) as error:
                raise ValueError(f"{section.name}.{name}={value!r} must be {_spell(hint)}") from error


def validate(c: Config) -> None:
    """The rules between fields, after all overrides. ValueError: name, value, rule."""
    for section in dataclasses.fields(c):
        for name, value in vars(getattr(c, section.name)).items():
            if isinstance(value, int | float):
                full = f"{section.name}.{name}"
                _rule(0 <= value < float("inf"), f"{full}={value} must be a number >= 0")
                _rule(value > 0 or full not in POSITIVE, f"{full}={value} must be positive")
    m, o = c.model, c.optim
    _rule(m.d_model % m.n_head == 0, f"model.d_model={m.d_model} must be a multiple of model.n_head={m.n_head}")
    _rule(m.n_head % (m.n_kv_head or m.n_head) == 0,
          f"model.n_head={m.n_head} must be a multiple of model.n_kv_head={m.n_kv_head}")
    _rule(m.position != "rope" or (m.d_model // m.n_head) % 2 == 0,
          f"model.position='rope' needs an even head width, not d_model / n_head = {m.d_model // m.n_head}")
    _rule(re.fullmatch("[LS]+", m.window_pattern), f"model.window_pattern={m.window_pattern!r} must be letters L and S")
    _rule(("S" in m.window_pattern) == (m.window > 0), f"model.window={m.window} with model.window_pattern="
          f"{m.window_pattern!r}: S layers need a window of 1 or more, and a window needs S layers")
    _rule("/" not in c.run.name, f"run.name={c.run.name!r} must be a name, not a path: run.dir takes one")
    _rule(0 < c.data.val_fraction < 1, f"data.val_fraction={c.data.val_fraction} must lie between 0 and 1")
    _rule(o.min_lr <= o.lr, f"optim.min_lr={o.min_lr} must not exceed optim.lr={o.lr}")
    _rule(0 < o.decay_fraction <= 1, f"optim.decay_fraction={o.decay_fraction} must be above 0 and at most 1")
    _rule(max(o.beta1, o.beta2) < 1, f"optim.beta1={o.beta1} and optim.beta2={o.beta2} must be below 1")
    _rule(c.train.checkpointing != "selective" or m.attention not in ("sdpa:math", "reference", "flex"),
          f"train.checkpointing='selective' cannot keep the attention of model.attention={m.attention!r}: not one op")
    _rule(c.train.profile_step <= c.train.max_steps,
          f"train.profile_step={c.train.profile_step} must not exceed train.max_steps={c.train.max_steps}")
    _rule(not c.train.offload or c.train.checkpointing != "none",
          "train.offload=True needs train.checkpointing='selective' or 'full': with 'none' inputs are the least of it")
    _rule(c.data.seq_len % (c.train.mlp_chunk or 1) == 0, f"data.seq_len={c.data.seq_len} must be a multiple of "
          f"train.mlp_chunk={c.train.mlp_chunk}")
    micro = c.data.batch * c.data.seq_len
    _rule(c.train.tokens_per_step % micro == 0, f"train.tokens_per_step={c.train.tokens_per_step} must be a multiple "
          f"of data.batch * data.seq_len = {micro}")


@contextlib.contextmanager
def one_line_errors():
    """What a user can mend (ValueError, OSError) is one line on stderr and exit code 2; anything else is our bug."""
    try:
        yield
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)


def _rule(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ValueError(otherwise)


def _known(name: str, part, what: str) -> None:
    if name not in {f.name for f in dataclasses.fields(part)}:
        raise ValueError(f"no {what} is called {name!r}; nearest: {_nearest(name, part)}")


def _nearest(name: str, part) -> str:
    names = [f.name for f in dataclasses.fields(part)]
    return (difflib.get_close_matches(name, names, n=1, cutoff=0.0) or names)[0]


def _nearest_keyword(message: str) -> str:
    """For a constructor's complaint "... got an unexpected keyword argument 'NAME'": the field that was meant."""
    found = re.match(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'", message)
    return f"; nearest: {_nearest(found[2], globals()[found[1]])}" if found and found[1] in globals() else ""


def _spell(hint) -> str:
    if typing.get_origin(hint) is Literal:
        return "one of " + ", ".join(map(repr, typing.get_args(hint)))
    return hint.__name__ if isinstance(hint, type) else str(hint)
