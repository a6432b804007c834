"""The loss without logits: the full version's nats and gradients, whatever the chunks, and never more than a chunk."""
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from loss import CHUNK_LOGITS, IGNORE, add_product, linear_cross_entropy, nats_of_rows, nats_of_rows_on_gpu


def inputs(N: int, V: int = 37, d: int = 16, dtype=torch.float32, device="cpu") -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(N, d, dtype=dtype, device=device, requires_grad=True)
    weight = torch.randn(V, d, dtype=dtype, device=device, requires_grad=True)
    targets = torch.randint(V, (N,), device=device)
    targets[::5] = IGNORE
    return x, weight, targets


def full(x, weight, targets):
    """With all logits at once, float32 or better."""
    return F.cross_entropy((x @ weight.T).float() if x.dtype != torch.float64 else x @ weight.T, targets,
                           ignore_index=IGNORE, reduction="sum")


def results(loss, x, weight, scale: float = 1.0) -> list[Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss * scale, (x, weight))]


@pytest.mark.parametrize("chunk", [0, 1, 7, 50, 64])
@pytest.mark.parametrize("N", [1, 50])
def test_equals_the_full_version(N, chunk):
    x, weight, targets = inputs(N)
    exact = results(full(x.double(), weight.double(), targets), x, weight, 0.3)
    for got, want in zip(results(linear_cross_entropy(x, weight, targets, chunk), x, weight, 0.3), exact, strict=True):
        torch.testing.assert_close(got.double(), want.double(), rtol=1e-5, atol=1e-5)


def test_any_leading_dimensions():
    x, weight, targets = inputs(24)
    assert torch.equal(linear_cross_entropy(x.view(2, 3, 4, 16), weight, targets.view(2, 3, 4)),
                       linear_cross_entropy(x, weight, targets))


def test_nothing_to_predict():
    x, weight, targets = inputs(9)
    loss, dx, dweight = results(linear_cross_entropy(x, weight, targets.fill_(IGNORE), 4), x, weight)
    assert loss == 0 and (dx == 0).all() and (dweight == 0).all()


def test_what_is_ignored_changes_nothing():
    x, weight, targets = inputs(20)
    _, dx, dweight = results(linear_cross_entropy(x, weight, targets, 8), x, weight)
    assert (dx[targets == IGNORE] == 0).all()
    keep = targets != IGNORE
    x2 = x.detach()[keep].requires_grad_()
    torch.testing.assert_close(results(linear_cross_entropy(x2, weight, targets[keep], 8), x2, weight)[2], dweight)


def test_a_tied_weight_gets_both_gradients():
    """The embedding's and lm_head's, as in GPT-2."""
    _, weight, targets = inputs(20)
    tokens = torch.randint(37, (20,))
    for loss in (full, linear_cross_entropy):
        loss(F.embedding(tokens, weight) + 1.0, weight, targets).backward()
        if loss is full:
            expected, weight.grad = weight.grad, None
    torch.testing.assert_close(weight.grad, expected, rtol=1e-5, atol=1e-5)


