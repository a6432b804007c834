"""What turns gradients into new weights: the schedule, clipping, AdamW, and Muon for the blocks' matrices by choice."""
import math

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from config import Config, Optim


def learning_rate(step: int, c: Config) -> float:
    """Of the step after `step` steps: a linear rise over warmup_steps, then down to min_lr at the last one.

    cosine: all the way down. wsd (warm-up, stable, decay; Hu et al. 2024, arXiv 2404.06395): lr, and over the last
    decay_fraction of all steps down as 1 - sqrt (Hägele et al. 2024, arXiv 2405.18392)."""
    o, last = c.optim, c.train.max_steps - 1
    if step < o.warmup_steps:
        return o.lr * (step + 1) / o.warmup_steps
    begin = o.warmup_steps if o.schedule == "cosine" else max(o.warmup_steps, last - o.decay_fraction * (last + 1))
    done = min(max(0.0, (step - begin) / (last - begin)), 1.0) if last > begin else 0.0
    left = (1 + math.cos(math.pi * done)) / 2 if o.schedule == "cosine" else 1 - math.sqrt(done)
    return o.min_lr + (o.lr - o.min_lr) * left


class Optimizer:
    """AdamW (Loshchilov and Hutter 2019); with optim.name = "muon" the matrices of the blocks go to Muon (Jordan 2024),
    whose steps are scaled to AdamW's size (Liu et al. 2025, arXiv 2502.16982), so that one lr serves both.

    half: the model's matrices become `half`, their gradients with them, and float32 masters of them live here, which
    the steps change and a checkpoint keeps. The model computes with what autocast would make of the masters at every
    use. accumulates: gradients are summed over several backwards, in float32."""

    def __init__(self, model: nn.Module, o: Optim, *, half: torch.dtype | None = None, accumulates: bool = False):
        self.model, self.grad_clip = model, o.grad_clip
        self.masters = {p: p for p in model.parameters()}
        self.sums: dict[nn.Parameter, Tensor] = {}      # of gradients, where these are too coarse to be summed in
        for p in [p for p in self.masters if half and p.dim() >= 2]:
            self.masters[p] = nn.Parameter(p.detach().clone())
            p.data = p.data.to(half)
            if accumulates:     # p.grad_dtype would do it, but torch.compile does not trace such parameters
                p.register_post_accumulate_grad_hook(self._add)
        blocks = {p for p in model.blocks.parameters() if p.dim() == 2} if o.name == "muon" else set()
        rest = [p for p in self.masters if p not in blocks]
        groups = [dict(params=[self.masters[p] for p in rest if (p.dim() >= 2) is matrices], weight_decay=decay)
                  for matrices, decay in ((True, o.weight_decay), (False, 0.0))]        # biases and gains do not decay
        options = dict(lr=o.lr, betas=(o.beta1, o.beta2), eps=o.eps)
        self.adamw = MasterAdamW(groups, options) if half else torch.optim.AdamW(groups, fused=True, **options)
        self.parts = {"adamw": self.adamw}
        self.muon_weights = [p for p in self.masters if p in blocks]
        if self.muon_weights:
            self.parts["muon"] = torch.optim.Muon([self.masters[p] for p in self.muon_weights], lr=o.lr,
                                                  weight_decay=o.weight_decay, adjust_lr_fn="match_rms_adamw")

    @torch.no_grad()
    def step(self, lr: float) -> Tensor:
        """A step against the gradients, clipped to norm grad_clip, which are then gone. -> their norm, unclipped."""
        grads = {p: grad for p in self.masters if (grad := self.sums.get(p, p.grad)) is not None}
        norms = torch._foreach_norm(list(grads.values()), 2, torch.float32)
        norm = torch.stack(norms).norm()
        excess = (norm / self.grad_clip).clamp(min=1.0) if self.grad_clip else torch.ones_like(norm)
        for group in [g for part in self.parts.values() for g in part.param_groups]:
            group["lr"] = lr
        self._step_adamw(grads, excess)
        if self.muon_weights:
            self._step_muon(grads, excess)
        self.zero_grad()
        return norm

    def _step_adamw(self, grads: dict[nn.Parameter, Tensor], excess: Tensor) -> None:
        """Its kernel divides by the excess, a pass over all gradients less: torch's fused AdamW takes grad_scale and
        found_inf so from torch.amp.GradScaler, as attributes."""
        self.adamw.grad_scale, self.adamw.found_inf = excess, torch.zeros_like(excess)
        if isinstance(self.adamw, MasterAdamW):
            self.adamw.step({self.masters[p]: (p, grad) for p, grad in grads.items()})
        else:
            self.adamw.step()

    def _step_muon(self, grads: dict[nn.Parameter, Tensor], excess: Tensor) -> None:
        stepped = [p for p in self.muon_weights if p in grads]
        for p in stepped:
            self.masters[p].grad = grads[p].float() / excess
        self.parts["muon"].step()
        for p in stepped:
            p.copy_(self.masters[p])
            self.masters[p].grad = None

    def zero_grad(self) -> None:
        self.sums.clear()
        self.model.zero_grad(set_to_none=True)

    def _add(self, p: nn.Parameter) -> None:
        """p's gradient of one backward to those before it."""
        self.sums[p] = self.sums[p].add_(p.grad) if p in self.sums else p.grad.float()
        p.grad = None

    def weights(self) -> dict[str, Tensor]:
        """The model's state_dict, with the masters in it."""
        return {name: self.masters[p].detach() for name, p in self.model.state_dict(keep_vars=True).items()}

    @torch.no_grad()
    def load_weights(self, weights: dict[str, Tensor]) -> None:
        for name, p in self.model.state_dict(keep_vars=True).items():
            self.masters[p].copy_(weights[name])
            p.copy_(self.masters[p])

    def state_dict(self) -> dict:
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load_state_dict(self, state: dict) -> None:
        """Moments and step counts; lr, decay and the rest stay as the config has them. ValueError: of another one."""
        if "param_groups" in state:             # AdamW's alone, as checkpoints were before Muon
            state = {"adamw": state}
        if state.keys() != self.parts.keys():
            raise ValueError(f"the checkpoint's optimizer is {'+'.join(state)}, not {'+'.join(self.parts)}: "
                             "optim.name cannot change")
        for name, part in self.parts.items():
            settings = [{k: v for k, v in group.items() if k != "params"} for group in part.param_groups]
            part.load_state_dict(state[name])
            for group, ours in zip(part.param_groups, settings, strict=True):
                group.update(ours)
            for moments in part.state.values() if isinstance(part, MasterAdamW) else ():
                moments["step"] = int(moments["step"])      # a tensor where stock AdamW saved it


