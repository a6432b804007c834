"""The plan of a step: what a layer keeps is what autograd holds, peaks are near the measured ones, advice helps."""
import contextlib
import functools
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import config as configs
import loss
from config import Config, Model, change
from data import tokenizer
from flash_attn2 import backends
from model import GPT
from runtime import flops, memory, plan
from runtime.optimizer import Optimizer

CONFIGS = sorted(Path("configs").glob("*.py"))
GPT2 = Model(n_layer=2, n_head=4, d_model=64)
MODERN = replace(GPT2, n_kv_head=2, norm="rmsnorm", position="rope", qk_norm=True, mlp="swiglu", bias=False)
SHAPES = pytest.mark.parametrize("m", [GPT2, MODERN], ids=["gpt2", "modern"])
T = 128


@functools.cache
def on_meta(c: Config, vocab: int = 0) -> GPT:
    with torch.device("meta"):
        return GPT(c.model, vocab or tokenizer.get(c.data.tokenizer).vocab_size, c.data.seq_len, None)


def shape(c: Config, **changes) -> plan.Shape:
    return replace(plan.shape(c, on_meta(c)), **changes)


def peer(**changes) -> plan.Shape:
    return shape(configs.load("configs/peer_gpt2_1300m.py"), **changes)


def small(m: Model = GPT2, **train) -> Config:
    return change(Config(model=m), data=dict(seq_len=T), train=dict(dtype="float32") | train)


def real(c: Config, run_block=lambda block, *args: block(*args)) -> GPT:
    attention = backends.build("sdpa", torch.device("cpu"), torch.float32, c.model.d_model // c.model.n_head,
                               plain=True, grouped=bool(c.model.n_kv_head))
    return GPT(c.model, 50, c.data.seq_len, attention, run_block)


def run(model: GPT, c: Config) -> torch.Tensor:
    tokens = torch.randint(50, (c.data.batch, c.data.seq_len))
    bf16 = c.train.dtype != "float32"
    with torch.autocast("cpu", torch.bfloat16) if bf16 else contextlib.nullcontext():
        return model(tokens, tokens)


def held_bytes(model: GPT, c: Config) -> int:
    """What autograd holds after the forward, each storage once; not parameters, nor tokens, nor states of the random
    generator, which are no matter of size."""
    run(model, c).backward()                                # compiles
    held, own = {}, {p.untyped_storage().data_ptr() for p in model.parameters()}

    def note(x: torch.Tensor) -> torch.Tensor:
        if x.is_floating_point():
            held[x.untyped_storage().data_ptr()] = x        # alive: its address is not given away again
        return x
    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        run(model, c)
    return sum(x.untyped_storage().nbytes() for at, x in held.items() if at not in own)


@pytest.fixture
def eager_backend(monkeypatch):
    """The compiler's choice of what to keep, without its code."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))


def held_by_a_layer(c: Config) -> int:
    runner = memory.block_runner(c.train.checkpointing, compiled=True, mlp_chunk=c.train.mlp_chunk)
    two, three = (held_bytes(real(deeper, runner), deeper) for deeper in (c, change(c, model=dict(n_layer=3))))
    return three - two


@SHAPES
@pytest.mark.parametrize("chunk", [0, 32], ids=["whole", "chunks"])
@pytest.mark.parametrize("kind", ["none", "selective", "full"])
def test_kept_is_what_autograd_holds(eager_backend, kind, chunk, m):
    c = small(m, checkpointing=kind, mlp_chunk=chunk)
    assert held_by_a_layer(c) == T * sum(plan.kept(shape(c)).values())


@pytest.mark.parametrize("chunk", [0, 32], ids=["whole", "chunks"])
def test_kept_in_bfloat16_neither_norms_nor_copies_of_weights(eager_backend, chunk):
    """RMSNorm sums in float32 under every autocast; LayerNorm under a GPU's alone."""
    c = small(MODERN, dtype="bfloat16", mlp_chunk=chunk)
    assert held_by_a_layer(c) == T * sum(plan.kept(shape(c)).values())