def test_gradients_accumulate():
    x, weight, targets = inputs(40)
    linear_cross_entropy(x, weight, targets, 16).backward()
    once = weight.grad.clone()
    for rows in (slice(0, 13), slice(13, 40)):
        linear_cross_entropy(x[rows], weight, targets[rows], 16).backward()
    torch.testing.assert_close(weight.grad, 2 * once, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_autocast_is_as_near_as_the_full_version(device):
    """With bfloat16 products: at most 1.5 times as far from float64."""
    x, weight, targets = inputs(300, 500, 64, device=device)
    exact = results(full(x.double(), weight.double(), targets), x, weight)
    with torch.autocast(device, torch.bfloat16):
        theirs, mine = (results(loss(x, weight, targets), x, weight)
                        for loss in (full, lambda *args: linear_cross_entropy(*args, 128)))
    assert [t.dtype for t in mine] == [torch.float32] * 3
    for ours, full_ones, want in zip(mine, theirs, exact, strict=True):
        mistake, allowed = ((t.double() - want).norm() for t in (ours, full_ones))
        assert mistake <= 1.5 * allowed + 1e-3


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("V", [1, 37, 8192, 8193, 50304])
def test_the_kernel_is_the_step(V, gradients, device):
    """softmax_kernel (on a CPU through the interpreter) against nats_of_rows, in rows of a wider matrix."""
    logits = 5 * torch.randn(6, V + 3, device=device)[:, :V]
    logits[1] += 1e4                                        # no overflow where all are large
    targets = torch.randint(V, (6,), device=device)
    targets[2] = IGNORE
    ours, theirs = logits.clone(), logits.clone()
    expected = nats_of_rows(theirs, targets, gradients)
    torch.testing.assert_close(nats_of_rows_on_gpu(ours, targets, gradients), expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert gradients != torch.equal(ours, logits)


@pytest.mark.parametrize("wrong", [5, -2, -100, 2**32 - 1, 2**32])
def test_a_target_that_is_no_id_gives_nan(wrong):
    assert nats_of_rows_on_gpu(torch.randn(2, 5), torch.tensor([1, wrong]), False).isnan()


def test_logits_of_minus_infinity():
    logits = torch.full((1, 10_000), -float("inf"))
    logits[0, 9000:] = 0.0
    assert nats_of_rows_on_gpu(logits, torch.tensor([9999]), True).item() == pytest.approx(math.log(1000), abs=1e-4)
    assert logits[0, 0] == 0 and logits[0, 9000].item() == pytest.approx(0.001)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_under_compile(dtype):
    """One graph, the same numbers."""
    x, weight, targets = inputs(40, dtype=dtype)
    compiled = torch.compile(linear_cross_entropy, backend="aot_eager", fullgraph=True)
    for got, want in zip(results(compiled(x, weight, targets, 16), x, weight),
                         results(linear_cross_entropy(x, weight, targets, 16), x, weight), strict=True):
        assert torch.equal(got, want)


def test_the_op_is_what_it_says():
    x, weight, targets = inputs(20)
    for gradients in (False, True):
        torch.library.opcheck(torch.ops.nanolong.linear_cross_entropy,
                              (x.detach(), weight.detach(), targets, 8, gradients))


def test_no_gradients_are_formed_where_none_are_wanted(monkeypatch):
    import loss
    x, weight, targets = inputs(20)
    wanted, real = [], loss.nats_of_rows
    monkeypatch.setattr(loss, "nats_of_rows", lambda *args: wanted.append(args[2]) or real(*args))
    with torch.no_grad():
        without = linear_cross_entropy(x, weight, targets)
    assert torch.equal(without, linear_cross_entropy(x, weight, targets).detach()) and wanted == [False, True]


def test_no_second_derivative():
    x, weight, targets = inputs(5)
    loss = linear_cross_entropy(x, weight, targets)
    with pytest.raises(RuntimeError, match="linear_cross_entropy has no second derivative"):
        torch.autograd.grad(loss, x, create_graph=True)


def test_products_are_added_in_float32():
    total, a, b = torch.ones(7, 9), torch.randn(7, 500).bfloat16(), torch.randn(500, 9).bfloat16()
    add_product(total, a, b)
    torch.testing.assert_close(total, 1 + a.float() @ b.float(), rtol=1e-5, atol=1e-5)


def test_flops_are_counted():
    x, weight, targets = inputs(20)
    for gradients, count in ((True, 6), (False, 2)):
        with FlopCounterMode(display=False) as counter:
            torch.ops.nanolong.linear_cross_entropy(x.detach(), weight.detach(), targets, 8, gradients)
        assert counter.get_flop_counts()["Global"][torch.ops.nanolong.linear_cross_entropy] == count * 20 * 37 * 16


def test_targets_of_any_stride():
    x, weight, _ = inputs(6)
    targets = torch.randint(37, (6, 2))[:, 0]
    assert torch.equal(linear_cross_entropy(x, weight, targets), linear_cross_entropy(x, weight, targets.clone()))
    s = torch.randn(6, 37)
    assert targets.stride() == (2,) and not nats_of_rows_on_gpu(s, targets.contiguous(), False).isnan()


def test_errors():
    x, weight, targets = inputs(5)
    for wrong in (targets[:1], targets[:, None]):
        with pytest.raises(ValueError, match="x has shape .5, 16. and targets "):
            linear_cross_entropy(x, weight, wrong)
    with pytest.raises(RuntimeError, match="out of bounds"):
        linear_cross_entropy(x, weight, targets.clamp(max=-2))          # not a target, nor IGNORE
    with pytest.raises(ValueError, match="chunk=-1 must not be negative"):
        linear_cross_entropy(x, weight, targets, -1)
    with pytest.raises(RuntimeError, match="out of bounds"):
        linear_cross_entropy(x, weight, targets + 37)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [8192, 65536])
def test_memory_is_a_chunks(tokens):
    """torchtitan#533: at 64k the full version takes 13 GiB of logits and as much again for their gradient."""
    x, weight, targets = inputs(tokens, 50304, 768, torch.bfloat16, "cuda")
    for _ in range(2):                                      # the first compiles
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        linear_cross_entropy(x, weight, targets).backward()
        peak = torch.cuda.max_memory_allocated() - before
        x.grad = weight.grad = None
    kept = 2 * x.numel() * 2 + weight.numel() * (4 + 4 + 2)     # dx twice, dweight in float32 twice and as bfloat16
    assert peak < 1.2 * (kept + 2 * CHUNK_LOGITS)               # and a chunk's logits, overwritten by their gradient
