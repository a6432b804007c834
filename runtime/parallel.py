"""Which process this is: one object that everything else asks. Alone, or one of torchrun's ranks."""
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Ranks:
    rank: int
    world: int
    device: torch.device

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def device_name(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"

    def send(self, x: Tensor) -> Tensor:
        """x on the device. From pinned memory: from any other the copy would wait for all work before it."""
        return x.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else x

    def sum(self, x: Tensor) -> Tensor:
        """x summed over the ranks, in place."""
        if self.world > 1:
            dist.all_reduce(x)
        return x

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier()


def start(choice: str = "auto") -> Ranks:
    """Joins torchrun's process group where there is one. choice: auto, cuda or cpu. ValueError: no GPU for it."""
    cuda = torch.cuda.is_available()
    if choice == "cuda" and not cuda:
        raise ValueError("run.device='cuda', but torch sees no CUDA device")
    kind = "cuda" if cuda and choice != "cpu" else "cpu"
    world = int(os.environ.get("WORLD_SIZE", 1))
    local = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device(kind, local) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda" and local >= torch.cuda.device_count():
        raise ValueError(f"rank {local} of this machine has no GPU of its own: there are {torch.cuda.device_count()}")
    if kind == "cuda":
        torch.cuda.set_device(device)
    if world > 1:
        dist.init_process_group("nccl" if kind == "cuda" else "gloo")
    return Ranks(int(os.environ.get("RANK", 0)), world, device)


def stop() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
