"""The model: exact sizes, GPT-2's initialisation, causality, documents, windows, and every choice trains."""
import dataclasses
import math

import pytest
import torch

import config as configs
from config import Model
from flash_attn2 import backends
from model import GPT, rope

SMALL = Model(n_layer=2, n_head=4, d_model=32, attention="sdpa")
MODERN = dataclasses.replace(SMALL, n_kv_head=2, norm="rmsnorm", position="rope", qk_norm=True, mlp="swiglu",
                             bias=False)


def build(c: Model, vocab: int = 50, T: int = 32, backend: str = "sdpa") -> GPT:
    attention = backends.build(backend, torch.device("cpu"), torch.float32, c.d_model // c.n_head, plain=False)
    return GPT(c, vocab, T, attention)


def count(name: str, vocab: int) -> int:
    c = configs.load(f"configs/{name}.py")
    with torch.device("meta"):
        return sum(p.numel() for p in build(c.model, vocab, c.data.seq_len).parameters())


def test_gpt2_has_its_124_439_808_parameters():
    assert count("gpt2_124m", 50257) == 124_439_808


def test_modern_has_gpt2s_size():
    assert 0.85 < count("modern_124m", 50257) / 124_439_808 < 1.15


def test_initial_loss_is_that_of_a_uniform_guess():
    tokens = torch.randint(0, 50, (4, 33))
    loss = build(SMALL)(tokens[:, :-1], tokens[:, 1:]) / (4 * 32)
    assert abs(loss - math.log(50)) < 0.1


def test_init_as_gpt2():
    model = build(dataclasses.replace(SMALL, d_model=256, n_layer=8))
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            assert (p == 0).all(), name
        elif "norm" in name:
            assert (p == 1).all(), name
        else:
            expected = 0.02 / math.sqrt(2 * 8) if name.endswith(("attention_out.weight", "mlp_out.weight")) else 0.02
            assert abs(p.std() / expected - 1) < 0.05, name
    assert model.lm_head.weight is model.embed.weight


def test_untied_embeddings_are_two_matrices():
    model = build(dataclasses.replace(SMALL, tied_embeddings=False))
    assert model.lm_head.weight is not model.embed.weight


@pytest.mark.parametrize("c", [SMALL, MODERN], ids=["gpt2", "modern"])
def test_future_tokens_cannot_change_past_logits(c):
    model, tokens = build(c), torch.randint(0, 50, (1, 32))
    changed = tokens.clone()
    changed[:, 20:] = (changed[:, 20:] + 1) % 50
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :20], after[:, :20])
    assert not torch.allclose(before[:, 20:], after[:, 20:])


