"""The schedule and the step: stock optimizers' results, clipping inside the kernel, Muon for the blocks' matrices."""
import copy
import functools
import math

import pytest
import torch
from test_model import MODERN, SMALL, build
from torch import nn

import config as configs
from config import Config, Optim, change
from runtime.memory import block_runner
from runtime.optimizer import Optimizer, learning_rate


def rates(steps: int, **optim) -> list[float]:
    c = change(Config(), optim=dict(lr=1.0, min_lr=0.1, **optim), train=dict(max_steps=steps))
    return [learning_rate(step, c) for step in range(steps)]


def test_cosine():
    lr = rates(110, warmup_steps=10)
    assert lr[0] == pytest.approx(0.1) and lr[9] == lr[10] == 1.0
    assert lr[-1] == pytest.approx(0.1) and all(a >= b for a, b in zip(lr[10:], lr[11:], strict=False))
    assert lr[59] == pytest.approx(0.55, abs=0.02)


def test_wsd_is_flat_then_falls_to_the_end():
    lr = rates(100, warmup_steps=10, schedule="wsd", decay_fraction=0.2)
    assert lr[0] == pytest.approx(0.1) and set(lr[9:80]) == {1.0} and lr[80] < 1.0
    assert lr[-1] == pytest.approx(0.1) and all(a > b for a, b in zip(lr[79:], lr[80:], strict=False))
    assert lr[84] == pytest.approx(0.1 + 0.9 * (1 - math.sqrt(5 / 20)))     # the formula, a quarter of the way down


def test_wsd_goes_on_where_it_was_when_the_run_is_made_longer():
    """What it is for: up to the decay, the rate does not depend on how long the run will be."""
    short, long = (rates(steps, warmup_steps=5, schedule="wsd") for steps in (50, 500))
    assert short[:40] == long[:40]


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
@pytest.mark.parametrize("steps", [1, 2])
def test_without_warmup_or_with_one_step(schedule, steps):
    assert rates(steps, warmup_steps=0, schedule=schedule)[0] == 1.0


def test_warmup_longer_than_what_is_before_the_decay():
    lr = rates(20, warmup_steps=18, schedule="wsd", decay_fraction=0.5)
    assert lr[17] == 1.0 and lr[-1] == pytest.approx(0.1)


def with_gradients(c=SMALL, seed: int = 0):
    torch.manual_seed(seed)
    model = build(c)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    return model


