"""What the benchmark measures: the shapes and masks, the contenders, and float64 to judge them by."""
import inspect
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import sdpa_kernel, varlen

from . import backends
from .masks import Mask, causal_mask, full_mask, pairs

TOKENS, D_MODEL, DTYPE, SEED = 32768, 2048, torch.bfloat16, 0
WINDOW = 4096               # keys
DOCUMENT = 4096             # tokens, the mean of an exponential distribution
SETTINGS = dict(dtype=str(DTYPE).removeprefix("torch."), window=WINDOW, document=DOCUMENT)
PLAIN = ("flash_attn2", "flash_attn2:triton", "sdpa:flash", "sdpa:cudnn", "sdpa:efficient", "sdpa:math", "flex")
MASKED = ("flash_attn2", "flash_attn2:triton", "varlen_attn", "flex", "sdpa")
CONTENDERS = {"causal": PLAIN, "full": PLAIN, "window": MASKED, "documents": MASKED}
CHUNK = 256                 # query rows of the float64 attention at a time: CHUNK x T scores

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """One shape: `tokens` in all, or one row where T is longer; `group` query heads share a key head."""
    mask: str
    head_dim: int
    T: int
    tokens: int = TOKENS
    d_model: int = field(default_factory=lambda: D_MODEL)
    group: int = 1

    @property
    def B(self) -> int:
        return max(1, self.tokens // self.T)

    @property
    def H(self) -> int:
        return self.d_model // self.head_dim

    @property
    def H_kv(self) -> int:
        return self.H // self.group

    @property
    def window(self) -> int:
        return WINDOW if self.mask == "window" else 0

    def documents(self) -> list[list[int]]:
        """The lengths of each row's documents, the same in every run; one document a row where there are none."""
        if self.mask != "documents":
            return [[self.T]] * self.B
        return [document_lengths(self.T, random.Random(SEED + row)) for row in range(self.B)]

    def doc_start(self, device: torch.device) -> Tensor | None:
        """(B, T) int32: where in its row each token's document begins. None: no documents."""
        if self.mask != "documents":
            return None
        rows = [torch.tensor([0, *accumulate(lengths[:-1])]).repeat_interleave(torch.tensor(lengths))
                for lengths in self.documents()]
        return torch.stack(rows).int().to(device)

    def kernel_mask(self, device: torch.device) -> Mask:
        return full_mask() if self.mask == "full" else causal_mask(self.window, self.doc_start(device))

    def bounds(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """First and last key of each query of the last row, (T,) each, from the definition, not from masks.py."""
        i = torch.arange(self.T, device=device)
        if self.mask == "full":
            return torch.zeros_like(i), torch.full_like(i, self.T - 1)
        doc_start = self.doc_start(device)
        lo = torch.zeros_like(i) if doc_start is None else doc_start[-1].long()
        return torch.maximum(lo, i - self.window + 1) if self.window else lo, i

    def row(self, device: torch.device) -> dict:
        """What the rows of all its contenders share."""
        return dict(mask=self.mask, head_dim=self.head_dim, T=self.T, B=self.B, H=self.H, H_kv=self.H_kv,
                    pairs=pairs(self.kernel_mask(device), self.B, self.T, self.T))


def document_lengths(T: int, rng: random.Random) -> list[int]:
    """Exponential lengths of mean DOCUMENT, one token at least; the last document is cut, so that they add up to T."""
    lengths = []
    while T:
        lengths.append(min(T, max(1, round(rng.expovariate(1 / DOCUMENT)))))
        T -= lengths[-1]
    return lengths


def contender(name: str, case: Case, device: torch.device, free_bytes: int) -> Attend:
    """(q, k, v) -> o, all (B, T, H, D), its mask built. ValueError: what it cannot do, or not in free_bytes."""
    if name == "varlen_attn":
        return varlen_contender(case, device)
    # math: the scores and their kin in float32; sdpa: the mask as bool and as bf16, and what it is made of
    needed = {"sdpa:math": 16 * case.B * case.H, "sdpa": 5 * case.B}.get(name, 0) * case.T**2
    if needed > free_bytes:
        raise ValueError(f"its T x T tensors need about {needed / 2**30:.0f} GiB, {free_bytes / 2**30:.0f} are free")
    attention = backends.Flex() if name == "flex" else \
        backends.build(name, device, DTYPE, case.head_dim, plain=case.mask in ("causal", "full"),
                       grouped=case.group > 1)
    if case.mask == "full" and name.startswith("sdpa"):
        return full_sdpa(attention.kernel)
    if name.startswith("flash_attn2"):
        mask = case.kernel_mask(device)
    else:
        mask = None if case.mask == "full" else \
            attention.mask(case.T, case.window, case.doc_start(device), device)
    return lambda q, k, v: attention(q, k, v, mask)


def full_sdpa(kernel) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(kernel):
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1]).transpose(1, 2)
    return attend


