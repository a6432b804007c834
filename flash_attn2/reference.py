"""Dense attention in float64, written from the definition: what every kernel here is judged by.

Imports only torch and shares nothing with the kernels, its mask included.
"""
import torch
from torch import Tensor


def seen(Tq: int, Tk: int, *, causal: bool = True, window: tuple[int, int] | None = None,
         doc_q: Tensor | None = None, doc_k: Tensor | None = None, device=None) -> Tensor:
    """Which keys a query sees, bool (Tq, Tk), or (B, Tq, Tk) with documents.

    Query i stands at key position i + Tk - Tq (the last query beside the last key). window = (left, right) keys on
    either side of it, None for no bound. doc_q (B, Tq) and doc_k (B, Tk) name each token's document."""
    i = torch.arange(Tq, device=device)[:, None] + Tk - Tq
    j = torch.arange(Tk, device=device)[None, :]
    left, right = window or (None, None)
    mask = torch.ones(Tq, Tk, dtype=torch.bool, device=device)
    if causal:
        mask &= j <= i
    if left is not None:
        mask &= j >= i - left
    if right is not None:
        mask &= j <= i + right
    if doc_q is not None:
        mask = mask & (doc_q[:, :, None] == doc_k[:, None, :])
    return mask


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor,
              softmax_scale: float | None = None, softcap: float = 0.0) -> tuple[Tensor, Tensor]:
    """softmax(q k^T * softmax_scale) v over the seen keys: o (B, Tq, H, D) and lse (B, H, Tq) in nats, both float64.

    q (B, Tq, H, D), k and v (B, Tk, H_kv, D) of any dtype; query head h uses key head h // (H / H_kv). mask as `seen`
    gives it. softcap bends the logits x to softcap * tanh(x / softcap). A query that sees no key has o = 0 and
    lse = -inf, and passes no gradient."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.double().repeat_interleave(group, dim=2) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    mask = mask[None, None] if mask.dim() == 2 else mask[:, None]               # (B or 1, 1, Tq, Tk)
    s = torch.einsum("bihd,bjhd->bhij", q.double(), k) * scale
    if softcap:
        s = softcap * (s / softcap).tanh()
    empty = ~mask.any(-1, keepdim=True)                                          # softmax of nothing: 0, not NaN
    s = s.masked_fill(~mask, float("-inf")).masked_fill(empty, 0.0)
    p = s.softmax(-1).masked_fill(empty, 0.0)
    lse = s.logsumexp(-1).masked_fill(empty[..., 0], float("-inf"))
    return torch.einsum("bhij,bjhd->bihd", p, v), lse
