"""Activation checkpointing: the same numbers whatever is kept, attention run as often as said, less memory."""
import collections
import dataclasses
import functools

import pytest
import torch
from test_model import MODERN, SMALL
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import loss as loss_module
from flash_attn2 import backends, ops
from model import GPT
from runtime.memory import ATTENTION, Parked, block_runner

KINDS = dict(none=dict(kind="none"), selective=dict(kind="selective"), full=dict(kind="full"),
             parked=dict(kind="selective", offload=True), offload=dict(kind="full", offload=True))


def build(kind: str, c=MODERN, backend: str = "sdpa", T: int = 32, device: str = "cpu", dtype=torch.float32,
          **options) -> GPT:
    attention = backends.build(backend, torch.device(device), dtype, c.d_model // c.n_head, plain=False,
                               grouped=c is MODERN)
    torch.manual_seed(0)
    return GPT(c, 50, T, attention, block_runner(**KINDS[kind], **options)).to(device)


def batch(T: int = 32) -> tuple[Tensor, Tensor, Tensor]:
    tokens = torch.randint(50, (2, T + 1))
    doc_start = torch.zeros(2, T, dtype=torch.int64)
    doc_start[1, 11:] = 11
    return tokens[:, :-1], tokens[:, 1:], doc_start


def gradients(model, tokens, targets, doc_start) -> list[Tensor]:
    loss = model(tokens, targets, doc_start)
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


@pytest.mark.parametrize("c", [SMALL, MODERN, dataclasses.replace(SMALL, window=9, window_pattern="LS")],
                         ids=["gpt2", "modern", "windows"])