@pytest.mark.parametrize("clip", [0.0, 0.5, 1e6])
def test_clipping_in_the_kernel_is_clipping_before_it(clip):
    """torch's clip_grad_norm_ and AdamW, three steps; a norm below the limit stays as it is."""
    o = Optim(lr=1e-2, min_lr=0.0, grad_clip=clip)
    model = with_gradients()
    other, ours = copy.deepcopy(model), Optimizer(model, o)
    decayed, plain = ([p for p in other.parameters() if (p.dim() >= 2) is matrices] for matrices in (True, False))
    theirs = torch.optim.AdamW([dict(params=decayed, weight_decay=0.1), dict(params=plain, weight_decay=0.0)],
                               lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    for step in range(3):
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            p.grad = torch.randn_like(p) * (step + 1)
            q.grad = p.grad.clone()
        norm = nn.utils.clip_grad_norm_(other.parameters(), clip or math.inf)
        theirs.step()
        torch.testing.assert_close(ours.step(1e-2), norm)
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
            assert p.grad is None


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_masters_move_as_stock_adamw_moves_weights(clip):
    """Our kernel (through the interpreter) in float32, where masters and weights are the same numbers."""
    o = Optim(grad_clip=clip)
    model = with_gradients(MODERN)
    other = copy.deepcopy(model)
    ours, theirs = Optimizer(model, o, half=torch.float32), Optimizer(other, o)
    for step in range(4):
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            p.grad = torch.randn_like(p) * 10.0 ** (step - 2)
            q.grad = p.grad.clone()
        torch.testing.assert_close(ours.step(1e-2), theirs.step(1e-2))
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
            assert torch.equal(p, ours.masters[p]) and p.grad is None


@pytest.mark.parametrize("device, half", [("cpu", torch.float16), pytest.param("cuda", torch.bfloat16,
                                                                               marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_weights_are_the_masters_rounded(name, device, half):
    """And steps too small for the weights' dtype are not lost: 200 of a 1000th of its resolution add up."""
    model = build(SMALL).to(device)
    optimizer = Optimizer(model, Optim(name=name, weight_decay=0.0, grad_clip=0.0), half=half)
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    assert {p.dtype for p in matrices} == {half} and {m.dtype for m in optimizer.masters.values()} == {torch.float32}
    before = {p: m.detach().clone() for p, m in optimizer.masters.items()}
    direction = {p: torch.randn_like(p).sign() for p in model.parameters()}
    for _ in range(200):
        for p, d in direction.items():
            p.grad = d.clone()
        optimizer.step(1e-6)
    for p, master in optimizer.masters.items():
        assert torch.equal(p, master.to(p.dtype))
        if all(p is not q for q in optimizer.muon_weights):         # a constant gradient moves AdamW by lr a step
            torch.testing.assert_close((before[p] - master) * direction[p].float(), torch.full_like(master, 2e-4),
                                       rtol=0.1, atol=1e-6)
        assert not torch.equal(before[p], master)


def test_a_checkpoint_has_the_masters():
    model = build(SMALL)
    optimizer = Optimizer(model, Optim(), half=torch.float16)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step(1e-3)
    saved = {name: w.clone() for name, w in optimizer.weights().items()}
    assert saved.keys() == model.state_dict().keys() and {w.dtype for w in saved.values()} == {torch.float32}
    other = Optimizer(build(SMALL), Optim(), half=torch.float16)
    other.load_weights(saved)
    for name, w in other.weights().items():
        assert torch.equal(w, saved[name])
    for p, q in zip(model.parameters(), other.model.parameters(), strict=True):
        assert p.dtype == q.dtype and torch.equal(p, q)


def test_accumulated_gradients_are_summed_in_float32():
    """300 backwards of 1: in bfloat16 the sum would stop at 256."""
    model = build(SMALL)
    optimizer = Optimizer(model, Optim(grad_clip=0.0), half=torch.bfloat16, accumulates=True)
    p = model.blocks[0].qkv.weight
    for _ in range(300):
        p.sum().backward()
    assert p.grad is None and optimizer.sums[p].dtype == torch.float32 and (optimizer.sums[p] == 300).all()
    optimizer.zero_grad()
    p.sum().backward()
    assert (optimizer.sums[p] == 1).all()


def test_accumulation_compiles_once(monkeypatch):
    """torch.compile does not trace a parameter whose gradient has another dtype (p.grad_dtype): the sums lie apart."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    model = build(SMALL)
    model.run_block = block_runner("none", compiled=True)
    Optimizer(model, Optim(), half=torch.bfloat16, accumulates=True)
    torch._dynamo.utils.counters.clear()
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            model(*torch.randint(50, (2, 2, 32))).backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_muon_takes_the_blocks_matrices_and_adamw_the_rest():
    model = with_gradients(MODERN)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = Optimizer(model, Optim(name="muon", weight_decay=0.0, grad_clip=0.0))
    inside = {id(p) for group in optimizer.parts["muon"].param_groups for p in group["params"]}
    for name, p in model.named_parameters():
        assert (id(p) in inside) == (name.startswith("blocks.") and p.dim() == 2), name
    optimizer.step(1e-2)
    for name, p in model.named_parameters():
        step = (p.detach() - before[name]) / 1e-2
        if id(p) in inside:             # nearly orthogonal: singular values are alike; and AdamW's size: rms about 0.2
            values = torch.linalg.svdvals(step)
            assert values.min() > 0.4 * values.max() and 0.1 < step.square().mean().sqrt() < 0.3, name
        else:                           # AdamW's first step is the gradient's sign
            torch.testing.assert_close(step.abs(), torch.ones_like(step), rtol=1e-2, atol=1e-2)


def test_muon_is_clipped_and_decays():
    """A momentum begins as (1 - 0.95) times the clipped gradient; a weight shrinks by lr times the decay."""
    model = with_gradients()
    for p in model.parameters():
        p.grad *= 1000
    optimizer = Optimizer(model, Optim(name="muon", grad_clip=1.0, weight_decay=0.5))
    norm, clipped = optimizer.step(1e-2), 0.0
    for state in optimizer.parts["muon"].state.values():
        clipped += state["momentum_buffer"].norm() ** 2
    assert norm > 1e4 and 0.02 < clipped.sqrt() <= 0.051
    still = build(SMALL)
    before = still.blocks[0].mlp_in.weight.detach().clone()
    for p in still.parameters():
        p.grad = torch.zeros_like(p)                            # nothing but decay
    Optimizer(still, Optim(name="muon", weight_decay=0.5)).step(1e-2)
    torch.testing.assert_close(still.blocks[0].mlp_in.weight, before * (1 - 1e-2 * 0.5))


@pytest.mark.parametrize("half, then", [(None, torch.float16), (torch.float16, None)])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_state_goes_on_with_or_without_masters(name, half, then):
    """From a CPU, or several GPUs, to one GPU and back."""
    first = Optimizer(build(SMALL), Optim(name=name), half=half)
    second = Optimizer(build(SMALL), Optim(name=name), half=then)
    for optimizer in (first, second):
        if optimizer is second:
            second.load_weights(first.weights())
            second.load_state_dict(copy.deepcopy(first.state_dict()))
        for _ in range(2):
            torch.manual_seed(5)
            for p in optimizer.model.parameters():
                p.grad = torch.randn(p.shape).half().to(p.dtype)
            if optimizer is first:
                first.step(1e-3)
    torch.manual_seed(5)
    for p in first.model.parameters():
        p.grad = torch.randn(p.shape).half().to(p.dtype)
    for optimizer in (first, second):
        optimizer.step(1e-3)
    for name, weight in first.weights().items():
        torch.testing.assert_close(second.weights()[name], weight, rtol=1e-3, atol=1e-4)


def test_checkpoints_from_before_muon_go_on():
    optimizer = Optimizer(with_gradients(), Optim())
    optimizer.step(1e-3)
    other = Optimizer(build(SMALL), Optim())
    other.load_state_dict(optimizer.adamw.state_dict())
    assert len(other.adamw.state) == len(optimizer.adamw.state) > 0


def test_the_norm_of_half_gradients_is_not_rounded():
    model = build(SMALL)
    optimizer = Optimizer(model, Optim(), half=torch.float16)
    for p in model.parameters():
        p.grad = 1e-3 * torch.randn_like(p)
    exact = torch.stack([p.grad.double().norm() for p in model.parameters()]).norm()
    torch.testing.assert_close(optimizer.step(1e-3).double(), exact, rtol=1e-5, atol=0)


def test_what_has_no_gradient_stays():
    for name in ("adamw", "muon"):
        model = with_gradients()
        model.blocks[0].qkv.weight.grad = model.positions.weight.grad = None
        before = [w.detach().clone() for w in (model.blocks[0].qkv.weight, model.positions.weight)]
        Optimizer(model, Optim(name=name)).step(1e-2)
        assert all(map(torch.equal, before, (model.blocks[0].qkv.weight, model.positions.weight)))


@pytest.mark.parametrize("half", [None, torch.float16])
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_state_goes_on(name, half):
    """Saved and loaded after a step, the next is the same bit for bit, with the settings of the new one."""
    o = Optim(name=name)
    model = build(SMALL)
    optimizer = Optimizer(model, o, half=half)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step(1e-3)
    other = build(SMALL)
    resumed = Optimizer(other, change(Config(), optim=dict(name=name, beta2=0.9)).optim, half=half)
    resumed.load_weights(optimizer.weights())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert {g["betas"] for g in resumed.adamw.param_groups} == {(0.9, 0.9)}
    for group in resumed.adamw.param_groups:
        group["betas"] = (o.beta1, o.beta2)
    for m, opt in ((model, optimizer), (other, resumed)):
        torch.manual_seed(5)
        for p in m.parameters():
            p.grad = torch.randn_like(p)
        opt.step(1e-3)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


def test_rules():
    for fields, said in ((dict(decay_fraction=0.0), "decay_fraction=0.0 must be above 0 and at most 1"),
                         (dict(name="sgd"), "optim.name='sgd' must be one of 'adamw', 'muon'")):
        with pytest.raises(ValueError, match=said):
            c = change(Config(), optim=fields)
            configs.check_types(c)
            configs.validate(c)
