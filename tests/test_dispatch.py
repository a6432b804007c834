"""Which pair runs: the rule, its words, and that the chosen launchers really are called."""
import logging
import sys
from types import SimpleNamespace

import pytest
import torch
from attention_cases import Case, make_inputs, ours

from flash_attn2 import causal_mask, dispatch, flash_attention, flash_attn_func, flash_attn_varlen_func, hopper
from flash_attn2.dispatch import why_not_hopper


def card(capability=(9, 0), version="3.7"):
    """What the rule looks at beside the tensors."""
    return dict(capability=capability, version=version)


def put(monkeypatch, capability, version) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(hopper, "VERSION", version)


def tensor(T=65, H=2, D=64, dtype=torch.bfloat16, is_cuda=True, stride=None, offset=0):
    """As a CUDA tensor (1, T, H, D), without one."""
    shape = torch.Size((1, T, H, D))
    stride = stride or (T * H * D, H * D, D, 1)
    return SimpleNamespace(is_cuda=is_cuda, device="cuda:0", dtype=dtype, shape=shape, numel=shape.numel,
                           stride=lambda axis=None: stride if axis is None else stride[axis],
                           element_size=lambda: dtype.itemsize, data_ptr=lambda: 2**20 + offset)


TAKEN = {"bf16": {}, "fp16": dict(dtype=torch.float16), "D128": dict(D=128), "one_token": dict(T=1),
         "packed_qkv": dict(stride=(3 * 65 * 128, 3 * 128, 64, 1)), "heads_first": dict(stride=(8320, 64, 65 * 64, 1)),
         "most_rows": dict(T=2**28)}
REFUSED = {
    "cpu": (dict(is_cuda=False), {}, 0.0, "no sm_90 card"),
    "ampere": ({}, card((8, 0)), 0.0, "no sm_90 card"),
    "blackwell": ({}, card((10, 0)), 0.0, "no sm_90 card"),
    "triton_3.5": ({}, card(version="3.5"), 0.0, "triton 3.5, Gluon known for 3.6, 3.7"),
    "triton_3.8": ({}, card(version="3.8"), 0.0, "triton 3.8, Gluon known for 3.6, 3.7"),
    "float32": (dict(dtype=torch.float32), {}, 0.0, "float32"),
    "D80": (dict(D=80), {}, 0.0, "head width 80"),
    "D256": (dict(D=256), {}, 0.0, "head width 256"),
    "softcap": ({}, {}, 15.0, "softcap"),
    "no_rows": (dict(T=0), {}, 0.0, "that TMA cannot address: empty"),
    "odd_strides": (dict(stride=(65 * 132, 132, 66, 1)), {}, 0.0, "or no multiples of 16 bytes"),
    "odd_base": (dict(offset=2), {}, 0.0, "or no multiples of 16 bytes"),
    "every_other_column": (dict(stride=(65 * 256, 256, 128, 2)), {}, 0.0, "strides or base"),
    "too_many_rows": (dict(T=2**28 + 1), {}, 0.0, "more than 2^29 query rows over all heads, 536870914"),
}


@pytest.mark.parametrize("shape", TAKEN.values(), ids=TAKEN)
@pytest.mark.parametrize("version", hopper.KNOWN)
def test_hopper_takes(shape, version, monkeypatch):
    put(monkeypatch, **card(version=version))
    x = tensor(**shape)
    assert why_not_hopper(x, x, x) is None and dispatch.on_hopper("auto", x, x, x)
    assert dispatch.on_hopper("hopper", x, x, x) and not dispatch.on_hopper("triton", x, x, x)


@pytest.mark.parametrize("shape, where, softcap, reason", REFUSED.values(), ids=REFUSED)
def test_hopper_does_not_take(shape, where, softcap, reason, monkeypatch):
    put(monkeypatch, **card() | where)
    x = tensor(**shape)
    assert reason in why_not_hopper(x, x, x, softcap)
    assert not dispatch.on_hopper("auto", x, x, x, softcap)
    with pytest.raises(ValueError, match="kernels='hopper' does not take this: .*; use auto or triton") as error:
        dispatch.on_hopper("hopper", x, x, x, softcap)
    assert reason in str(error.value)


