"""What a training step needs, computed before it runs and without a GPU: FLOPs, memory by part, the longest row.

Of a compiled step on one GPU. What a layer keeps for its backward is exact (a test compares it with what autograd
holds); the working set of a backward is an estimate, whose few coefficients stand below.
"""
import math
from bisect import bisect_left
from dataclasses import dataclass, replace

import torch.nn as nn

from config import Config, change
from loss import chunk_tokens
from runtime import flops

GIB = 2**30
# Memory as torch reports it (total_memory) in GiB, by words of the device name; drivers and ECC move the last digit.
USABLE_GIB = {
    "H200": 139.8, "H200 NVL": 139.8, "GH200": 94.5, "B200": 178.3,                 # approximate
    "H100 HBM3": 79.1, "H100 PCIe": 79.1, "H100 NVL": 93.0,                         # approximate
    "A100 80GB": 79.1, "A100 40GB": 39.4, "A10": 22.0, "L4": 22.0, "L40S": 44.4,    # approximate
    "RTX 6000 Ada": 47.4, "RTX 3090": 23.6, "RTX 4090": 23.5, "RTX 5090": 31.3,     # approximate
}
RESERVE_GIB = 2.5           # CUDA's context, cuBLAS's workspace, gaps between blocks of memory
IN_FLIGHT = 3               # block inputs on the GPU under offload: the one at work, one going, one coming
# What runtime.memory keeps of a layer; product: attention_out's, of which the residual is computed again.
KINDS = {"none": ("x", "qkv", "o", "lse", "product", "hidden"), "selective": ("x", "o", "lse"), "full": ("x",)}
WAYS = (("none", False), ("selective", False), ("selective", True), ("full", False), ("full", True))    # kind, offload
NAMES = {"weights": "weights", "gradients": "gradients", "optimizer": "optimizer", "kept": "activations kept",
         "square": "T x T", "work": "block at work", "loss": "loss"}
WORTH = 0.02                # a change that lowers the peak by less is no advice


@dataclass(frozen=True)
class Shape:
    """What memory depends on. Parameters are counted from the model's modules, learned positions apart."""
    params: int             # without learned positions
    block: int              # one block's
    matrices: int           # of these, those in matrices
    positions: int          # width of learned positions, 0: none
    rotation: int           # head width where cos and sin of positions are kept, 0: none
    head: int               # parameters of lm_head, its padding included
    tied: bool
    n_layer: int
    n_head: int
    d: int
    qkv: int                # widths of a block's products: (q, k, v), mlp_in's output, mlp_out's input
    hidden: int
    ff: int
    seq_len: int
    batch: int
    kind: str
    offload: bool
    mlp_chunk: int
    square: int             # bytes for each of T x T, where the attention is one that writes these out
    e: int                  # bytes of an element: 2, or 4 for float32
    muon: bool
    accumulates: bool       # several micro-batches a step: gradients are there from the second one's start
    world: int

    @property
    def tokens(self) -> int:
        return self.batch * self.seq_len

    @property
    def total(self) -> int:
        return self.params + self.positions * self.seq_len

    @property
    def half(self) -> bool:             # the model computes from bfloat16 weights beside float32 masters
        return self.e == 2 and self.world == 1

    @property
    def g(self) -> int:                 # bytes of a gradient's element
        return 2 if self.half and not self.accumulates else 4


def shape(c: Config, model: nn.Module, world: int = 1) -> Shape:
    """model: a GPT, on the meta device too. Only its numbers are read."""
    block, positions = model.blocks[0], model.positions
    return Shape(
        params=_count(model) - (0 if positions is None else _count(positions)), block=_count(block),
        matrices=sum(p.numel() for p in block.parameters() if p.dim() == 2),
        positions=0 if positions is None else positions.embedding_dim,
        rotation=0 if model.rope_theta is None else model.head_dim,
        head=_count(model.lm_head), tied=model.lm_head.weight is model.embed.weight, n_layer=len(model.blocks),
        n_head=model.n_head, d=model.lm_head.in_features, qkv=block.qkv.out_features, hidden=block.mlp_in.out_features,
        ff=block.mlp_out.in_features, seq_len=c.data.seq_len, batch=c.data.batch, kind=c.train.checkpointing,
        offload=c.train.offload, mlp_chunk=c.train.mlp_chunk, square=dense_bytes(c),
        e=4 if c.train.dtype == "float32" else 2, muon=c.optim.name == "muon", world=world,
        accumulates=c.train.tokens_per_step > c.data.batch * c.data.seq_len * world)


def dense_bytes(c: Config) -> int:
    """For each of T x T: scores, softmax and gradient of every head in float64 (reference) or in bfloat16 and float32
    (sdpa:math), or the mask that documents and windows become under SDPA's kernels; ours and flex have none."""
    name, heads = c.model.attention, c.data.batch * c.model.n_head
    mask = c.data.batch if c.data.document_mask else 1 if "S" in c.model.window_pattern else 0
    return {"reference": 24 * heads, "sdpa:math": 8 * heads + mask}.get(name, mask if name.startswith("sdpa") else 0)


