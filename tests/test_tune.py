"""The tuning tool: what it tries, that it leaves the table as it was, and the entry it prints."""
import pytest
import torch

from flash_attn2 import tiles, tune
from flash_attn2.tiles import Tile


@pytest.mark.parametrize("kind", list(tune.BLOCKS))
def test_candidates_hold_every_shipped_tile_of_hopper(kind):
    for D in (64, 128, 256):
        shipped = tiles.TILES["sm_90", D][kind]
        assert shipped in tune.candidates(kind), shipped
    assert len(set(tune.candidates(kind))) == len(tune.candidates(kind))


def test_instead_is_over_when_it_is_over():
    before, t = tiles.TILES["sm_90", 64], Tile(32, 32, 4, 1)
    with pytest.raises(KeyboardInterrupt), tune.instead(("sm_90", 64), "dq", t):
        assert tiles.TILES["sm_90", 64] == before | {"dq": t}
        raise KeyboardInterrupt
    assert tiles.TILES["sm_90", 64] == before


def test_table_is_sorted_and_prints_an_entry_of_the_table():
    slow, fast = Tile(64, 128, 8, 2), Tile(64, 64, 4, 3, True)
    lines = list(tune.table("dq", {slow: [3.0, 2.0, 9.0], fast: [1.0, 1.5, 1.2]}))
    assert lines == ["   1.200 ms [1.000-1.500]  dq=Tile(64, 64, 4, 3, TMA)",
                     "   3.000 ms [2.000-9.000]  dq=Tile(64, 128, 8, 2)"]
    assert eval(lines[0].partition("=")[2], dict(Tile=Tile, TMA=tiles.TMA)) == fast


def test_a_machine_without_a_gpu_is_told_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="tuning needs an NVIDIA GPU"):
        tune.main(["--kind", "dq"])


@pytest.mark.gpu
def test_times_what_fits_and_leaves_out_the_rest(device, monkeypatch, capsys):
    fits, does_not = Tile(64, 64, 4, 2, True), Tile(128, 128, 8, 4)
    monkeypatch.setattr(tune, "candidates", lambda kind: [fits, does_not])
    found = tune.times("dkdv", 1024, 128, device)
    assert list(found) == [fits] and len(found[fits]) == tune.ROUNDS and min(found[fits]) > 0
    assert "128, 128, 8, 4" in capsys.readouterr().err
