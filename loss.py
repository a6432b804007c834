"""Cross entropy without logits: lm_head and loss by chunks of tokens, with the gradients formed on the way.

The logits of 128k tokens over 50k ids are 26 GB in float32, and their gradient as much again. A chunk's are 0.5 GB and
live for a moment: its gradient, softmax - onehot, is at hand as soon as its softmax is, so the gradients of x and of
the weight are formed in the forward, and nothing is computed twice. The backward only multiplies them.
"""
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

IGNORE = -1                 # a target that predicts nothing
CHUNK_LOGITS = 2**28        # of a chunk: large enough for its products to keep a GPU busy


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, chunk: int = 0) -> Tensor:
    """cross_entropy(x weight^T, targets, reduction="sum"): nats, float32, differentiable once in x and weight.

    x (..., d), weight (V, d), targets (...) int64, -1 where there is none. Products and logits are in x's dtype, or
    autocast's; softmax and all sums over tokens in float32. chunk: tokens at a time, 0 for CHUNK_LOGITS / V."""
    if chunk < 0:
        raise ValueError(f"{chunk=} must not be negative")
    if x.dim() < 2 or targets.shape != x.shape[:-1]:
        raise ValueError(f"x has shape {tuple(x.shape)} and targets {tuple(targets.shape)}: must be (..., d) and (...)")
    dtype = compute_dtype(x)
    chunk = chunk or chunk_tokens(len(weight))
    gradients = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    return LinearCrossEntropy.apply(x.flatten(0, -2), weight, targets.flatten().contiguous(), dtype, chunk, gradients)


def chunk_tokens(V: int) -> int:
    """How many tokens' logits over V ids exist at a time."""
    return max(128, CHUNK_LOGITS // V // 128 * 128)


def compute_dtype(x: Tensor) -> torch.dtype:
    """What products with x are computed in: autocast's dtype, else x's own."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


class LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, targets, dtype, chunk, gradients):
        nats, dx, dweight = torch.ops.nanolong.linear_cross_entropy(
            x.to(dtype), weight.to(dtype), targets, chunk, gradients)
        ctx.save_for_backward(dx, dweight)
        ctx.dtypes = x.dtype, weight.dtype
        return nats

    @staticmethod
    def backward(ctx, gradient):
        if torch.is_grad_enabled():
            raise RuntimeError("linear_cross_entropy has no second derivative")
        dx, dweight = (d.to(dtype) * gradient for d, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True))
        return dx, dweight, None, None, None, None


@torch.library.custom_op("nanolong::linear_cross_entropy", mutates_args=())
def chunked(x: Tensor, weight: Tensor, targets: Tensor, chunk: int, gradients: bool) -> tuple[Tensor, Tensor, Tensor]:
    """-> nats summed, d nats / d x as x, d nats / d weight in float32; the last two empty without `gradients`."""
    nats_of = nats_of_rows_on_gpu if x.is_cuda else nats_of_rows
    nats = torch.zeros((), dtype=torch.float32, device=x.device)
    dx = torch.empty_like(x) if gradients else x.new_empty(0)
    dweight = weight.new_zeros(weight.shape if gradients else 0, dtype=torch.float32)
    with torch.autocast(x.device.type, enabled=False):
        for i in range(0, len(x), chunk):
            rows = slice(i, i + chunk)
            logits = x[rows] @ weight.T
            nats += nats_of(logits, targets[rows], gradients)
            if gradients:
                torch.mm(logits, weight, out=dx[rows])
                add_product(dweight, logits.T, x[rows])
    return nats, dx, dweight


@chunked.register_fake
def _(x, weight, targets, chunk, gradients):
    return (x.new_empty((), dtype=torch.float32), torch.empty_like(x) if gradients else x.new_empty(0),
            weight.new_empty(weight.shape if gradients else 0, dtype=torch.float32))


@register_flop_formula(torch.ops.nanolong.linear_cross_entropy)
def _(x_shape, weight_shape, targets_shape, chunk, gradients, *args, out_shape=None, **kwargs) -> int:
    return (6 if gradients else 2) * x_shape[0] * weight_shape[0] * weight_shape[1]


def nats_of_rows(logits: Tensor, targets: Tensor, gradients: bool) -> Tensor:
    """Of logits (N, V): nats summed. With `gradients` softmax - onehot, 0 where there is no target, overwrites them."""
    s, valid = logits.float(), targets != IGNORE
    lse = s.logsumexp(1, keepdim=True)
    target = torch.where(valid, targets, 0)[:, None]
    nats = torch.where(valid, (lse - s.gather(1, target))[:, 0], 0.0).sum()
    if gradients:
        onehot = target == torch.arange(s.shape[1], device=s.device)
        logits.copy_(torch.where(valid[:, None], (s - lse).exp() - onehot.float(), 0.0))
    return nats


def nats_of_rows_on_gpu(logits: Tensor, targets: Tensor, gradients: bool) -> Tensor:
    """nats_of_rows in one launch: a row is read from memory once, again from cache, and written once."""
    N, V = logits.shape
    nats = torch.empty(N, dtype=torch.float32, device=logits.device)
    # 16 elements a thread: four loads of 16 bytes in flight, and two rows on an SM
    softmax_kernel[(N,)](logits, targets, nats, V, logits.stride(0), IGNORE, gradients, BLOCK=8192, num_warps=16)
    return nats.sum()


@triton.jit
def softmax_kernel(logits_ptr, targets_ptr, nats_ptr, V, row_stride, IGNORE: tl.constexpr, GRADIENTS: tl.constexpr,
                   BLOCK: tl.constexpr):
    """One row of V logits and its target. A target that is no id gives NaN; on a CPU it is an error."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * row_stride
    target = tl.load(targets_ptr + row)
    is_id = (target >= 0) & (target < V)
    ignored = target == IGNORE
    target = tl.where(is_id, target, 0).to(tl.int32)
    m, l = -3.4e38, 0.0                             # largest logit so far, but finite; sum of exp(s - m)
    for first in range(0, V, BLOCK):
        ids = first + tl.arange(0, BLOCK)
        s = tl.load(logits_ptr + ids, mask=ids < V, other=-float("inf")).to(tl.float32)
        larger = tl.maximum(m, tl.max(s, 0))
        l = l * tl.exp(m - larger) + tl.sum(tl.exp(s - larger), 0)
        m = larger
    lse = m + tl.log(l)
    at_target = tl.load(logits_ptr + target, mask=is_id, other=float("nan")).to(tl.float32)
    tl.store(nats_ptr + row, tl.where(ignored, 0.0, lse - at_target))
    if GRADIENTS:
        for first in range(0, V, BLOCK):
            ids = first + tl.arange(0, BLOCK)
            s = tl.load(logits_ptr + ids, mask=ids < V, other=0.0).to(tl.float32)
            gradient = tl.where(ignored, 0.0, tl.exp(s - lse) - (ids == target).to(tl.float32))
            tl.store(logits_ptr + ids, gradient.to(logits_ptr.dtype.element_ty), mask=ids < V)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total (float32) += a b, whose sums are not rounded to a's dtype on the way; torch has that on CUDA alone."""
    if a.is_cuda and a.dtype != torch.float32:
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(a.float(), b.float())
