"""flash-attn 2.8's public calls: the same arguments in the same order, so existing code changes one import.

    from flash_attn2 import flash_attn_func, flash_attn_varlen_func     # was: from flash_attn import ...

What we have not is an error, never ignored: dropout, alibi_slopes, block_table. `deterministic` takes the
Triton backward where the Hopper one would run, whose dq repeats only to rounding (dispatch.py).
"""
import weakref
from itertools import pairwise
from typing import SupportsIndex

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from .masks import Mask, sides, varlen_mask, without_values
from .ops import check_tensors, flash_attention


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                    alibi_slopes=None, deterministic=False, return_attn_probs=False):
    """Attention of q (B, Tq, H, D) over k, v (B, Tk, H_kv, D), H a multiple of H_kv -> out (B, Tq, H, D) in q's dtype.

    Query i stands at key i + Tk - Tq (bottom right) and sees window_size = (left, right) keys before and after it, -1
    for no bound; causal is right = 0, whatever window_size says. A query that sees no key gives 0. softmax_scale is
    1 / sqrt(D) by default; softcap > 0 bends each logit x to softcap * tanh(x / softcap). With return_attn_probs:
    (out, lse, None), lse (B, H, Tq) float32 in nats, -inf where no key is seen, differentiable too.
    dtypes, strides, autocast and the errors of q, k, v are `flash_attention`'s. ValueError too for what we have not."""
    left, right = _sides(window_size, causal)
    _refuse(dropout_p, alibi_slopes)
    out, lse = flash_attention(q, k, v, Mask(left, right), softmax_scale, softcap, deterministic=deterministic)
    return (out, lse, None) if return_attn_probs else out


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
                           softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
                           deterministic=False, return_attn_probs=False, block_table=None):
    """`flash_attn_func` in each of B packed segments: q (total_q, H, D), k, v (total_k, H_kv, D) -> out as q.

    Segment s holds the queries cu_seqlens_q[s] .. cu_seqlens_q[s + 1] - 1 and likewise the keys, and each stands bottom
    right on its own; either may be empty, B too may be 0. cu_seqlens_q and cu_seqlens_k are (B + 1,) int32,
    contiguous, from 0, never decreasing. Tokens past the last segment see nothing and are not seen: out = 0,
    lse = -inf, gradients 0; but they must be finite, since a tile multiplies them by 0. lse is (H, total_q).
    max_seqlen_q and max_seqlen_k (integers) change nothing: there is no padded grid to size, a tile finds its keys from
    the intervals of its rows.

    Reading the values of cu_seqlens waits for the GPU, so they are checked and the mask is built once for each pair of
    tensors: give every layer the same two. A tensor changed in place is read again where torch counts the change (not
    through .data, NumPy or a foreign kernel). Where the values cannot be read (torch.compile, CUDA graph capture, fake
    tensors) the mask is part of the graph, follows them, and is not checked: wrong ones give wrong numbers, but no
    memory is touched that is not there."""
    left, right = _sides(window_size, causal)
    _refuse(dropout_p, alibi_slopes, block_table)
    _check_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k)
    sizes = (q.shape[0], k.shape[0], left, right)
    if _values_unreadable(cu_seqlens_q):
        mask = varlen_mask(cu_seqlens_q, cu_seqlens_k, *sizes)
    else:
        _check_max_seqlen(max_seqlen_q, max_seqlen_k)       # torch.compile would guard on numbers that change nothing
        mask = _recent_masks.get(cu_seqlens_q, cu_seqlens_k, *sizes)
    out, lse = flash_attention(q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), mask, softmax_scale, softcap,
                               deterministic=deterministic)
    return (out.squeeze(0), lse.squeeze(0), None) if return_attn_probs else out.squeeze(0)


def flash_attn_qkvpacked_func(qkv, *args, **kwargs):
    """`flash_attn_func` of the three in qkv (B, T, 3, H, D)."""
    return flash_attn_func(*_unpack("qkv", qkv, 3, 2), *args, **kwargs)


def flash_attn_kvpacked_func(q, kv, *args, **kwargs):
    """`flash_attn_func` of q and the two in kv (B, Tk, 2, H_kv, D)."""
    return flash_attn_func(q, *_unpack("kv", kv, 2, 2), *args, **kwargs)


def flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, *args, **kwargs):
    """`flash_attn_varlen_func` of the three in qkv (total, 3, H, D)."""
    return flash_attn_varlen_func(*_unpack("qkv", qkv, 3, 1), *[cu_seqlens] * 2, *[max_seqlen] * 2, *args, **kwargs)


def flash_attn_varlen_kvpacked_func(q, kv, *args, **kwargs):
    """`flash_attn_varlen_func` of q and the two in kv (total_k, 2, H_kv, D)."""
    return flash_attn_varlen_func(q, *_unpack("kv", kv, 2, 1), *args, **kwargs)


def _unpack(name: str, x: Tensor, n: int, dim: int) -> tuple[Tensor, ...]:
    if x.dim() <= dim or x.shape[dim] != n:
        raise ValueError(f"{name} is {tuple(x.shape)}; its dimension {dim} must be the {n} tensors packed in it")
    return x.unbind(dim)


