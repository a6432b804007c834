"""Every backend gives the reference's attention for every mask it takes, and says in advance what it cannot take."""
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

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


EVERY_MASK = pytest.mark.parametrize("window, doc_start", [
    (0, None), (1, None), (9, None), (70, None), (99, None), (0, DOCS), (9, DOCS),
], ids=["causal", "w1", "w9", "wT", "w>T", "docs", "docs+w9"])


@EVERY_MASK
@pytest.mark.parametrize("name", ["flash_attn2", "sdpa", "sdpa:math"])
def test_backend_equals_reference(name, window, doc_start):
    for got, want in zip(run(name, window, doc_start), run("reference", window, doc_start), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.fixture
def flex():
    """FlexAttention, uncompiled: compilers for the CPU take a minute a case."""
    torch.compiler.reset()
    with torch.compiler.set_stance("force_eager"):
        yield backends.Flex()


@EVERY_MASK
@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_equals_reference(flex, window, doc_start):
    q, k, v = (torch.randn(2, 70, h, 16) for h in (4, 2, 2))
    reference = backends.Reference()
    o = flex(q, k, v, flex.mask(70, window, doc_start, CPU))
    torch.testing.assert_close(o, reference(q, k, v, reference.mask(70, window, doc_start, CPU)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("T", [1, 127, 128, 129, 384, 1000], ids="T{}".format)
@pytest.mark.parametrize("window", [0, 1, 128, 129, 300, 2000], ids="w{}".format)
@pytest.mark.parametrize("documents", [False, True], ids=["plain", "docs"])
def test_flex_mask_is_what_create_block_mask_finds(flex, T, window, documents):
    starts = torch.stack([(torch.rand(T) < p).int() for p in (0.1, 0.002)]) if documents else None
    doc_start = (starts * torch.arange(T)).cummax(1).values.int() if documents else None
    mask = flex.mask(T, window, doc_start, CPU)
    found = create_block_mask(mask.mask_mod, 2 if documents else None, None, T, T, device="cpu")
    assert mask.shape == found.shape
    for way in ("kv", "q"):
        for name in (f"{way}_num_blocks", f"{way}_indices", f"full_{way}_num_blocks", f"full_{way}_indices"):
            assert torch.equal(getattr(mask, name), getattr(found, name)), name


def test_flex_mask_of_a_long_row_needs_no_square_of_it(flex):
    """T^2 would be 17 GB of bools."""
    mask = flex.mask(131072, 4096, torch.zeros(1, 131072, dtype=torch.int32), CPU)
    assert mask.shape == (1, 1, 131072, 131072) and mask.sparsity() > 95


@EVERY_MASK
def test_flex_and_its_mask_are_one_graph_in_a_compiled_model(window, doc_start):
    torch.compiler.reset()
    flex, reference = backends.Flex(), backends.Reference()

    @torch.compile(backend="eager", fullgraph=True, dynamic=False)
    def model(q, k, v, doc_start):
        return flex(q, k, v, flex.mask(70, window, doc_start, CPU))
    q, k, v = (torch.randn(2, 70, h, 16) for h in (4, 2, 2))
    want = reference(q, k, v, reference.mask(70, window, doc_start, CPU))
    torch.testing.assert_close(model(q, k, v, doc_start), want, rtol=1e-4, atol=1e-4)


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
    ("flex", torch.float32, 64, True, "flex trains on a GPU only: torch has no backward for it on a cpu; use sdpa"),
    ("sdpa:flash", torch.float32, 64, False, "sdpa:flash takes no mask but causal"),
])
def test_what_a_backend_cannot_do_is_an_error(name, dtype, head_dim, plain, rule):
    with pytest.raises(ValueError) as error:
        backends.build(name, CPU, dtype, head_dim, plain=plain)
    assert rule in str(error.value)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["flash_attn2", "sdpa", "sdpa:flash", "sdpa:cudnn", "sdpa:efficient", "flex"])
@pytest.mark.parametrize("window, documents", [(0, False), (300, False), (0, True)], ids=["causal", "window", "docs"])
def test_backend_equals_reference_on_a_gpu(name, window, documents):
    device = torch.device("cuda")
    plain = not window and not documents
    if name == "sdpa:flash" and not plain:
        pytest.skip("takes no mask but causal")
    H_kv = 4 if name == "sdpa:efficient" else 2
    q, k, v = (torch.randn(2, 1000, h, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
               for h in (4, H_kv, H_kv))
    doc_start = torch.zeros(2, 1000, dtype=torch.int32, device=device)
    doc_start[0, 400:] = 400
    doc_start = doc_start if documents else None
    do = torch.randn_like(q)

    def results(name: str):
        a = backends.build(name, device, torch.bfloat16, 64, plain=plain, grouped=H_kv != 4)
        o = a(q, k, v, a.mask(1000, window, doc_start, device))
        return o, *torch.autograd.grad(o, (q, k, v), do)
    for got, want in zip(results(name), results("reference"), strict=True):
        assert (got - want).float().norm() < 1e-2 * want.float().norm()


@pytest.mark.gpu
@pytest.mark.parametrize("window, documents", [(0, False), (300, False), (300, True)],
                         ids=["causal", "window", "docs+w"])
def test_flex_in_a_compiled_function_equals_flex_by_itself(window, documents):
    torch.compiler.reset()
    device = torch.device("cuda")
    flex = backends.build("flex", device, torch.bfloat16, 64, plain=False, grouped=True)
    q, k, v = (torch.randn(2, 1000, h, 64, device=device, dtype=torch.bfloat16, requires_grad=True) for h in (4, 2, 2))
    doc_start = torch.tensor([[0] * 400 + [400] * 600, [0] * 1000], dtype=torch.int32, device=device)
    doc_start = doc_start if documents else None

    def model(q, k, v, doc_start):
        return flex(q, k, v, flex.mask(1000, window, doc_start, device))

    def results(call):
        o = call(q, k, v, doc_start)
        return o, *torch.autograd.grad(o.float().square().sum(), (q, k, v))
    compiled = torch.compile(model, fullgraph=True, dynamic=False)
    for got, want in zip(results(compiled), results(model), strict=True):
        assert (got - want).float().norm() < 1e-2 * want.float().norm()


@pytest.mark.gpu
def test_a_head_width_that_flex_cannot_do_is_an_error():
    torch.compiler.reset()
    with pytest.raises(ValueError, match="flex cannot do head width 8 in torch.bfloat16 on cuda"):
        backends.build("flex", torch.device("cuda"), torch.bfloat16, 8, plain=True)