@pytest.mark.parametrize("kind", list(KINDS)[1:])
def test_what_is_kept_changes_no_bit(kind, c):
    args = batch()
    for got, want in zip(gradients(build(kind, c), *args), gradients(build("none", c), *args), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("chunk", [8, 32])
@pytest.mark.parametrize("kind", KINDS)
def test_an_mlp_by_chunks_gives_the_same(kind, chunk):
    """To rounding: the gradients of its weights are sums over chunks."""
    args = batch()
    chunked, whole = gradients(build(kind, mlp_chunk=chunk), *args), gradients(build("none"), *args)
    for got, want in zip(chunked, whole, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


ONCE = dict(none=3, selective=3, full=6, parked=3, offload=6)         # of three layers


@pytest.mark.parametrize("backend", ["flash_attn2", "sdpa"])
def test_selective_never_runs_attention_twice(backend):
    """pytorch#153334: whether the policy sees a custom op behind an autograd.Function."""
    c, counts = dataclasses.replace(SMALL, n_layer=3), {}
    for kind in KINDS:
        tokens, targets, _ = batch(8)
        with Counter() as counter:
            build(kind, c, backend, T=8)(tokens, targets).backward()
        counts[kind] = sum(counter.ran[name] for name in ATTENTION)
    assert counts == ONCE


@pytest.mark.parametrize("chunk", [0, 8])
def test_nor_does_it_under_compile(chunk, monkeypatch):
    """As train.py compiles: one block, which all layers of a kind share, without a graph break. Nothing new is compiled
    after the first step, whatever documents come."""
    c = dataclasses.replace(SMALL, n_layer=4, n_head=1, d_model=16, window=9, window_pattern="LS")
    counts, real = collections.Counter(), ops.forward
    monkeypatch.setattr(ops, "forward", lambda *args: counts.update([kind]) or real(*args))
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    for kind in KINDS:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = build(kind, c, "flash_attn2", T=16, compiled=True, mlp_chunk=chunk)
        graphs = []
        for _ in range(2):
            tokens, targets, doc_start = batch(16)
            for documents in (doc_start, None):
                model(tokens, targets, documents).backward()
                with torch.no_grad():
                    model(tokens, targets, documents)
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        # L, S; packed, whole; to train, to judge; and an MLP by itself to train, to judge
        assert graphs == graphs[:1] * 2 and graphs[0] <= 8
    assert counts == dict(none=32, selective=32, full=48, parked=32, offload=48)    # 4 layers x (train, judge, again)


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_blocks_give_the_same(kind, monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    args = batch()
    for got, want in zip(gradients(build(kind, compiled=True), *args), gradients(build("none"), *args), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


class Counter(TorchDispatchMode):
    """How often each op runs."""

    def __init__(self):
        super().__init__()
        self.ran = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ran[func.name().removesuffix(".default")] += 1
        return func(*args, **kwargs or {})


def test_both_halves_of_a_block_park_in_one_chain(monkeypatch):
    """In the order of the forward, which the backward goes back: attention's input, then the MLP's chunks."""
    chain, real = [], Parked.__init__
    monkeypatch.setattr(Parked, "__init__", lambda self, x, stream, before: chain.append(
        (self, x.shape[1], before)) or real(self, x, stream, before))
    build("offload", dataclasses.replace(MODERN, n_layer=2), mlp_chunk=16)(*batch()).backward()
    assert [tokens for _, tokens, _ in chain] == [32, 16, 16] * 2
    assert [before for *_, before in chain] == [None, *(parked for parked, *_ in chain[:-1])]


def test_what_is_parked_comes_back_in_order():
    """Each input is asked for while the block above is still at work: when one is taken, the one before is fetched."""
    x = [torch.full((4,), float(i)) for i in range(3)]
    parked = []
    for t in x:
        parked.append(Parked(t, None, parked[-1] if parked else None))
    assert [p.back for p in parked] == [None] * 3
    assert torch.equal(parked[2].take(), x[2])
    assert torch.equal(parked[1].back, x[1]) and parked[0].back is None and parked[2].host is None
    assert torch.equal(parked[1].take(), x[1]) and torch.equal(parked[0].take(), x[0])
    parked[2].fetch()
    assert parked[2].before is None                             # or every one of a run would hang on the last
    with pytest.raises(RuntimeError, match="comes back once"):
        parked[2].take()
    assert parked[2].back is None                               # taken once: a later one must not fetch it again


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", ["parked", "offload"])
def test_offload_parks_block_inputs_and_nothing_else(kind, compiled, monkeypatch):
    """Between forward and backward nobody else holds them, or a GPU would not be rid of them."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    parked, real = [], Parked.__init__
    monkeypatch.setattr(Parked, "__init__", lambda self, x, *rest: parked.append(
        ((*x.shape,), StorageWeakRef(x.untyped_storage()))) or real(self, x, *rest))
    model = build(kind, dataclasses.replace(MODERN, n_layer=3), compiled=compiled)
    loss = model(*batch())
    assert [shape for shape, _ in parked] == [(2, 32, MODERN.d_model)] * 3
    assert [x.expired() for _, x in parked] == [True] * 3
    loss.backward()
    with torch.no_grad():
        model(*batch())
    assert len(parked) == 3


@pytest.mark.gpu
@pytest.mark.parametrize("chunk", [0, 2048])
def test_on_a_gpu_memory_falls_and_numbers_stay(chunk):
    """Gradients of every kind are as near to none's as rounding leaves; each needs less."""
    c, T = dataclasses.replace(MODERN, n_layer=16, d_model=256, n_head=4, n_kv_head=2, qk_norm=True), 32 * 1024
    tokens, targets = torch.randint(50, (2, 1, T), device="cuda")
    found, peaks = {}, {}
    for kind in KINDS:
        torch._dynamo.reset()
        model = build(kind, c, "flash_attn2", T=T, device="cuda", dtype=torch.bfloat16, compiled=True,
                      mlp_chunk=chunk)
        for _ in range(2):                                      # the first compiles
            model.zero_grad(set_to_none=True)
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(tokens, targets)
            loss.backward()
        peaks[kind] = torch.cuda.max_memory_allocated() - before
        found[kind] = [loss.detach(), *(p.grad for p in model.parameters())]
        del model
    for kind in list(KINDS)[1:]:
        for got, want in zip(found[kind], found["none"], strict=True):
            assert (got - want).norm() <= 0.02 * want.norm() + 1e-3
    assert peaks["none"] > peaks["selective"] > max(peaks["parked"], peaks["full"]), peaks
    assert min(peaks["parked"], peaks["full"]) > peaks["offload"], peaks


@pytest.mark.gpu
def test_at_64k_other_chunks_give_the_same_gradients(monkeypatch):
    """Of the loss and of the MLP, in bfloat16. The loss's sums are float32's, to the last bit or two; an MLP's weights
    get a gradient from each of its 16 chunks, rounded to bfloat16 as they are added."""
    c, T, found = dataclasses.replace(SMALL, d_model=256, bias=False), 64 * 1024, {}
    tokens, targets = torch.randint(50, (2, 1, T), device="cuda")
    for name, logits, mlp_chunk in (("one", 2**28, 0), ("loss", 2**16, 0), ("mlp", 2**28, 4096)):
        monkeypatch.setattr(loss_module, "CHUNK_LOGITS", logits)
        torch._dynamo.reset()
        model = build("selective", c, "flash_attn2", T=T, device="cuda", dtype=torch.bfloat16, compiled=True,
                      mlp_chunk=mlp_chunk)
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(tokens, targets)
        found[name] = [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]
    for name, bound in (("loss", 0.002), ("mlp", 0.01)):
        for got, want in zip(found[name], found["one"], strict=True):
            assert (got - want).norm() <= bound * want.norm(), (name, got.shape, (got - want).norm() / want.norm())


def test_unknown_kinds_are_refused():
    from config import Config, change, check_types
    with pytest.raises(ValueError, match="train.checkpointing='some' must be one of 'none', 'selective', 'full'"):
        check_types(change(Config(), train=dict(checkpointing="some")))


def test_offload_needs_a_kind_that_keeps_inputs():
    from config import Config, change, validate
    with pytest.raises(ValueError, match="train.offload=True needs train.checkpointing='selective' or 'full'"):
        validate(change(Config(), train=dict(offload=True)))


@pytest.mark.parametrize("attention", ["reference", "sdpa:math", "flex"])
def test_selective_is_refused_where_it_could_not_keep_attention(attention):
    from config import Config, change, validate
    with pytest.raises(ValueError, match=f"'selective' cannot keep the attention of model.attention='{attention}'"):
        validate(change(Config(), model=dict(attention=attention), train=dict(checkpointing="selective")))


def test_a_chunk_must_divide_the_row():
    from config import Config, change, validate
    with pytest.raises(ValueError, match="data.seq_len=1000 must be a multiple of train.mlp_chunk=512"):
        validate(change(Config(), data=dict(seq_len=1000), train=dict(mlp_chunk=512)))
