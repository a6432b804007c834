"""Which tiles suit the GPU at hand: python -m flash_attn2.tune --head-dim 128 --kind dkdv

Times every candidate of one pass in turns, causal, bf16, d_model 2048, and prints them, best first, with the entry for
`tiles.TILES`. The backward's passes are timed in a whole backward, whose other pass keeps its tile. A tool for whoever
edits that table: training never tunes.
"""
import argparse
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from . import tiles
from .backward import backward
from .bench import FLUSH_BYTES, milliseconds
from .bench_cases import D_MODEL, DTYPE
from .forward import forward
from .masks import causal_mask
from .tiles import Tile

ROUNDS = 7
BLOCKS = {"forward": ((128, 128), (128, 64), (64, 128), (64, 64), (128, 32), (64, 32)),
          "dkdv": ((128, 128), (64, 128), (128, 64), (64, 64), (32, 128), (32, 64), (32, 32)),
          "dq": ((128, 128), (128, 64), (64, 128), (64, 64), (128, 32), (64, 32), (32, 32))}


def candidates(kind: str) -> list[Tile]:
    return [Tile(*block, warps, stages, tma)
            for block, warps, stages, tma in itertools.product(BLOCKS[kind], (4, 8), (1, 2, 3, 4), (True, False))]


@contextmanager
def instead(key: tuple[str, int], kind: str, t: Tile) -> Iterator[None]:
    """Within, tiles.TILES[key] has tile t for this pass."""
    before = tiles.TILES[key]
    tiles.TILES[key] = before | {kind: t}
    try:
        yield
    finally:
        tiles.TILES[key] = before


def launcher(kind: str, T: int, D: int, device: torch.device) -> Callable:
    """A whole forward, or a whole backward, on random inputs."""
    q, k, v, do = (torch.randn(1, T, D_MODEL // D, D, device=device, dtype=DTYPE) for _ in range(4))
    inputs, scale = (q, k, v), D ** -0.5
    if kind == "forward":
        return lambda: forward(*inputs, causal_mask(), scale)
    o, lse = forward(*inputs, causal_mask(), scale)
    return lambda: backward(do, None, *inputs, o, lse, causal_mask(), scale)


def times(kind: str, T: int, D: int, device: torch.device) -> dict[Tile, list[float]]:
    """Milliseconds of each round by candidate; those that do not compile or fit are left out."""
    key = tiles.architecture(*torch.cuda.get_device_capability(device)), max(64, tiles.padded(D))
    call, flush = launcher(kind, T, D, device), torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)
    found = {}
    for number in range(ROUNDS + 1):
        for t in candidates(kind) if number == 0 else list(found):
            try:
                with instead(key, kind, t):
                    elapsed = milliseconds(call, 1, flush)
            except Exception as error:      # shared memory, registers, the compiler: not a candidate here
                print(f"{tuple(t)}: {str(error).strip().partition(chr(10))[0]}", file=sys.stderr)
                continue
            found.setdefault(t, []).extend([elapsed] * (number > 0))       # round 0 compiles
    return found


def table(kind: str, found: dict[Tile, list[float]]) -> Iterator[str]:
    for t, rounds in sorted(found.items(), key=lambda pair: statistics.median(pair[1])):
        entry = f"Tile({', '.join(map(str, t[:4]))}{', TMA' * t.TMA})"
        yield f"{statistics.median(rounds):8.3f} ms [{min(rounds):.3f}-{max(rounds):.3f}]  {kind}={entry}"


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m flash_attn2.tune", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=list(BLOCKS), required=True)
    parser.add_argument("--head-dim", type=int, default=128, choices=(64, 128, 256), help="default: 128")
    parser.add_argument("--T", type=int, default=32768, help="row length, default: 32768")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        sys.exit("error: tuning needs an NVIDIA GPU")
    for line in table(args.kind, times(args.kind, args.T, args.head_dim, torch.device("cuda"))):
        print(line)


if __name__ == "__main__":
    main(sys.argv[1:])
