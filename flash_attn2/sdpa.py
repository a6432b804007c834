"""Our kernels as torch's flash attention: F.scaled_dot_product_attention and varlen_attn call them, unchanged code too.

    activate_sdpa()
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):      # torch may prefer cuDNN: only its flash kernel is replaced
        F.scaled_dot_product_attention(q, k, v, is_causal=True)
    restore_sdpa()

Importing registers a name with torch (torch.nn.attention, 2.11 and later) and changes nothing. Activating overrides
four aten operators for CUDA tensors; autograd, the shapes that torch.compile assumes, and which calls get here stay
torch's. is_causal means bottom right here, as in torch's flash kernel: the last query stands at the last key. What we
cannot do is an error, never another kernel.
"""
import torch
from torch import Tensor
from torch.library import Library
from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    register_flash_attention_impl,
    restore_flash_attention_impl,
)

from .dispatch import backward, forward
from .masks import Mask, sides, varlen_mask
from .ops import check, scale_of

NAME = "nanolong_flash_attn2"


def activate_sdpa() -> None:
    """From now on torch's flash attention of CUDA tensors is ours, in the whole process, until `restore_sdpa`. Twice is
    once. A CPU's stays torch's: without a GPU this changes nothing."""
    if current_flash_attention_impl() != NAME:
        activate_flash_attention_impl(NAME)


def restore_sdpa() -> None:
    """Torch's flash attention is torch's own again; another library's, if that is active, stays."""
    if current_flash_attention_impl() == NAME:
        restore_flash_attention_impl()


class _Overrides:
    """Lives while ours are active: torch drops a library's kernels when its last reference goes."""

    def __init__(self):
        self.library = Library("aten", "IMPL", "CUDA")
        for name, function in OVERRIDES.items():
            self.library.impl(name, function, "CUDA")

    def remove(self) -> None:
        self.library = None


def scaled_dot_product_forward(query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0,
                               is_causal: bool = False, return_debug_mask: bool = False, *, scale: float | None = None):
    """aten::_scaled_dot_product_flash_attention: query (B, H, Tq, D), key and value (B, H_kv, Tk, D) of any strides ->
    output (B, H, Tq, D) laid out as query, lse (B, H, Tq) float32 in nats, two absent tensors, Tq, Tk, three dummies.
    A query without keys gets output 0 and lse -inf. ValueError, TypeError: as ops.check, dropout and a debug mask."""
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    Tq, Tk = q.shape[1], k.shape[1]
    out, lse, *dummies = flash_attention_forward(q, k, v, None, None, Tq, Tk, dropout_p, is_causal, return_debug_mask,
                                                 scale=scale)
    return out.transpose(1, 2), lse, None, None, Tq, Tk, *dummies


def scaled_dot_product_backward(grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor,
                                cum_seq_q: None, cum_seq_k: None, max_q: int, max_k: int, dropout_p: float,
                                is_causal: bool, rng_state, unused, *,
                                scale: float | None = None) -> tuple[Tensor, ...]:
    """aten::_scaled_dot_product_flash_attention_backward: gradients of query, key, value, laid out as these."""
    tensors = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
    grads = flash_attention_backward(*tensors, lse, None, None, max_q, max_k, dropout_p, is_causal, rng_state,
                                     unused, scale=scale)
    return tuple(g.transpose(1, 2) for g in grads)


def flash_attention_forward(query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Tensor | None,
                            cum_seq_k: Tensor | None, max_q: int, max_k: int, dropout_p: float, is_causal: bool,
                            return_debug_mask: bool, *, scale: float | None = None,
                            window_size_left: int | None = None, window_size_right: int | None = None,
                            num_splits: int | None = None, **others):
    """aten::_flash_attention_forward: packed query (total_q, H, D), key and value (total_k, H_kv, D), whose sequences
    begin and end at cum_seq (N + 1,) int32; or (B, T, H, D) without them. -> output as query, lse float32 in nats,
    (H, total_q) or (B, H, Tq), and three dummies. Windows are keys on either side, None or -1 for no bound. Tokens
    past the last sequence get output 0 and no gradient.
    ValueError: dropout, a debug mask, and whatever `others` (alibi_slopes, seqused_k, block_table, ...) ask for."""
    _refuse(dropout_p=dropout_p, return_debug_mask=return_debug_mask, **others,
            num_splits=None if num_splits == 1 else num_splits)
    q, k, v = _rows(cum_seq_q, query, key, value)
    mask = _mask(cum_seq_q, cum_seq_k, q.shape[1], k.shape[1], is_causal, window_size_left, window_size_right)
    check(q, k, v, mask, scale)
    o, lse = forward(q, k, v, mask, scale_of(q, scale))
    o, lse = (o, lse) if cum_seq_q is None else (o[0], lse[0])
    rng_state, unused = (query.new_empty(shape, dtype=torch.uint64) for shape in ((2,), ()))
    return _laid_out_as(query, o), lse, rng_state, unused, query.new_empty(0)


def flash_attention_backward(grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor,
                             cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int, max_k: int,
                             dropout_p: float, is_causal: bool, rng_state, unused, *, scale: float | None = None,
                             window_size_left: int | None = None,
                             window_size_right: int | None = None) -> tuple[Tensor, ...]:
    """aten::_flash_attention_backward: gradients of query, key, value, laid out as these. ValueError: dropout."""
    _refuse(dropout_p=dropout_p)
    do, q, k, v, o, lse = _rows(cum_seq_q, grad_out, query, key, value, out, lse)
    mask = _mask(cum_seq_q, cum_seq_k, q.shape[1], k.shape[1], is_causal, window_size_left, window_size_right)
    grads = backward(do, None, q, k, v, o, lse.contiguous(), mask, scale_of(q, scale))
    return tuple(_laid_out_as(x, g.view_as(x)) for x, g in zip((query, key, value), grads, strict=True))


def _refuse(**asked) -> None:
    for name, value in asked.items():
        if isinstance(value, Tensor) or value:
            raise ValueError(f"{name}={value}: {NAME} cannot do that; restore_sdpa() gives torch's kernels back")


def _rows(cum_seq: Tensor | None, *tensors: Tensor) -> tuple[Tensor, ...]:
    """(B, T, H, D) as it is; packed sequences become one batch row, of documents."""
    return tensors if cum_seq is None else tuple(x[None] for x in tensors)


def _mask(cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, Tq: int, Tk: int, is_causal: bool,
          left: int | None, right: int | None) -> Mask:
    """One closed form for dense rows, vectors for packed sequences. left, right as torch gives them."""
    left, right = sides(left, right, is_causal)
    if cum_seq_q is None:
        return Mask(left, right)
    return varlen_mask(cum_seq_q, cum_seq_k, Tq, Tk, left, right)


def _laid_out_as(model: Tensor, x: Tensor) -> Tensor:
    """x, copied unless it has the strides of torch.empty_like(model): torch's kernels give those, compiled code too."""
    if x.stride() == torch.empty_like(model, device="meta").stride():
        return x
    return torch.empty_like(model).copy_(x)


OVERRIDES = {
    "_scaled_dot_product_flash_attention": scaled_dot_product_forward,
    "_scaled_dot_product_flash_attention_backward": scaled_dot_product_backward,
    "_flash_attention_forward": flash_attention_forward,
    "_flash_attention_backward": flash_attention_backward,
}
register_flash_attention_impl(NAME, register_fn=_Overrides)