@pytest.mark.parametrize("c", [SMALL, MODERN], ids=["gpt2", "modern"])
@pytest.mark.parametrize("backend", ["sdpa", "reference"])
def test_a_document_in_a_packed_row_is_as_if_alone(c, backend):
    model, tokens = build(c, backend=backend), torch.randint(0, 50, (1, 32))
    doc_start = torch.tensor([[0] * 13 + [13] * 19], dtype=torch.int32)
    packed = model(tokens, doc_start=doc_start)
    torch.testing.assert_close(packed[:, :13], model(tokens[:, :13]), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(packed[:, 13:], model(tokens[:, 13:]), rtol=1e-4, atol=1e-5)


def test_no_gradient_crosses_a_document():
    model, tokens = build(MODERN), torch.randint(0, 25, (1, 32))
    tokens[:, 13:] += 25                                         # the two documents share no token
    targets = tokens.roll(-1, 1)
    targets[:, :13] = -1                                         # only document 2 is to be predicted
    targets[:, -1] = -1
    model = build(dataclasses.replace(MODERN, tied_embeddings=False))
    model(tokens, targets, torch.tensor([[0] * 13 + [13] * 19])).backward()
    touched = model.embed.weight.grad.abs().sum(1) > 0
    assert touched[tokens[0, 13:-1]].all() and not touched[tokens[0, :13]].any()


def test_targets_of_minus_one_do_not_count():
    model, tokens = build(SMALL), torch.randint(0, 50, (2, 32))
    targets = torch.randint(0, 50, (2, 32))
    targets[0] = -1
    torch.testing.assert_close(model(tokens, targets), model(tokens[1:], targets[1:]))


def test_window_pattern_reaches_the_layers():
    c = dataclasses.replace(SMALL, n_layer=5, window=4, window_pattern="LSS")
    assert build(c).windows == [0, 4, 4, 0, 4]


def test_window_bounds_what_a_layer_sees():
    """Two layers that see 4 keys each: position 31 depends on 31 - 2 * 3 = 25 and on nothing before."""
    model = build(dataclasses.replace(MODERN, window=4, window_pattern="S"))
    tokens = torch.randint(0, 50, (1, 32))
    logits = model(tokens)[0, -1]
    for first_kept, same in ((25, True), (26, False)):
        changed = tokens.clone()
        changed[:, :first_kept] = (changed[:, :first_kept] + 1) % 50
        assert torch.allclose(model(changed)[0, -1], logits, atol=1e-6) == same


def test_padded_vocabulary_has_no_logits():
    model = build(dataclasses.replace(SMALL, vocab_multiple=64), vocab=50)
    assert model.lm_head.weight.shape[0] == 64
    assert model(torch.zeros(1, 3, dtype=torch.long)).shape == (1, 3, 50)


def test_rope_keeps_neighbours_apart_at_long_positions_under_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        cos, sin = rope(torch.tensor([[1_000_000, 1_000_001]]), 64, 10_000.0)
    assert cos.dtype == torch.float32
    exact = torch.arange(1_000_000, 1_000_002).double()[:, None] * 10_000.0 ** (torch.arange(0, 64, 2).double() / -64)
    assert (cos[0, :, 0].double() - exact.cos()).abs().max() < 0.1
    assert (cos[0, 0] - cos[0, 1]).abs().max() > 0.1


def test_rope_sees_only_distances():
    q, k = torch.randn(2, 1, 1, 1, 64)
    from model import rotate

    def score(i, j):
        at = [rope(torch.tensor([[p]]), 64, 100.0) for p in (i, j)]
        return (rotate(q, *at[0]) * rotate(k, *at[1])).sum()
    torch.testing.assert_close(score(7, 3), score(107, 103), rtol=1e-4, atol=1e-4)
    assert abs(score(7, 3) - score(7, 4)) > 1e-3


CHOICES = dict(norm=["layernorm", "rmsnorm"], position=["learned", "rope"], mlp=["gelu", "swiglu"], bias=[True, False],
               qk_norm=[True, False], n_kv_head=[0, 1, 2], tied_embeddings=[True, False], d_ff=[0, 48])


@pytest.mark.parametrize("field, value", [(f, v) for f, values in CHOICES.items() for v in values], ids=str)
def test_every_choice_overfits_one_batch(field, value):
    model = build(dataclasses.replace(SMALL, **{field: value}))
    tokens = torch.randint(0, 50, (2, 33))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(40):
        loss = model(tokens[:, :-1], tokens[:, 1:]) / 64
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss < 0.5


@pytest.mark.parametrize("c", [SMALL, MODERN], ids=["gpt2", "modern"])
def test_flash_attn2_and_sdpa_give_the_same_loss_and_gradients(c):
    """The whole model on our kernels (through the interpreter) against torch's, documents and windows included."""
    c = dataclasses.replace(c, window=5, window_pattern="LS")
    tokens, targets = torch.randint(0, 50, (2, 2, 32))
    doc_start = torch.tensor([[0] * 10 + [10] * 22, [0] * 32], dtype=torch.int32)
    grads = []
    for backend in ("sdpa", "flash_attn2"):
        torch.manual_seed(1)
        model = build(c, backend=backend)
        model(tokens, targets, doc_start).backward()
        grads.append({n: p.grad for n, p in model.named_parameters()})
    for name in grads[0]:
        torch.testing.assert_close(grads[0][name], grads[1][name], rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("name, count", [("124m", 124_439_808), ("350m", 354_823_168), ("774m", 774_030_080),
                                         ("1500m", 1_557_611_200)])
def test_gpt2_presets_have_its_parameters(name, count):
    """Of the released checkpoints."""
    with torch.device("meta"):
        c = configs.load(f"configs/gpt2_{name}.py")
        model = GPT(c.model, 50_257, c.data.seq_len, None)
    assert sum(p.numel() for p in model.parameters()) == count
