"""What a training step keeps for its backward, by choice, and how a block runs under that choice.

What is not kept is computed a second time in the backward (activation checkpointing; Chen et al. 2016). Attention is
what grows fastest with the row, and its output is small, (B, T, d_model) and one number a head and token: the selective
kind keeps just that and never runs attention twice.

    none       products (of matrices, attention) are kept; norms and activation functions run again, in passing
    selective  block inputs and attention's output are kept
    full       block inputs are kept

Block inputs may wait in host memory instead: copied there, and back in time, while the GPU computes.
"""
import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

# Ops that run attention: our forward, and torch's SDPA kernels.
ATTENTION = ("flash_attn2::forward", "aten::_scaled_dot_product_flash_attention",
             "aten::_scaled_dot_product_flash_attention_for_cpu", "aten::_scaled_dot_product_cudnn_attention",
             "aten::_scaled_dot_product_efficient_attention")
KEPT = {"none": (*ATTENTION, "aten::mm", "aten::addmm"), "selective": ATTENTION, "full": ()}


def block_runner(kind: str, *, offload: bool = False, compiled: bool = False, mlp_chunk: int = 0) -> Callable:
    """run(block, x, rotation, mask), keeping for the backward what `kind` says.

    offload: inputs wait in host memory. compiled: by torch.compile, once for all layers. mlp_chunk > 0: the MLP and its
    norm take so many tokens at a time and keep only their input, so that no hidden layer of a whole row ever exists."""
    host = HostMemory() if offload else None        # one for both halves: the backward takes them in reverse order
    if not mlp_chunk:
        return _runner("forward", kind, host, compiled)
    attend, feed = _runner("attend", kind, host, compiled), _runner("feed", "full", host, compiled)

    def run(block, x: Tensor, *args) -> Tensor:
        parts = attend(block, x, *args).split(mlp_chunk, dim=1)
        return torch.cat([feed(block, part.contiguous()) for part in parts], dim=1)
    return run


def _runner(method: str, kind: str, host: "HostMemory | None", compiled: bool) -> Callable:
    def plain(block, *args):
        return getattr(block, method)(*args)
    run = plain
    if kind != "none" or compiled:      # what the compiler would keep is up to its version: say it
        contexts = functools.partial(create_selective_checkpoint_contexts, functools.partial(_policy, KEPT[kind]))
        run = functools.partial(checkpoint, plain, use_reentrant=False, context_fn=contexts,
                                preserve_rng_state=False)       # no dropout: nothing random to repeat
    if compiled:
        # a graph for each: windows or none, documents or none, training or not; the halves; torch's limit is 8
        torch._dynamo.config.recompile_limit = max(16, torch._dynamo.config.recompile_limit)
        run = torch.compile(run, dynamic=False, fullgraph=True)
    return functools.partial(host.run, run) if host else run


def _policy(kept: tuple[str, ...], context, op, *args, **kwargs) -> CheckpointPolicy:
    if op.name() in kept:
        return CheckpointPolicy.MUST_SAVE
    # torch 2.11's compiler keeps attention's output where it only should not
    return CheckpointPolicy.PREFER_RECOMPUTE if kept else CheckpointPolicy.MUST_RECOMPUTE


class HostMemory:
    """Inputs that wait for their backward in pinned host memory.

    Copies run on a stream of their own. Going out they follow the work that made x; coming back each is asked for when
    the backward of the block above begins, so it has that long to arrive."""

    def __init__(self):
        self.last: Parked | None = None
        self.stream: torch.cuda.Stream | None = None

    def run(self, part: Callable, block, x: Tensor, *args) -> Tensor:
        """part(block, x, *args); what autograd would keep of x is parked."""
        if not torch.is_grad_enabled():
            return part(block, x, *args)
        if x.is_cuda and self.stream is None:
            self.stream = torch.cuda.Stream(x.device)

        place, shape = x.data_ptr(), x.shape                # not x: autograd holds `pack` until the backward

        def pack(saved: Tensor):
            if saved.data_ptr() != place or saved.shape != shape:
                return saved                                # a weight, a mask
            self.last = Parked(saved, self.stream, self.last)
            return self.last
        with saved_tensors_hooks(pack, lambda kept: kept.take() if isinstance(kept, Parked) else kept):
            return part(block, x, *args)


class Parked:
    """One tensor in host memory, to be taken back once. before: the one parked before it, wanted next."""

    def __init__(self, x: Tensor, stream: torch.cuda.Stream | None, before: "Parked | None"):
        self.stream, self.before, self.device = stream, before, x.device
        self.host: Tensor | None = torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda)
        self.back: Tensor | None = None
        self._on_stream(self.host, x)
        if stream:
            x.record_stream(stream)                         # its memory serves again only when the copy is done

    def fetch(self) -> None:
        if self.back is None and self.host is not None:     # neither on its way nor taken
            self.back = torch.empty(self.host.shape, dtype=self.host.dtype, device=self.device)
            self._on_stream(self.back, self.host)

    def take(self) -> Tensor:
        if self.host is None:
            raise RuntimeError("train.offload: a block's input comes back once; retain_graph=True asks for it again")
        self.fetch()
        if self.stream:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)
        if self.before:
            self.before.fetch()
        x, self.back, self.host, self.before = self.back, None, None, None
        return x

    def _on_stream(self, to: Tensor, source: Tensor) -> None:
        if not self.stream:
            to.copy_(source)
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            to.copy_(source, non_blocking=True)
