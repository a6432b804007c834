"""Every test starts from the same seed, on NaN-filled torch.empty; `gpu` tests are skipped where there is none."""
import os

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


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