@SHAPES
@pytest.mark.parametrize("chunk", [0, 32], ids=["whole", "chunks"])
def test_offload_keeps_in_host_memory(monkeypatch, chunk, m):
    parked, init = [], memory.Parked.__init__

    def note(self, x, *args):
        parked.append(x.nbytes)
        init(self, x, *args)
    monkeypatch.setattr(memory.Parked, "__init__", note)
    for kind, left in dict(full=set(), selective={"o", "lse"}).items():
        parked.clear()
        c = small(m, checkpointing=kind, offload=True, mlp_chunk=chunk)
        run(real(c, memory.block_runner(kind, offload=True, mlp_chunk=chunk)), c)
        assert set(plan.kept(shape(c))) == left and sum(parked) == plan.host_bytes(shape(c)) > 0


def test_rotation_is_kept_once(eager_backend):
    learned, rope = (small(replace(MODERN, position=kind), checkpointing="full") for kind in ("learned", "rope"))
    runner = memory.block_runner("full", compiled=True)
    more = held_bytes(real(rope, runner), rope) - held_bytes(real(learned, runner), learned)
    kept = [plan.moments(shape(c))["in the backward of layer 1 of 2"]["kept"] for c in (learned, rope)]
    assert more == kept[1] - kept[0] > 0


MEASURED = [("peer_gpt2_1300m", 16, "none", 34.2), ("peer_gpt2_1300m", 16, "selective", 22.2),
            ("peer_gpt2_124m", 64, "none", 15.0), ("peer_gpt2_124m", 64, "selective", 6.1),
            ("peer_gpt2_1300m", 64, "selective", 34.94)]


@pytest.mark.parametrize("name, k, kind, gib", MEASURED)
def test_measured_peaks_are_predicted_within_a_tenth(name, k, kind, gib):
    """H200, torch.cuda.max_memory_allocated, torch 2.11 (LOG.md)."""
    c = change(configs.load(f"configs/{name}.py"), data=dict(seq_len=k * 1024), train=dict(checkpointing=kind))
    assert plan.peak(shape(c))[0] / plan.GIB == pytest.approx(gib, rel=0.1)


@pytest.mark.parametrize("vocab, chunk_logits", [(300, 1 << 17), (300, 100), (40, 1 << 17)])
def test_the_losss_bytes(monkeypatch, vocab, chunk_logits):
    """A chunk's logits, both gradients, and the final norm's input and output."""
    chunks, step = [], loss.nats_of_rows
    monkeypatch.setattr(loss, "nats_of_rows", lambda logits, *args: chunks.append(logits.nbytes) or step(logits, *args))
    monkeypatch.setattr(loss, "CHUNK_LOGITS", chunk_logits)
    c = change(small(), data=dict(batch=5))
    x, weight = torch.randn(5 * T, 64, requires_grad=True), torch.randn(vocab, 64, requires_grad=True)
    held = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: held.append(x.nbytes), lambda x: x):
        loss.linear_cross_entropy(x, weight, torch.zeros(5 * T, dtype=torch.int64))
    s = plan.shape(c, on_meta(c, vocab))
    assert plan.loss_bytes(s) == dict(forward=chunks[0] + sum(held) + 2 * x.nbytes,
                                      backward=2 * weight.nbytes + 3 * x.nbytes)
    for world, copy in ((1, 0), (2, 0.5)):                              # under DDP the weight in bfloat16 as well
        assert plan.loss_bytes(replace(s, e=2, world=world))["forward"] == (
            chunks[0] / 2 + weight.nbytes * (1 + copy) + 3 * x.nbytes / 2)


@pytest.mark.parametrize("chunk", [0, 4096])
def test_longer_rows_need_more_and_each_kind_less(chunk):
    by_way = {}
    for kind, offload in plan.WAYS:
        sizes = [plan.peak(peer(kind=kind, offload=offload, mlp_chunk=chunk, seq_len=n << 10))[0]
                 for n in (4, 16, 64, 256)]
        assert sizes == sorted(set(sizes))
        by_way[kind, offload] = sizes[-1]
    none, selective, parked, full, offload = by_way.values()
    assert none > selective > max(parked, full) and min(parked, full) > offload
    assert plan.peak(peer(kind="none", mlp_chunk=4096))[0] < plan.peak(peer(kind="none"))[0]


@pytest.mark.parametrize("kind, offload", plan.WAYS)
def test_the_longest_row_fits_and_a_longer_one_does_not(kind, offload):
    for chunk in (0, 3072):
        s = peer(kind=kind, offload=offload, mlp_chunk=chunk)
        longest = plan.longest(s, 79.1)
        assert longest % 1024 == 0 == longest % (chunk or 1) and longest > 0
        assert plan.fits(replace(s, seq_len=longest), 79.1)
        assert not plan.fits(replace(s, seq_len=int(1.15 * longest)), 79.1)
        assert not plan.fits(replace(s, seq_len=longest + max(chunk, 1024)), 79.1)
    assert plan.longest(s, 20.0) == 0