class MasterAdamW(torch.optim.Optimizer):
    """torch's AdamW on float32 masters of weights in another dtype, which it rewrites. A parameter's step is one launch
    and 28 bytes an element: stock AdamW needs the gradient in float32, a pass to clip it, and the weights rounded after
    it, 46 bytes. grad_scale: what gradients are divided by."""

    grad_scale: Tensor

    @torch.no_grad()
    def step(self, weights: dict[nn.Parameter, tuple[nn.Parameter, Tensor]]) -> None:
        """weights: by master, the weight and its gradient, of whatever dtype each."""
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for master in (p for p in group["params"] if p in weights):
                state, n = self.state[master], master.numel()
                if not state:
                    state.update(step=0, exp_avg=torch.zeros_like(master), exp_avg_sq=torch.zeros_like(master))
                state["step"] += 1
                adamw_kernel[(triton.cdiv(n, 4096),)](
                    master, *weights[master], state["exp_avg"], state["exp_avg_sq"], self.grad_scale, n,
                    1 - group["lr"] * group["weight_decay"], group["lr"] / (1 - beta1 ** state["step"]),
                    (1 - beta2 ** state["step"]) ** -0.5, beta1, beta2, group["eps"], BLOCK=4096, num_warps=8)


@triton.jit
def adamw_kernel(master_ptr, weight_ptr, grad_ptr, m_ptr, v_ptr, grad_scale_ptr, n, shrink, lr, v_scale, beta1, beta2,
                 eps, BLOCK: tl.constexpr):
    """shrink = 1 - lr * decay; lr and v_scale hold the corrections of the moments m and v for having begun at 0."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < n
    grad = tl.load(grad_ptr + i, mask=inside).to(tl.float32) / tl.load(grad_scale_ptr)
    m = tl.load(m_ptr + i, mask=inside)
    v = tl.load(v_ptr + i, mask=inside)
    m += (1 - beta1) * (grad - m)
    v += (1 - beta2) * (grad * grad - v)
    master = tl.load(master_ptr + i, mask=inside) * shrink - lr * m / (tl.sqrt(v) * v_scale + eps)
    tl.store(m_ptr + i, m, mask=inside)
    tl.store(v_ptr + i, v, mask=inside)
    tl.store(master_ptr + i, master, mask=inside)
    tl.store(weight_ptr + i, master.to(weight_ptr.dtype.element_ty), mask=inside)
