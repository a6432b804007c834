"""What MFU is made of: the FLOPs a training step needs, those a device could do, and the time it took.

A multiply-add is 2 FLOPs. The backward costs twice the forward. Only what the model needs is counted (model
FLOPs): what a kernel or activation checkpointing computes a second time is not.
"""
import re
import time
from collections.abc import Callable

import torch

# Dense peak of one device in TFLOP/s, words of the device name: (bf16, fp16, fp32); None: it has no such
# unit. bf16 and fp16 are tensor-core rates with fp32 accumulation and without sparsity; some datasheets
# print only the value with sparsity, twice as high. fp32 is the rate of the CUDA cores: torch multiplies
# float32 matrices in full precision unless TF32 is switched on, and under TF32 this peak is too low.
PEAKS = {
    # Tesla V100 datasheet (its tensor cores know fp16 only)
    "V100 SXM2": (None, 125.0, 15.7), "V100 SXM3": (None, 125.0, 15.7),
    "V100 PCIe": (None, 112.0, 14.0),
    # A100 datasheet (SXM4 and PCIe have the same peak), A10 datasheet
    "A100": (312.0, 312.0, 19.5), "A10": (125.0, 125.0, 31.2),
    # GA102 whitepaper
    "RTX 3090": (71.0, 71.0, 35.6),
    # Ada whitepaper, RTX 6000 Ada whitepaper, L4 datasheet, L40S datasheet
    "RTX 4090": (165.2, 165.2, 82.6), "RTX 6000 Ada": (364.2, 364.2, 91.1),
    "L4": (121.0, 121.0, 30.3), "L40S": (362.05, 362.05, 91.6),
    # H100 datasheet: SXM (the driver names it by its memory, "NVIDIA H100 80GB HBM3"), PCIe, NVL
    "H100 HBM3": (989.5, 989.5, 67.0), "H100 PCIe": (756.5, 756.5, 51.0),
    "H100 NVL": (835.5, 835.5, 60.0),
    # H200 datasheet (SXM is plain "NVIDIA H200"), GH200 datasheet ("NVIDIA GH200 480GB")
    "H200": (989.5, 989.5, 67.0), "H200 NVL": (835.5, 835.5, 60.0),
    "GH200": (989.5, 989.5, 67.0),
    # HGX B200 datasheet; RTX Blackwell whitepaper
    "B200": (2250.0, 2250.0, 75.0), "RTX 5090": (209.5, 209.5, 104.8),
}
# A name with one of these words is another card or a part of one: "RTX 4090 Laptop GPU", "H200 MIG 3g.71gb".
OTHER_CARDS = {"ti", "super", "laptop", "d", "mig"}


def attended_pairs(doc_start: torch.Tensor | None, B: int, T: int, window: int = 0) -> int:
    """Pairs (query, key) that one head of causal self-attention looks at in a batch of B rows of T tokens.

    doc_start: None (every row is one document) or integers (B, T): the index in the row of the first token of
    this token's document. window: keys a query sees, itself included; 0: no window. The query at place p
    of its document sees min(p + 1, window) keys. ValueError: doc_start of another shape or pointing
    outside its row or ahead, window < 0."""
    if window < 0:
        raise ValueError(f"{window=} must not be negative")
    W = min(window or T, T)
    if doc_start is None:
        return B * (W * (W + 1) // 2 + (T - W) * W)
    if tuple(doc_start.shape) != (B, T):
        raise ValueError(f"doc_start has shape {tuple(doc_start.shape)}, must be (B, T) = {(B, T)}")
    seen = torch.arange(1, T + 1, device=doc_start.device) - doc_start        # (B, T) keys without the window
    if int(doc_start.min()) < 0 or int(seen.min()) < 1:
        raise ValueError("doc_start must lie between 0 and the token's own index")
    return int(seen.clamp(max=W).sum())


def train_flops(model: torch.nn.Module, tokens: int, pairs_by_layer: list[int]) -> int:
    """FLOPs of forward and backward over `tokens` tokens: the exact count behind perf/mfu.

    6 for each weight of each nn.Linear and token (2 forward, 2 each for the gradients of input and weight):
    lm_head counts, its padded rows too, also when its weight is the embedding's; looking embeddings up does
    not. 12 * head_dim
    for each head and attended pair (Q K^T and P V forward; dP, dV, dQ, dK backward). Norms, biases,
    activations and softmax are left out. model: needs n_head, head_dim and windows (one a layer).
    pairs_by_layer: attended_pairs() of each layer over the same tokens. ValueError: not one count a
    layer."""
    if len(pairs_by_layer) != len(model.windows):
        raise ValueError(f"pairs_by_layer has {len(pairs_by_layer)} counts, must have one for each of the "
                         f"{len(model.windows)} layers")
    weights = sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))
    return 6 * weights * tokens + 12 * model.head_dim * model.n_head * sum(pairs_by_layer)


def full_flops_per_token(n_params: int, n_layer: int, d_model: int, T: int) -> int:
    """FLOPs a token by the usual convention (PaLM appendix B, nanoGPT): 6 N + 12 L d T.

    Causality, windows and documents are not counted, so on long rows it reads higher than train_flops.
    n_params: N, every parameter but learned position embeddings (nanoGPT's N; tied embeddings count
    once)."""
    return 6 * n_params + 12 * n_layer * d_model * T