@SHAPES
def test_parameters_and_flops_are_the_models(m):
    c = small(replace(m, n_layer=4, window=40, window_pattern="LS"))
    model, s = real(c), plan.shape(c, on_meta(c, 50))
    assert s.total == sum(p.numel() for p in model.parameters())
    longer = change(c, data=dict(seq_len=2 * T))
    assert replace(s, seq_len=2 * T).total == sum(p.numel() for p in real(longer).parameters())
    pairs = [flops.attended_pairs(None, 1, T, w) for w in (0, 40, 0, 40)]
    text = plan.report(c, "H200", on_meta(c, 50))
    assert f"{s.total:,}" in text and f"{flops.train_flops(model, T, pairs) / T / 1e9:.5g} G as perf/mfu " in text
    full = flops.full_flops_per_token(s.params, 4, 64, T)
    assert f"{full / 1e9:.5g} G as perf/mfu_full" in text
    assert s.params == s.total - (T * 64 if m is GPT2 else 0)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_the_optimizers_state(name):
    c = change(small(), optim=dict(name=name))
    model = real(c)
    optimizer = Optimizer(model, c.optim)
    run(model, c).backward()
    optimizer.step(1e-3)
    tensors = [x for part in optimizer.parts.values() for state in part.state.values() for x in state.values()]
    held = sum(x.nbytes for x in tensors if torch.is_tensor(x) and x.dim())     # not the count of steps
    assert plan.peak(plan.shape(c, on_meta(c, 50)))[2]["optimizer"] == held


def test_gradients_grow_through_the_backward():
    s = peer()
    parts = list(plan.moments(s).values())
    sizes = [m["gradients"] for m in parts]
    assert sizes[0] == 0 and sizes[2:-2] == sorted(set(sizes[2:-2])) and sizes[-1] == 2 * s.total
    assert sizes[2] > s.g * s.head                          # tied: the last layer's, and the head's
    kept = [m["kept"] for m in parts]
    assert kept[0] == kept[2] == 24 * kept[-3] > 0 == kept[-1]
    untied = change(configs.load("configs/peer_gpt2_1300m.py"), model=dict(tied_embeddings=False))
    assert shape(untied).head + s.total == shape(untied).total
    assert sizes[-2] == 2 * (s.total + s.head)                          # tied: the embedding's own beside the head's
    assert plan.moments(shape(untied))["in the backward of the embedding"]["gradients"] == 2 * shape(untied).total
    waits = plan.moments(shape(untied))["in the backward of layer 1 of 24"]["gradients"]
    assert waits == 2 * (s.total - s.positions * s.seq_len)             # the embedding's is yet to come


def test_accumulation_keeps_all_gradients_all_the_time():
    c = configs.load("configs/peer_gpt2_1300m.py")
    once, twice = (shape(change(c, train=dict(tokens_per_step=n * c.data.seq_len))) for n in (1, 2))
    assert plan.moments(once)["in the forward of the loss"]["gradients"] == 0
    assert plan.moments(twice)["in the forward of the loss"]["gradients"] == 4 * once.total
    shared = plan.shape(change(c, train=dict(tokens_per_step=2 * c.data.seq_len)), on_meta(c), world=2)
    assert twice.accumulates and not shared.accumulates
    assert plan.moments(replace(once, world=2))["in the forward of the loss"]["gradients"] == 4 * once.total    # DDP's


def test_weights_and_their_float32_masters():
    c = small(dtype="bfloat16")
    for half, world in ((torch.bfloat16, 1), (None, 2)):
        model = real(c)
        masters = Optimizer(model, c.optim, half=half).masters
        held = sum(p.nbytes + (m.nbytes if m is not p else 0) for p, m in masters.items())
        assert plan.peak(plan.shape(c, on_meta(c, 50), world))[2]["weights"] == pytest.approx(held, rel=0.01)


@pytest.mark.parametrize("name, gib", [("NVIDIA H100 80GB HBM3", 79.1), ("NVIDIA A100-SXM4-40GB", 39.4),
                                       ("NVIDIA A100-SXM4-80GB", 79.1), ("nvidia geforce rtx 4090", 23.5),
                                       ("NVIDIA H200", 139.8), ("NVIDIA H100 NVL", 93.0)])