def kept(s: Shape, kind: str | None = None) -> dict[str, int]:
    """Bytes a token that one layer keeps on the GPU, by tensor."""
    row = s.d * s.e
    sizes = dict(x=row, qkv=s.qkv * s.e, o=row, lse=4 * s.n_head, product=row, hidden=s.hidden * s.e, middle=row)
    names = set(KINDS[kind or s.kind])
    if s.mlp_chunk:                             # two parts: the second keeps just its input, and needs no product
        names = names - {"product", "hidden"} | {"middle"}
    return {name: n for name, n in sizes.items() if name in names and not (s.offload and name in ("x", "middle"))}


def host_bytes(s: Shape) -> int:
    """Of block inputs in host memory under offload."""
    return s.offload * s.n_layer * s.tokens * s.d * s.e * (2 if s.mlp_chunk else 1)


def at_work(s: Shape) -> int:
    """Bytes of one block's backward, the half of it that needs more: gradients on their way, and what it computes
    again. An estimate; all else here is counted."""
    d, attention = s.d * s.e, 4 * s.d + 2 * s.qkv * s.e     # sums of dq in float32; dq, dk, dv and them side by side
    mlp = (2 * s.ff + s.hidden) * s.e                       # GELU's output and its gradient; mlp_in's output's gradient
    again = {name: n for name, n in kept(s, "none").items() if name not in kept(s) and name not in ("x", "middle")}
    hidden = again.pop("hidden", 0)                         # the attention half has done with it
    middle = sum(again.values())
    if s.mlp_chunk:                                         # computes the hidden layer again whatever is kept
        chunk = s.batch * min(s.mlp_chunk, s.seq_len)
        return max(s.tokens * (2 * d + attention + middle), s.tokens * 2 * d + chunk * (d + mlp + s.hidden * s.e))
    return s.tokens * (middle + max(2 * d + attention, d + mlp + hidden))


def loss_bytes(s: Shape) -> dict[str, int]:
    """In the loss, which forms its gradients, and in its backward, which multiplies them into new ones."""
    vocab = s.head // s.d
    chunk = min(s.tokens, chunk_tokens(vocab)) * vocab * s.e
    rows = 3 * s.tokens * s.d * s.e             # the final norm's input, its output, and the output's gradient
    copy = s.head * s.e if s.e == 2 and not s.half else 0
    return dict(forward=chunk + 4 * s.head + copy + rows, backward=8 * s.head + rows)


def moments(s: Shape) -> dict[str, dict[str, int]]:
    """Bytes by part at each moment that may be the peak."""
    muon = s.n_layer * s.matrices if s.muon else 0
    always = dict(weights=(6 if s.half else 4) * s.total, gradients=0, optimizer=8 * s.total - 4 * muon, kept=0,
                  square=s.square * s.seq_len**2, work=0, loss=0)
    before = 4 * s.total * ((s.world > 1) + s.accumulates)      # DDP's buckets; the micro-batches before
    layer = sum(kept(s).values())

    def held(layers: int) -> int:               # cos and sin once, half a head wide, in float32
        return s.tokens * (layers * layer + 4 * s.rotation + s.offload * min(IN_FLIGHT, layers) * s.d * s.e)
    found = {f"in the {part} of the loss": always | dict(gradients=before, kept=held(s.n_layer), loss=n)
             for part, n in loss_bytes(s).items()}
    for i in reversed(range(s.n_layer)):
        to_come = i * s.block + s.positions * s.seq_len + (0 if s.tied else s.head)
        new = s.block * s.e if s.accumulates else s.g * (s.total - to_come)
        found[f"in the backward of layer {i + 1} of {s.n_layer}"] = always | dict(
            gradients=before + new, kept=held(i + 1), work=at_work(s))
    whole = before + (0 if s.accumulates else s.g * s.total)
    dense = s.g * s.head if s.tied or s.accumulates else 0       # the embedding's own, before it is added
    found["in the backward of the embedding"] = always | dict(gradients=whole + dense,
                                                              work=s.tokens * s.d * (4 + s.e))
    found["in the optimizer"] = always | dict(gradients=whole)
    return found


def peak(s: Shape) -> tuple[int, str, dict[str, int]]:
    """-> bytes, when, and by part."""
    when, parts = max(moments(s).items(), key=lambda item: sum(item[1].values()))
    return sum(parts.values()), when, parts


def usable_gib(gpu: str) -> float:
    """ValueError: no memory known for a GPU of this name."""
    name = flops.entry(USABLE_GIB, gpu)
    if name is None:
        raise ValueError(f"no memory known for the GPU {gpu!r}; known: {', '.join(USABLE_GIB)}")
    return USABLE_GIB[name]