def varlen_contender(case: Case, device: torch.device) -> Attend:
    """torch's FlashAttention-2 for packed rows: its one public call of it that takes documents and windows."""
    lengths = [length for row in case.documents() for length in row]
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    if "window_size" in inspect.signature(varlen.varlen_attn).parameters:
        options = {"window_size": (case.window - 1, 0)}             # no window: -1, which is no bound
    elif case.window:
        raise ValueError(f"varlen_attn of torch {torch.__version__} takes no window")
    else:
        options = {"is_causal": True}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        packed = (x.flatten(0, 1) for x in (q, k, v))
        return varlen.varlen_attn(*packed, ends, ends, max(lengths), max(lengths), **options).view_as(q)
    return attend


def exact_gqa(q: Tensor, k: Tensor, v: Tensor, do: Tensor, lo: Tensor, hi: Tensor) -> dict[str, Tensor]:
    """The last key head in float64 with its query heads: o and dq of the last of them, dk and dv, (T, D) each, from q,
    do (T, group, D), k and v (T, D)."""
    heads = [exact(q[:, h], k, v, do[:, h], lo, hi) for h in range(q.shape[1])]
    return {name: sum(head[name] for head in heads) if name in ("dk", "dv") else x for name, x in heads[-1].items()}


def exact(q: Tensor, k: Tensor, v: Tensor, do: Tensor, lo: Tensor, hi: Tensor) -> dict[str, Tensor]:
    """One head in float64, CHUNK rows at a time: o, dq, dk, dv, (T, D) each, from q, k, v, do (T, D).

    Query i sees the keys lo[i] .. hi[i], one at least; lo and hi (T,) never decrease."""
    q, k, v, do = (x.double() for x in (q, k, v, do))
    scale = q.shape[-1] ** -0.5
    o, dq, dk, dv = (torch.zeros_like(q) for _ in range(4))
    for begin in range(0, len(q), CHUNK):
        i = slice(begin, begin + CHUNK)
        keys = slice(int(lo[i][0]), int(hi[i][-1]) + 1)
        j = torch.arange(keys.start, keys.stop, device=q.device)
        s = (q[i] @ k[keys].T) * scale                              # (CHUNK, keys)
        p = s.masked_fill((j < lo[i, None]) | (j > hi[i, None]), float("-inf")).softmax(-1)
        o[i] = p @ v[keys]
        delta = (do[i] * o[i]).sum(-1, keepdim=True)
        ds = p * (do[i] @ v[keys].T - delta) * scale
        dq[i] = ds @ k[keys]
        dk[keys] += ds.T @ q[i]
        dv[keys] += p.T @ do[i]
    return dict(o=o, dq=dq, dk=dk, dv=dv)


def errors(got: dict[str, Tensor], want: dict[str, Tensor]) -> dict[str, float]:
    """RMS of the difference over the RMS of what is wanted, by name."""
    return {name: float((got[name].double() - x).norm() / x.norm()) for name, x in want.items()}