def test_known_gpus(name, gib):
    assert plan.usable_gib(name) == gib


@pytest.mark.parametrize("name", ["Voodoo2", "A100", "NVIDIA GeForce RTX 4090 Laptop GPU", ""])
def test_an_unknown_gpu_is_refused(name):
    c = small()
    with pytest.raises(ValueError, match=f"no memory known for the GPU '{name}'; known: H200, .*RTX 5090"):
        plan.report(c, name, on_meta(c))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_report_of_every_config(path):
    c = configs.load(path)
    model, s = on_meta(c), shape(c)
    text = plan.report(c, "NVIDIA H200", model)
    assert max(map(len, text.splitlines())) <= 100
    size, when, parts = plan.peak(s)
    assert size == sum(parts.values()) and f"{size / plan.GIB:.3f}  {when}" in text
    assert f"{sum(p.numel() for p in model.parameters()):,}" in text and f"now {c.data.seq_len:,}" in text
    for part, name in plan.NAMES.items():
        assert re.search(rf"^{name} +{parts[part] / plan.GIB:.3f} ", text, re.M)
    for kind, offload in plan.WAYS:
        longest = plan.longest(replace(s, kind=kind, offload=offload), 139.8)
        assert re.search(rf"^{kind}{', offload' * offload} +{longest:,}( |$)", text, re.M)
    assert "fits, " in text and "does not fit" not in text


def test_report_says_what_does_not_fit():
    c = change(configs.load("configs/peer_gpt2_1300m.py"), train=dict(checkpointing="full", offload=True))
    text = plan.report(c, "RTX 3090", on_meta(c))
    assert re.search(r"RTX 3090: 23.6 GiB, 2.5 of them .*: does not fit, 0.\d GiB too much", text)
    assert re.search(r"^host memory +1.500$", text, re.M)           # 24 layers x 16k tokens x 2048 x 2 bytes


def test_dense_attention_costs_its_square():
    """TRAINING.md's masks of SDPA: documents of 64k tokens are 4 GiB of bool; written-out scores do not fit at all."""
    c = configs.load("configs/gpt2_350m_64k.py")
    by_name = {name: plan.peak(shape(change(c, model=dict(attention=name))))
               for name in ("auto", "flash_attn2", "flex", "sdpa", "sdpa:math", "reference")}
    ours = by_name["flash_attn2"][0]
    assert by_name["auto"][0] == by_name["flex"][0] == ours
    assert by_name["sdpa"][2]["square"] == 4 * plan.GIB and by_name["sdpa"][0] == ours + 4 * plan.GIB
    assert by_name["reference"][0] > by_name["sdpa:math"][0] > ours + 400 * plan.GIB
    dense = change(c, model=dict(attention="sdpa"), data=dict(document_mask=False))
    assert plan.peak(shape(dense))[2]["square"] == 0


def advised(**sections) -> str:
    c = change(configs.load("configs/peer_gpt2_1300m.py"), **sections)
    return plan.advice(c, on_meta(c))


def test_advice_names_the_largest_part_and_what_to_change():
    rows = dict(seq_len=64 * 1024)
    assert "is activations kept, 60.09 GiB. Try --train.checkpointing selective: " in advised(data=rows)
    assert "Try --train.checkpointing full: " in advised(data=rows, train=dict(checkpointing="selective"))
    assert "Try --train.offload: " in advised(data=dict(seq_len=2**19), train=dict(checkpointing="full"))
    offload = dict(checkpointing="full", offload=True)
    assert "Try --train.mlp-chunk 8192: " in advised(data=rows, train=offload)
    assert "Try --data.batch 3: " in advised(data=rows | dict(batch=6))
    last = advised(data=rows, train=offload | dict(mlp_chunk=8192))
    assert "is optimizer, 10." in last and "All that is left are shorter rows, --data.seq-len 32768: " in last
    odd = advised(data=dict(seq_len=1001), train=dict(checkpointing="full", offload=True, tokens_per_step=3003))
    assert "--data.seq-len 143: " in odd                            # 500 would not divide the step


def test_advice_says_how_far_the_peak_falls():
    fall = re.search(r"falls by (\d+\.\d\d) GiB", advised())[1]
    before, after = (plan.peak(peer(kind=kind))[0] / plan.GIB for kind in ("none", "selective"))
    assert float(fall) == pytest.approx(before - after, abs=0.006)