def fits(s: Shape, gib: float) -> bool:
    return peak(s)[0] <= (gib - RESERVE_GIB) * GIB


def longest(s: Shape, gib: float) -> int:
    """The largest seq_len that fits, a multiple of 1024 and of mlp_chunk; 0: none does."""
    step = math.lcm(1024, s.mlp_chunk or 1)
    return step * bisect_left(range(1, 2**20), True, key=lambda n: not fits(replace(s, seq_len=n * step), gib))


def report(c: Config, gpu: str, model: nn.Module) -> str:
    """model: of this config, on the meta device. ValueError: a GPU whose memory is not known."""
    s, gib = shape(c, model), usable_gib(gpu)
    exact, full = flops.per_token(model, s.seq_len)
    without = f" ({s.params:,} without learned positions)" if s.positions else ""
    return "\n".join([
        f"rows              {s.batch} x {s.seq_len:,} tokens, checkpointing {s.kind}{', offload' * s.offload}"
        + (f", mlp_chunk {s.mlp_chunk:,}" if s.mlp_chunk else "") + f", {'bfloat16' if s.e == 2 else 'float32'}",
        f"parameters        {s.total:,}{without}",
        f"FLOPs a token     {exact / 1e9:.5g} G as perf/mfu counts, whole rows; "
        f"{full / 1e9:.5g} G as perf/mfu_full", "", *_memory(s, gpu, gib), "", *_longest(s, gib)])


def _memory(s: Shape, gpu: str, gib: float) -> list[str]:
    most, (size, when, parts) = moments(s).values(), peak(s)
    lines = [f"{'memory, GiB':<18}{'at the peak':>12}{'at most':>10}"]
    lines += [f"{name:<18}{parts[part] / GIB:>12.3f}{max(m[part] for m in most) / GIB:>10.3f}"
              for part, name in NAMES.items()] + [f"{'peak':<18}{size / GIB:>12.3f}  {when}"]
    lines += [f"{'host memory':<18}{host_bytes(s) / GIB:>12.3f}"] if s.offload else []
    spare = gib - RESERVE_GIB - size / GIB
    verdict = f"fits, {spare:.1f} GiB to spare" if fits(s, gib) else f"does not fit, {-spare:.1f} GiB too much"
    return [*lines, f"{gpu}: {gib} GiB, {RESERVE_GIB} of them for CUDA itself: {verdict}"]


def _longest(s: Shape, gib: float) -> list[str]:
    lines = [f"longest rows that fit at data.batch {s.batch} (now {s.seq_len:,}), by checkpointing"]
    for kind, offload in WAYS:
        way = replace(s, kind=kind, offload=offload)
        T = longest(way, gib)
        host = f"  with {host_bytes(replace(way, seq_len=T)) / GIB:.1f} GiB of host memory" if offload else ""
        lines.append(f"{kind + ', offload' * offload:<18}{T:>12,}{host}")
    return lines


def advice(c: Config, model: nn.Module, world: int = 1) -> str:
    """For a step that ran out of memory: the largest part, and what to change next."""
    size, _, parts = peak(shape(c, model, world))
    largest = max(parts, key=parts.get)
    options = [(flag, size - peak(shape(changed, model, world))[0]) for flag, changed in _changes(c)]
    flag, fall = next((option for option in options if option[1] > WORTH * size), options[-1])
    last = "All that is left are shorter rows, " if flag == options[-1][0] else "Try "
    return (f"The largest part of the {size / GIB:.2f} GiB predicted is {NAMES[largest]}, {parts[largest] / GIB:.2f} "
            f"GiB. {last}{flag}: the predicted peak falls by {max(0, fall) / GIB:.2f} GiB.")


def _changes(c: Config) -> list[tuple[str, Config]]:
    """What may lower the peak, in the order to try it; shorter rows last, and always."""
    T, batch, kind, step = c.data.seq_len, c.data.batch, c.train.checkpointing, c.train.mlp_chunk or 1
    kinds, chunk = list(KINDS), math.gcd(T, 8192)
    options = [("data", "batch", n) for n in range(batch - 1, 0, -1) if batch % n == 0][:1]
    options += [("train", "checkpointing", later) for later in kinds[kinds.index(kind) + 1:]]
    options += [("train", "offload", True)] if kind != "none" and not c.train.offload else []
    options += [("train", "mlp_chunk", chunk)] if step == 1 and 1024 <= chunk < T else []
    shorter = (T // n for n in range(2, T + 1) if T % n == 0 and T // n % step == 0)
    options += [("data", "seq_len", next(shorter, T))]
    return [(f"--{section}.{name.replace('_', '-')}" + f" {value}" * (value is not True),
             change(c, **{section: {name: value}})) for section, name, value in options]


def _count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