def per_token(model: torch.nn.Module, T: int) -> tuple[float, int]:
    """FLOPs a token of whole rows of T tokens, one document each: as perf/mfu and as perf/mfu_full count them. model: a
    GPT, on the meta device too."""
    exact = train_flops(model, T, [attended_pairs(None, 1, T, w) for w in model.windows]) / T
    n_params = sum(p.numel() for name, p in model.named_parameters() if not name.startswith("positions."))
    return exact, full_flops_per_token(n_params, len(model.windows), model.n_head * model.head_dim, T)


def peak_tflops(device_name: str, dtype: torch.dtype | str,
                override: float = 0.0) -> tuple[float | None, str]:
    """(dense peak of one device in TFLOP/s, where the number comes from); (None, why) where none is known.

    device_name: as torch.cuda.get_device_name() spells it. dtype: of the matrix products: bfloat16, float16 or
    float32. override: the user's own number; 0: look it up. ValueError: override < 0."""
    if override < 0:
        raise ValueError(f"peak_tflops={override} must not be negative")
    if override:
        return float(override), "metrics.peak_tflops"
    name = entry(PEAKS, device_name)
    if name is None:
        return None, f"no peak known for device {device_name!r}; set metrics.peak_tflops"
    kind = str(dtype).removeprefix("torch.")
    peak = dict(zip(("bfloat16", "float16", "float32"), PEAKS[name], strict=True)).get(kind)
    if peak is None:
        return None, f"no {kind} peak known for {name}; set metrics.peak_tflops"
    return peak, f"datasheet of {name}, {kind}, dense"


def entry(table: dict[str, object], device_name: str) -> str | None:
    """The key of `table` whose words are all in the name, that with most words; None: none, or another card."""
    words = set(re.findall(r"[a-z0-9]+", device_name.lower()))
    matches = [] if words & OTHER_CARDS else [key for key in table if set(key.lower().split()) <= words]
    return max(matches, key=lambda key: len(key.split()), default=None)


UNMEASURED = 3      # steps after a start or a resume: kernels are still being chosen and memory found


class Clock:
    """Rates of training from the time between start() and stop(): not of evaluation, saving or compilation.

    start() stands before a step's work, its data included, stop() after it. A GPU runs behind: `synchronize`
    waits for it in rates() and settle(), and the time between stop() and the next of them is training. So
    call settle() between stop() and any other long work (evaluating, saving), or the GPU finishes steps
    unmeasured, or that work is measured. The first `warmup` steps are not measured, after a start as
    after a resume: compilation lies in them. world: devices that share the tokens and FLOPs. peak_tflops:
    of one device; None: no MFU. full_flops_per_token: for perf/mfu_full. now: a clock in seconds."""

    def __init__(self, *, world: int = 1, peak_tflops: float | None = None, full_flops_per_token: int = 0,
                 warmup: int = UNMEASURED, synchronize: Callable[[], None] = lambda: None,
                 now: Callable[[], float] = time.perf_counter):
        self.world, self.peak_tflops = world, peak_tflops
        self.full_flops_per_token = full_flops_per_token
        self._warmup, self._synchronize, self._now = warmup, synchronize, now
        self._began = self._ended = None           # of the step that runs; of the last step, until settled
        self._seconds, self._steps, self._tokens, self._flops = 0.0, 0, 0, 0

    def start(self) -> None:
        self._began, self._ended = self._now(), None

    def stop(self, tokens: int, flops: int) -> None:
        """The step ends. tokens, flops (train_flops): of this step, over all devices."""
        if self._warmup > 0:
            self._warmup -= 1
            self._synchronize()                        # or the next step would wait for this one
            return
        self._ended = self._now()
        self._seconds += self._ended - self._began
        self._steps, self._tokens, self._flops = self._steps + 1, self._tokens + tokens, self._flops + flops

    def settle(self) -> None:
        """Wait for the device; the time since the last stop() counts as training."""
        self._synchronize()
        if self._ended is not None:
            self._seconds += self._now() - self._ended
            self._ended = None

    def rates(self) -> dict:
        """perf/* of the steps since the last call; {}: none was measured. tflops and mfu are per device."""
        self.settle()
        steps, seconds, tokens, flops = self._steps, self._seconds, self._tokens, self._flops
        self._seconds, self._steps, self._tokens, self._flops = 0.0, 0, 0, 0
        if not steps:
            return {}
        per_gpu, tflops = tokens / seconds / self.world, flops / seconds / self.world / 1e12
        row = {"perf/tokens_per_s": tokens / seconds, "perf/tokens_per_s_per_gpu": per_gpu,
               "perf/step_ms": 1000 * seconds / steps, "perf/tflops": tflops}
        if self.peak_tflops:
            row["perf/mfu"] = tflops / self.peak_tflops
            row["perf/mfu_full"] = self.full_flops_per_token * per_gpu / 1e12 / self.peak_tflops
        return row
