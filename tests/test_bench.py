"""The benchmark: its arithmetic on given times, its one line without a GPU, and a whole small comparison on one."""
import pytest
import torch

from flash_attn2 import bench


def test_row_is_flops_over_time():
    T, D = 32768, 128
    forward_ms = 2 * 16 * T * T * D / 500e12 * 1e3              # what 500 TFLOP/s takes
    row = bench.row("ours", T, D, [forward_ms, forward_ms / 2, forward_ms * 2], [forward_ms * 2.5] * 3)
    assert "500 [250-1000]" in row and "500 [500-500]" in row and row.split()[-1] == "500"


def test_a_second_of_batches_counts_every_row():
    assert bench.row("ours", 8192, 64, [1.0], [2.5]).split()[-1] == f"{2 * 4 * 32 * 8192**2 * 64 / 1e9:.0f}"


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_without_a_gpu_it_is_one_line():
    with pytest.raises(SystemExit) as stop:
        bench.main()
    assert stop.value.code == "error: the benchmark needs an NVIDIA GPU"


@pytest.mark.gpu
def test_every_contender_is_timed(monkeypatch):
    monkeypatch.setattr(bench, "ROUNDS", 2)
    times = bench.compare(1024, 64, torch.device("cuda"))
    assert set(times) == set(bench.CONTENDERS)
    assert all(len(p) == 2 and all(t > 0 for t in p) for pair in times.values() for p in pair)