class RecentMasks:
    """The checked masks of the last SIZE different calls, found by the identity and version of the two cu_seqlens.

    Both are held weakly and a mask goes with the first of them, so an id that is used again cannot match. A mask built
    on one CUDA stream is not used on another, which need not have waited for it."""
    SIZE = 8        # kinds of mask in one model: two windows of self-attention and one cross-attention are three

    def __init__(self):
        self.entries = ()       # (ref_q, ref_k, key, mask), newest first; replaced, never changed, as threads read it

    def get(self, cu_q: Tensor, cu_k: Tensor, total_q: int, total_k: int, left: int, right: int) -> Mask:
        sizes = (total_q, total_k, left, right)
        if cu_q.is_inference() or cu_k.is_inference():      # torch counts no versions of these
            return _checked_mask(cu_q, cu_k, *sizes)
        stream = torch.cuda.current_stream(cu_q.device).cuda_stream if cu_q.is_cuda else None
        key = (cu_q._version, cu_k._version, *sizes, stream)
        for ref_q, ref_k, known, mask in self.entries:
            if known == key and ref_q() is cu_q and ref_k() is cu_k:
                return mask
        mask = _checked_mask(cu_q, cu_k, *sizes)
        new = (weakref.ref(cu_q, self._forget), weakref.ref(cu_k, self._forget), key, mask)
        self.entries = (new, *self.entries[:self.SIZE - 1])
        return mask

    def _forget(self, dead: weakref.ref) -> None:
        self.entries = tuple(e for e in self.entries if e[0] is not dead and e[1] is not dead)


_recent_masks = RecentMasks()


def _checked_mask(cu_q: Tensor, cu_k: Tensor, total_q: int, total_k: int, left: int, right: int) -> Mask:
    """A mask that outlives the call: fit for training though built in inference mode, and unseen by modes such as
    selective checkpointing's, which would miss its ops when the second run finds it ready."""
    with _disable_current_modes(), torch.inference_mode(False):
        _check_values("cu_seqlens_q", cu_q, total_q)
        if cu_k is not cu_q or total_k < total_q:
            _check_values("cu_seqlens_k", cu_k, total_k)
        return varlen_mask(cu_q, cu_k, total_q, total_k, left, right)


def _values_unreadable(x: Tensor) -> bool:
    return (torch.compiler.is_compiling() or without_values(x)
            or x.is_cuda and torch.cuda.is_current_stream_capturing())


def _sides(window_size: tuple[int, int], causal: bool) -> tuple[int, int]:
    """flash-attn's window_size and causal as the left and right of a Mask."""
    pair = isinstance(window_size, tuple | list) and len(window_size) == 2
    if not pair or any(not isinstance(n, SupportsIndex) or n < -1 for n in window_size):
        raise ValueError(f"{window_size=} must be (left, right), each a number of keys from 0, or -1 for no bound")
    return sides(*window_size, causal)


def _refuse(dropout_p: float, alibi_slopes=None, block_table=None) -> None:
    if dropout_p != 0:
        raise ValueError(f"{dropout_p=} must be 0: flash_attn2 has no dropout")
    for name, x in dict(alibi_slopes=alibi_slopes, block_table=block_table).items():
        if x is not None:
            raise ValueError(f"{name} is a {type(x).__name__}; it must be None: flash_attn2 has no such thing")


def _check_varlen(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor) -> None:
    """Shapes, dtypes and devices; what q, k and v must agree on is left to `flash_attention`."""
    check_tensors(q=q, k=k, v=v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    for name, x in dict(q=q, k=k, v=v).items():
        if x.dim() != 3:
            raise ValueError(f"{name} must be (tokens, heads, head width), not {tuple(x.shape)}")
    for name, x in dict(cu_seqlens_q=cu_q, cu_seqlens_k=cu_k).items():
        shaped = x.dim() == 1 and x.shape[0] > 0 and x.is_contiguous()
        if not shaped or x.dtype != torch.int32 or x.device != q.device:
            raise ValueError(f"{name} is {tuple(x.shape)} {x.dtype} on {x.device}; it must be contiguous (B + 1,) "
                             f"int32 on {q.device}")
    if cu_q.shape != cu_k.shape:
        raise ValueError(f"cu_seqlens_q has {len(cu_q) - 1} segments, cu_seqlens_k {len(cu_k) - 1}: they must agree")


def _check_max_seqlen(max_seqlen_q: int, max_seqlen_k: int) -> None:
    for name, n in dict(max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k).items():
        if not isinstance(n, SupportsIndex):
            raise TypeError(f"{name}={n!r} must be an integer")


def _check_values(name: str, cu_seqlens: Tensor, total: int) -> None:
    starts = cu_seqlens.tolist()
    if starts[0] != 0:
        raise ValueError(f"{name} begins with {starts[0]}; it must begin with 0")
    for s, (start, end) in enumerate(pairwise(starts)):
        if end < start:
            raise ValueError(f"{name}[{s + 1}] = {end} follows {start}; it must never decrease")
    if starts[-1] > total:
        raise ValueError(f"{name} ends with {starts[-1]}; it must not pass the {total} tokens there are")
