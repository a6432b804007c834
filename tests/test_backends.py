"""Every backend gives the reference's attention for every mask it takes, and says in advance what it cannot take."""
import pytest
import torch

import config as configs
from flash_attn2 import backends

CPU = torch.device("cpu")


def run(name: str, window: int, doc_start, H_kv: int = 2):
    torch.manual_seed(3)
    q, k, v = (torch.randn(2, 70, h, 16, requires_grad=True) for h in (4, H_kv, H_kv))
    attention = backends.build(name, CPU, torch.float32, 16, plain=not window and doc_start is None)
    o = attention(q, k, v, attention.mask(70, window, doc_start, CPU))
    o.square().sum().backward()
    return o.detach(), q.grad, k.grad, v.grad


DOCS = torch.tensor([[0] * 30 + [30] + [31] * 39, [0] * 70], dtype=torch.int32)


@pytest.mark.parametrize("window, doc_start", [
    (0, None), (1, None), (9, None), (70, None), (99, None), (0, DOCS), (9, DOCS),
], ids=["causal", "w1", "w9", "wT", "w>T", "docs", "docs+w9"])
@pytest.mark.parametrize("name", ["flash_attn2", "sdpa", "sdpa:math"])
def test_backend_equals_reference(name, window, doc_start):
    for got, want in zip(run(name, window, doc_start), run("reference", window, doc_start), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_config_and_backends_know_the_same_names():
    assert set(configs.Attention.__args__) == {"auto", *backends.NAMES}


def test_auto_is_sdpa_on_a_cpu_and_ours_on_a_gpu():
    assert backends.resolve("auto", CPU) == "sdpa"
    assert backends.resolve("auto", torch.device("cuda")) == "flash_attn2"
    assert backends.resolve("reference", CPU) == "reference"


@pytest.mark.parametrize("name, dtype, head_dim, plain, rule", [
    ("fla", torch.float32, 64, True, "no attention backend is called 'fla'; known: auto, flash_attn2"),
    ("flash_attn2", torch.float32, 320, True, "head width 320 must not exceed 256"),
    ("flash_attn2", torch.bfloat16, 64, True, "bfloat16 is silently wrong"),
    ("sdpa:cudnn", torch.float32, 64, True, "sdpa:cudnn runs on a GPU only"),
    ("sdpa:efficient", torch.float32, 64, True, "sdpa:efficient runs on a GPU only"),
    ("sdpa:flash", torch.float32, 64, False, "sdpa:flash takes no mask but causal"),
])
def test_what_a_backend_cannot_do_is_an_error(name, dtype, head_dim, plain, rule):
    with pytest.raises(ValueError) as error:
        backends.build(name, CPU, dtype, head_dim, plain=plain)
    assert rule in str(error.value)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["flash_attn2", "sdpa", "sdpa:flash", "sdpa:cudnn", "sdpa:efficient"])
@pytest.mark.parametrize("window, documents", [(0, False), (300, False), (0, True)], ids=["causal", "window", "docs"])
def test_backend_equals_reference_on_a_gpu(name, window, documents):
    device = torch.device("cuda")
    plain = not window and not documents
    if name == "sdpa:flash" and not plain:
        pytest.skip("takes no mask but causal")
    H_kv = 4 if name == "sdpa:efficient" else 2
    q, k, v = (torch.randn(2, 1000, h, 64, device=device, dtype=torch.bfloat16) for h in (4, H_kv, H_kv))
    doc_start = torch.zeros(2, 1000, dtype=torch.int32, device=device)
    doc_start[0, 400:] = 400
    doc_start = doc_start if documents else None
    o = [a(q, k, v, a.mask(1000, window, doc_start, device))
         for a in (backends.build(n, device, torch.bfloat16, 64, plain=plain) for n in (name, "reference"))]
    torch.testing.assert_close(o[0], o[1], rtol=2e-2, atol=2e-2)
