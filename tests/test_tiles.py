"""Tiles: TMA descriptors load what pointers load, to the last bit; what they cannot address goes by pointers."""
import threading
from types import SimpleNamespace

import pytest
import torch
from attention_cases import Case, document_starts, make_inputs, make_mask, ours

from flash_attn2 import causal_mask, flash_attention, forward, tiles
from flash_attn2.tiles import Tile, architecture, descriptors_or_pointers, padded, tma_can

TMA = Tile(64, 64, 4, 1, TMA=True)
CASES = {
    "T130": Case(130, D=64),
    "one_token": Case(1, D=16),
    "D80_padded": Case(65, H=1, D=80),
    "D40_padded": Case(65, H=1, D=40),
    "gqa_batch": Case(65, B=2, H=4, H_kv=2, D=16),
    "Tq_above_Tk": Case(130, 65, H=1, D=16),
    "Tq_below_Tk": Case(65, 130, H=1, D=16),
    "window": Case(130, H=1, D=16, window=20),
    "documents": Case(130, H=1, B=2, D=16, docs=((130,), (1, 64, 65))),
    "softcap": Case(130, H=1, D=16, softcap=5.0),
}


@pytest.fixture
def descriptors(monkeypatch):
    """Counts the descriptors that are made, while the interpreter's tile asks for them."""
    made, real = [], tiles.TensorDescriptor

    def counted(*args):
        made.append(args)
        return real(*args)
    monkeypatch.setattr(tiles, "INTERPRETER", TMA)
    monkeypatch.setattr(tiles, "TensorDescriptor", counted)
    return made


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_descriptors_load_what_pointers_load(case, monkeypatch, request, poison):
    x = make_inputs(case, torch.float32, torch.device("cpu"))
    mask, _ = make_mask(case, torch.device("cpu"))
    by_pointers = ours(x, mask, softcap=case.softcap)
    made = request.getfixturevalue("descriptors")
    by_descriptors = ours(x, mask, softcap=case.softcap)
    assert len(made) == 6, "k, v forward; k, v and q, do backward"
    for name, value in by_pointers.items():
        assert torch.equal(value, by_descriptors[name]), name


@pytest.mark.parametrize("layout", ["head_width_5", "offset_of_one", "odd_rows", "expanded"])
def test_what_tma_cannot_address_goes_by_pointers(layout, descriptors):
    """Widths, bases and strides that are no multiple of 16 bytes, and strides of 0 (expanded heads)."""
    make = {
        "head_width_5": lambda: torch.randn(1, 70, 2, 5),
        "offset_of_one": lambda: torch.randn(1 * 70 * 2 * 16 + 1)[1:].view(1, 70, 2, 16),
        "odd_rows": lambda: torch.randn(1, 70, 2 * 16 + 1)[..., :32].unflatten(2, (2, 16)),
        "expanded": lambda: torch.randn(1, 70, 1, 16).expand(1, 70, 2, 16),
    }[layout]
    q, k, v = make(), make(), make()
    assert not tma_can(k)
    got = flash_attention(q, k, v, causal_mask())
    assert not descriptors
    want = flash_attention(q.contiguous(), k.contiguous(), v.contiguous(), causal_mask())
    assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("T", [130, 64])
def test_columns_past_the_width_are_not_read(T):
    """Whole tiles of a padded width too: NaN lies there, in a wider row."""
    wide = [torch.full((1, T, 1, 64), float("nan")) for _ in range(3)]
    q, k, v = (x[..., :40].copy_(torch.randn(1, T, 1, 40)).requires_grad_() for x in wide)
    o, lse = flash_attention(q, k, v, causal_mask())
    grads = torch.autograd.grad(o.sum() + lse.sum(), (q, k, v))
    assert all(x.isfinite().all() for x in (o, lse, *grads))


