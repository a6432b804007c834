"""A checkpoint is a folder that is either whole or absent: written under another name, synced, then renamed.

It holds tensors and plain types only, so that it loads with weights_only=True.
"""
import os
import re
import shutil
import sys
from pathlib import Path

import torch
from torch import nn

from config import Config, differences, from_json

KEEP = 2        # the newest, and one to fall back to
PARTS = {"model", "optimizer", "step", "tokens", "since_row", "random", "wandb_id"}


def run_folder(c: Config, path: Path) -> Path:
    """The folder that is resumed, the one asked for, or the first free runs/NAME. ValueError: it is taken."""
    if path.is_dir():
        saved = from_json(path / "config.json")
        if not saved.train.save and not steps(path):
            raise ValueError(f"{path} was trained with train.save=False: there is nothing to go on from")
        changed = differences(saved, c)
        for one in changed:
            if one.startswith(("model.", "run.dir ")) and not one.startswith("model.attention "):
                raise ValueError(f"{path} cannot go on as another run: {one}")
        print("".join(f"changed: {one}\n" for one in changed), end="", flush=True)
        return path
    if c.run.dir:
        folder = Path(c.run.dir)
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ValueError(f"run.dir={c.run.dir!r} is not empty: go on with it (python train.py {c.run.dir}) or "
                             "choose another")
        return folder
    name = c.run.name or path.stem
    taken = (Path("runs") / (name if i == 1 else f"{name}-{i}") for i in range(1, 10**6))
    return next(folder for folder in taken if not folder.exists())


def save(run: Path, step: int, state: dict) -> Path:
    """Writes run/checkpoints/step_00001000/state.pt and drops all but the newest KEEP. state has the PARTS."""
    folder = run / "checkpoints" / f"step_{step:08d}"
    for rest in folder.parent.glob("*.partial"):        # of a save that was killed
        shutil.rmtree(rest)
    partial = folder.with_name(folder.name + ".partial")
    partial.mkdir(parents=True)
    with open(partial / "state.pt", "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(partial)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    sync_folder(folder.parent)
    for old in steps(run)[:-KEEP]:
        shutil.rmtree(old)
    return folder


def steps(run: Path) -> list[Path]:
    """The whole checkpoints of a run, oldest first."""
    return sorted(p for p in (run / "checkpoints").glob("step_*") if re.fullmatch(r"step_\d{8}", p.name))


def load(run: Path, device: torch.device | str = "cpu") -> dict:
    """The state of the newest checkpoint that can be read; damaged ones are named on stderr. ValueError: none is."""
    for folder in reversed(steps(run)):
        try:
            state = torch.load(folder / "state.pt", map_location=device, weights_only=True)
            if absent := PARTS - set(state):
                raise ValueError(f"it lacks {', '.join(sorted(absent))}")
            return state
        except Exception as error:      # torch raises a dozen kinds for a damaged file
            print(f"damaged, going back to an earlier one: {folder / 'state.pt'}: {error}", file=sys.stderr)
    raise ValueError(f"{run} has no checkpoint that can be read")


def load_model(model: nn.Module, weights: dict) -> None:
    """Copies weights into the model. ValueError names the first that does not fit: a checkpoint of another model."""
    own = model.state_dict()
    for name in sorted(own.keys() | weights.keys()):
        here, there = (tuple(d[name].shape) if name in d else "absent" for d in (own, weights))
        if here != there:
            raise ValueError(f"the checkpoint is of another model: {name} is {there} in it and {here} here")
    model.load_state_dict(weights)


def random_state(device: torch.device) -> dict:
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_random_state(state: dict, device: torch.device) -> None:
    torch.set_rng_state(state["cpu"].cpu())
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)


def sync_folder(folder: Path) -> None:
    """A rename survives a power cut only once its folder is on disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
