import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from runtime import flops


def packed(lengths, T):
    """doc_start (T,) of documents of these lengths."""
    starts, at = [], 0
    for length in lengths:
        starts += [at] * length
        at += length
    return starts[:T]


def brute_force(doc_start, B, T, window):
    pairs = 0
    for b in range(B):
        for i in range(T):
            for j in range(T):
                first = 0 if doc_start is None else int(doc_start[b, i])
                pairs += first <= j <= i and (window == 0 or i - j < window)
    return pairs


@pytest.mark.parametrize("window", [0, 1, 2, 7, 16, 17, 100], ids="window{}".format)
@pytest.mark.parametrize("docs", [None, [[1] * 17, [17]], [[5, 12], [1, 1, 9, 6]]],
                         ids=["row", "ones", "packed"])
def test_attended_pairs_against_brute_force(docs, window):
    T = 17
    doc_start = None if docs is None else torch.tensor([packed(lengths, T) for lengths in docs])
    assert flops.attended_pairs(doc_start, 2, T, window) == brute_force(doc_start, 2, T, window)


def test_attended_pairs_by_hand():
    assert flops.attended_pairs(None, 1, 4, 0) == 1 + 2 + 3 + 4
    assert flops.attended_pairs(None, 3, 4, 2) == 3 * (1 + 2 + 2 + 2)
    assert flops.attended_pairs(torch.tensor([[0, 0, 2, 2]], dtype=torch.int32), 1, 4, 0) == 6
    assert flops.attended_pairs(None, 2, 1, 0) == 2


def test_attended_pairs_of_a_million_tokens_does_not_overflow():
    T = 2**20
    whole = torch.zeros(1, T, dtype=torch.int32)
    pairs = T * (T + 1) // 2
    assert flops.attended_pairs(whole, 1, T, 0) == flops.attended_pairs(None, 1, T, 0) == pairs > 2**31


@pytest.mark.parametrize("doc_start, window, word", [
    (torch.zeros(1, 5), 0, "shape"), (torch.tensor([[1, 0, 0, 0]]), 0, "own index"),
    (torch.tensor([[-1, 0, 0, 0]]), 0, "own index"), (None, -1, "window")])
def test_attended_pairs_errors(doc_start, window, word):
    with pytest.raises(ValueError, match=word):
        flops.attended_pairs(doc_start, 1, 4, window)


class Tiny(nn.Module):
    """Two layers whose attention multiplies each query with the keys it sees and no others."""

    def __init__(self, n_head=2, head_dim=4, windows=(0, 3), vocab=11, biases=True):
        super().__init__()
        self.n_head, self.head_dim, self.windows = n_head, head_dim, list(windows)
        d = n_head * head_dim
        self.embedding = nn.Embedding(vocab, d)
        self.qkv = nn.ModuleList(nn.Linear(d, 3 * d, bias=biases) for _ in windows)
        self.up = nn.ModuleList(nn.Linear(d, 2 * d, bias=biases) for _ in windows)
        self.down = nn.ModuleList(nn.Linear(2 * d, d, bias=biases) for _ in windows)
        self.lm_head = nn.Linear(d, vocab, bias=False)
        self.lm_head.weight = self.embedding.weight

    def attend(self, x, qkv, window, doc_start):                     # x (B, T, d)  doc_start (B, T)
        B, T, d = x.shape
        # q, k, v (B, H, T, D)
        q, k, v = qkv(x).view(B, T, 3, self.n_head, self.head_dim).permute(2, 0, 3, 1, 4)
        rows = []
        for b in range(B):
            for i in range(T):
                lo = max(int(doc_start[b, i]), i + 1 - window if window else 0)
                s = q[b, :, i:i + 1] @ k[b, :, lo:i + 1].transpose(-1, -2)        # (H, 1, keys)
                rows.append((s.softmax(-1) @ v[b, :, lo:i + 1]).reshape(d))
        return torch.stack(rows).view(B, T, d)

    def forward(self, tokens, doc_start):
        x = self.embedding(tokens)
        for qkv, up, down, window in zip(self.qkv, self.up, self.down, self.windows, strict=True):
            x = x + self.attend(x, qkv, window, doc_start)
            x = x + down(up(x).relu())
        return self.lm_head(x)