@pytest.mark.parametrize("stride_t, copied", [(2**23 - 16, False), (2**23, True)])
def test_rows_too_far_apart_for_32_bits_are_copied(stride_t, copied):
    x = torch.empty_strided((1, 70, 2, 16), (70 * stride_t, stride_t, 16, 1), device="meta")
    assert (tiles.addressable(x) is not x) == copied


def test_each_thread_gets_a_context_once(monkeypatch):
    """Descriptors are encoded in the thread's CUDA context, which a new thread lacks until torch has launched there."""
    made, entered = [], []
    monkeypatch.setattr(torch, "zeros", lambda n, device: made.append((threading.get_ident(), device)))
    monkeypatch.setattr(torch.cuda, "device", entered.append)
    x = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 7))

    def launch_twice():
        forward.on_device(x), forward.on_device(x)
    launch_twice()
    thread = threading.Thread(target=launch_twice)
    thread.start()
    thread.join()
    assert [device for _, device in made] == [x.device] * 2 and len({ident for ident, _ in made}) == 2
    assert entered == [x.device] * 4


def test_tma_can_take_a_packed_qkv():
    """The usual views need no copy: one projection for q, k, v, and heads before tokens."""
    qkv = torch.randn(2, 70, 3, 4, 16)
    assert all(map(tma_can, (*qkv.unbind(2), qkv[:, :, 0].transpose(1, 2).contiguous().transpose(1, 2))))


def test_nothing_is_descriptors_or_pointers_of_an_empty_tensor():
    """A descriptor of no rows does not exist: cuTensorMapEncode refuses it."""
    t, rows = descriptors_or_pointers(TMA, 64, torch.empty(1, 0, 2, 16), torch.empty(1, 0, 2, 16))
    assert not t.TMA and all(isinstance(x, torch.Tensor) for x in rows)


@pytest.mark.parametrize("D, columns", [(1, 16), (16, 16), (17, 32), (64, 64), (80, 128), (129, 256), (256, 256)])
def test_padded(D, columns):
    assert padded(D) == columns


@pytest.mark.parametrize("capability, rows", [
    ((8, 0), "sm_80"), ((8, 6), "sm_80"), ((8, 9), "sm_80"), ((12, 0), "sm_80"),
    ((9, 0), "sm_90"), ((10, 0), "sm_100"), ((10, 3), "sm_100")])
def test_architecture(capability, rows):
    assert architecture(*capability) == rows
    assert (rows, 64) in tiles.TILES


@pytest.mark.gpu
@pytest.mark.parametrize("documents", [False, True], ids=["closed", "documents"])
@pytest.mark.parametrize("D", [64, 128, 256])
def test_descriptors_load_what_pointers_load_on_a_gpu(D, documents, device, monkeypatch, poison):
    case = Case(1000, B=2, H=4, H_kv=2, D=D, docs=((1000,), (300, 700)) if documents else None)
    x = make_inputs(case, torch.bfloat16, device)
    mask, _ = make_mask(case, device)
    with_tma = ours(x, mask, kernels="triton")
    monkeypatch.setattr(tiles, "tma_can", lambda x: False)
    without = ours(x, mask, kernels="triton")
    for name, value in with_tma.items():
        assert torch.equal(value, without[name]), name


@pytest.mark.gpu
def test_a_copy_is_made_only_of_what_no_kernel_can_walk(device):
    x = torch.randn(1, 70, 2, 128, device=device, dtype=torch.bfloat16)
    assert tiles.addressable(x[:, :, :, 1:]).data_ptr() == x[:, :, :, 1:].data_ptr()
    assert tiles.addressable(x.transpose(1, 3)).is_contiguous()
    starts = document_starts(((30, 40),), device)
    for view in (x[..., 1:65], x[:, 1:, :, :64]):
        mask = causal_mask(0, starts[:, :view.shape[1]])
        got = flash_attention(view, view, view, mask, kernels="triton")
        same = view.contiguous()
        want = flash_attention(same, same, same, mask, kernels="triton")
        torch.testing.assert_close(got, want)
