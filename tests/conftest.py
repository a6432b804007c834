"""Every test starts from the same seed, on NaN-filled torch.empty; `gpu` tests are skipped where there is none."""
import fcntl
import gc
import os
import sys
import time

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
os.environ.setdefault("WANDB_MODE", "offline")
torch.set_num_threads(1)        # the tests are small, and run side by side


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def deterministic_no_longer():
    """A run under train.deterministic turns torch's switch for the whole process."""
    yield
    torch.use_deterministic_algorithms(False)


def poisoned(allocate):
    def allocate_and_fill(*args, **kwargs):
        x = allocate(*args, **kwargs)
        return x.fill_(float("nan")) if x.is_floating_point() else x
    return allocate_and_fill


@pytest.fixture
def poison(monkeypatch):
    """What a kernel allocates and does not write shouts."""
    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))


@pytest.fixture(autouse=True)
def give_memory_back(request):
    """Tests of several processes share one GPU: none keeps what it no longer uses."""
    yield
    if torch.cuda.is_available() and request.node.get_closest_marker("gpu"):
        torch.cuda.empty_cache()


@pytest.fixture
def big(tmp_path_factory):
    """big(gib) waits for that much free memory on the GPU, and skips where there never is. One such test at a time."""
    def need(gib: float, patience_s: int = 120) -> None:
        if not torch.cuda.is_available():
            return
        if torch.cuda.mem_get_info()[1] < gib * 2**30:
            pytest.skip(f"needs {gib} GiB on the GPU")
        for _ in range(patience_s):
            if torch.cuda.mem_get_info()[0] >= gib * 2**30:
                return
            time.sleep(1)
        pytest.skip(f"no {gib} GiB came free on the GPU in {patience_s} s")
    with open(tmp_path_factory.getbasetemp().parent / "big.lock", "w") as lock:     # xdist's workers share the parent
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield need
        sys.last_traceback = sys.last_value = sys.last_exc = None                   # a failed test's tensors hang there
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