@pytest.mark.parametrize("biases", [True, False])
def test_train_flops_against_the_products_really_made(biases):
    B, T = 2, 9
    model = Tiny(biases=biases)
    doc_start = torch.tensor([packed([9], T), packed([1, 5, 3], T)])
    with FlopCounterMode(display=False) as counter:
        model(torch.randint(11, (B, T)), doc_start).square().mean().backward()
    pairs = [flops.attended_pairs(doc_start, B, T, window) for window in model.windows]
    assert flops.train_flops(model, B * T, pairs) == counter.get_total_flops()


def test_train_flops_wants_one_count_a_layer():
    with pytest.raises(ValueError, match="each of the 2 layers"):
        flops.train_flops(Tiny(), 18, [10])


def test_full_flops_per_token_of_gpt2_small():
    assert flops.full_flops_per_token(123_653_376, 12, 768, 1024) == 741_920_256 + 113_246_208


# Device names as the driver spells them; the datasheet's bf16 rate *with* sparsity, twice the dense one.
NAMES = [
    ("NVIDIA A100-SXM4-40GB", 624), ("NVIDIA A100-SXM4-80GB", 624), ("NVIDIA A100 80GB PCIe", 624),
    ("NVIDIA A100-PCIE-40GB", 624), ("NVIDIA A10", 250), ("NVIDIA GeForce RTX 3090", 142),
    ("NVIDIA GeForce RTX 4090", 330.4), ("NVIDIA GeForce RTX 5090", 419),
    ("NVIDIA RTX 6000 Ada Generation", 728.5), ("NVIDIA L4", 242), ("NVIDIA L40S", 733),
    ("NVIDIA H100 80GB HBM3", 1979), ("NVIDIA H100 PCIe", 1513), ("NVIDIA H100 NVL", 1671),
    ("NVIDIA H200", 1979), ("NVIDIA H200 NVL", 1671), ("NVIDIA GH200 480GB", 1979), ("NVIDIA B200", 4500)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name, sparse", NAMES)
def test_peaks_are_the_dense_ones(name, sparse, dtype):
    peak, source = flops.peak_tflops(name, dtype)
    assert peak == pytest.approx(sparse / 2, rel=0.02)
    assert "dense" in source and str(dtype).removeprefix("torch.") in source


def test_every_peak_has_a_name_that_reaches_it():
    names = [name for name, _ in NAMES]
    names += ["Tesla V100-SXM2-16GB", "Tesla V100-SXM3-32GB", "Tesla V100-PCIE-32GB"]
    sources = [flops.peak_tflops(name, "float16")[1] for name in names]
    assert all(any(f" {key}," in source for source in sources) for key in flops.PEAKS)


def test_v100_has_fp16_and_no_bf16():
    assert flops.peak_tflops("Tesla V100-SXM2-32GB", "float16")[0] == 125.0
    peak, reason = flops.peak_tflops("Tesla V100-SXM2-32GB", "bfloat16")
    assert peak is None and "bfloat16" in reason


@pytest.mark.parametrize("name, fp32", [("NVIDIA H200", 67.0), ("NVIDIA A100-SXM4-80GB", 19.5)])
def test_fp32_is_not_tf32(name, fp32):
    assert flops.peak_tflops(name, "float32")[0] == fp32


@pytest.mark.parametrize("name", [
    "Foo 9000", "cpu", "", "NVIDIA A100X", "NVIDIA A10G", "NVIDIA L40", "NVIDIA GB200", "NVIDIA H20",
    "NVIDIA H100", "NVIDIA GeForce RTX 3090 Ti", "NVIDIA GeForce RTX 4090 D",
    "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA H200 MIG 3g.71gb", "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
    "Tesla V100S-PCIE-32GB", "Quadro RTX 6000"])
def test_unknown_devices_have_no_peak(name):
    peak, reason = flops.peak_tflops(name, "bfloat16")
    assert peak is None and repr(name) in reason


def test_unknown_dtype_has_no_peak():
    assert flops.peak_tflops("NVIDIA H200", "float8_e4m3fn")[0] is None


def test_override_wins_and_says_so():
    assert flops.peak_tflops("Foo 9000", "bfloat16", 123.0) == (123.0, "metrics.peak_tflops")
    assert flops.peak_tflops("NVIDIA H200", "bfloat16", 800.0) == (800.0, "metrics.peak_tflops")
    with pytest.raises(ValueError, match="-1"):
        flops.peak_tflops("NVIDIA H200", "bfloat16", -1.0)