@pytest.mark.parametrize("odd", range(3), ids="qkv".__getitem__)
def test_each_of_q_k_v_is_looked_at(odd, monkeypatch):
    put(monkeypatch, **card())
    assert "strides or base" in why_not_hopper(*(tensor(offset=2 * (n == odd)) for n in range(3)))


def test_the_installed_triton_is_known():
    assert hopper.VERSION in hopper.KNOWN


def test_an_unknown_triton_is_logged_once(monkeypatch, caplog):
    put(monkeypatch, **card(version="3.8"))
    dispatch._log_version.cache_clear()
    x = tensor()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            dispatch.on_hopper("auto", x, x, x)
    dispatch._log_version.cache_clear()
    [record] = caplog.records
    assert "written for Gluon of triton 3.6, 3.7, this is 3.8" in record.getMessage()


def test_no_log_line_where_no_card_is_hoppers(monkeypatch, caplog):
    put(monkeypatch, (8, 0), "3.8")
    x = tensor()
    dispatch.on_hopper("auto", x, x, x)
    assert not caplog.records


def test_unknown_kernels_are_an_error(device):
    x = torch.zeros(1, 5, 2, 16, device=device)
    with pytest.raises(ValueError, match="kernels='cuda' must be one of auto, hopper, triton"):
        flash_attention(x, x, x, causal_mask(), kernels="cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a CPU")
def test_hopper_on_a_cpu_is_an_error():
    x = torch.zeros(1, 5, 2, 64, dtype=torch.float16)
    with pytest.raises(ValueError, match="kernels='hopper' does not take this: no sm_90 card"):
        flash_attention(x, x, x, causal_mask(), kernels="hopper")


@pytest.fixture
def called(monkeypatch):
    """Which launcher ran, of both pairs, on a machine where Hopper takes everything. Both compute as Triton's does."""
    names = []
    real = dict(forward=dispatch.triton_forward.forward, backward=dispatch.triton_backward.backward)

    def launcher(pair, name):
        def run(*args):
            names.append(f"{pair} {name}")
            return real[name](*args)
        return run
    for name in real:
        monkeypatch.setattr(getattr(dispatch, f"triton_{name}"), name, launcher("triton", name))
        monkeypatch.setitem(sys.modules, f"flash_attn2.hopper.{name}", SimpleNamespace(
            **{name: launcher("hopper", name)}))
    monkeypatch.setattr(dispatch, "why_not_hopper", lambda *args: None)
    return names


ROUTES = [("auto", None, "hopper", "hopper"), ("hopper", None, "hopper", "hopper"),
          ("triton", None, "triton", "triton")] + [
    (kernels, how, forward, "triton") for kernels, forward in (("auto", "hopper"), ("triton", "triton"))
    for how in ("flag", "torch")]


@pytest.mark.parametrize("how", ["flag", "torch"])
def test_hoppers_backward_is_not_deterministic(how, called):
    x = make_inputs(Case(5, D=16), torch.float32, torch.device("cpu"))
    torch.use_deterministic_algorithms(how == "torch")
    with pytest.raises(ValueError, match="kernels='hopper' sums dq in any order; for a deterministic"):
        ours(x, causal_mask(), kernels="hopper", deterministic=how == "flag")


@pytest.mark.parametrize("kernels, how, forward, backward", ROUTES)
def test_the_chosen_pair_is_called(kernels, how, forward, backward, called):
    """Deterministic by the flag, or by torch's switch. Who names a pair gets it."""
    x = make_inputs(Case(5, D=16), torch.float32, torch.device("cpu"))
    torch.use_deterministic_algorithms(how == "torch")
    ours(x, causal_mask(), kernels=kernels, deterministic=how == "flag")
    assert called == [f"{forward} forward", f"{backward} backward"]


def packed(q, k, v, **options):
    cu_seqlens = torch.tensor([0, 2, 5], dtype=torch.int32)
    return flash_attn_varlen_func(q[0], k[0], v[0], cu_seqlens, cu_seqlens, 3, 3, **options)


@pytest.mark.parametrize("call", [flash_attn_func, packed])
@pytest.mark.parametrize("deterministic, backward", [(False, "hopper"), (True, "triton")])
def test_flash_attns_calls_hand_deterministic_on(deterministic, backward, call, called):
    x = make_inputs(Case(5, D=16), torch.float32, torch.device("cpu"))
    call(*x[:3], causal=True, deterministic=deterministic).sum().backward()
    assert called == ["hopper forward", f"{backward} backward"]
