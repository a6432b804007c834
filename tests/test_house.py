"""The house: who may import whom, how long a file may be, and that README's map is the tree."""
import ast
import re
import subprocess
from pathlib import Path

import pytest

REPO = Path(__file__).parent.parent
FILES = sorted(Path(f) for f in subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard"],
                                               cwd=REPO, capture_output=True, text=True).stdout.split())
CODE = [f for f in FILES if f.suffix == ".py" and f.parts[0] != "tests"]
BUDGET = {"train.py": 350, "sample.py": 100, "compare.py": 250, "speed.py": 260, "config.py": 340, "model.py": 350,
          "loss.py": 150}
VERBS = {"train", "sample", "compare", "speed"}
ROOMS = {"flash_attn2", "data", "runtime", "config", "model", "loss", "configs", *VERBS}
# What a module may import of ours; a prefix stands for all below it.
MAY = {
    "config": set(), "configs": {"config", "configs"}, "model": {"loss"}, "loss": set(), "data": {"data"},
    "runtime": {"config", "loss", "runtime"}, "train": ROOMS - VERBS, "sample": ROOMS - VERBS, "compare": ROOMS - VERBS,
    "speed": ROOMS - VERBS,
}
KERNEL_LEVELS = ["reference", "masks", "tiles", "forward", "backward", "hopper", "hopper.gluon_api", "hopper.pipeline",
                 "hopper.schedule", "hopper.softmax", "hopper.dq", "hopper.forward", "hopper.backward", "dispatch",
                 "ops", "interface", "sdpa", "backends", "bench_cases", "bench_report", "bench", "tune"]


def exists(module: str) -> bool:
    path = REPO / module.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").is_file()


def imports(path: Path) -> set[str]:
    """Dotted names of every module that a file imports, inside functions too; relative ones made absolute."""
    found = set()
    for node in ast.walk(ast.parse((REPO / path).read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(path.parts[:-node.level]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            inside = {f"{module}.{alias.name}" for alias in node.names} if node.level and not node.module else {module}
            found |= {name if exists(name) else module for name in inside}
    return found


def test_imports_are_made_absolute():
    found = imports(Path("flash_attn2/hopper/dq.py"))
    assert {"flash_attn2.forward", "flash_attn2.tiles", "flash_attn2.hopper.gluon_api", "torch"} <= found
    assert {"flash_attn2.hopper", "flash_attn2.hopper.forward", "flash_attn2.backward"} <= imports(
        Path("flash_attn2/dispatch.py"))


def test_the_tree_is_read():
    assert Path("train.py") in CODE and len(CODE) > 20


@pytest.mark.parametrize("path", CODE, ids=str)
def test_imports_point_downwards(path):
    room = path.parts[0].removesuffix(".py")
    ours = {name for name in imports(path) if name.split(".")[0] in ROOMS}
    if room == "flash_attn2":
        name = ".".join(path.with_suffix("").parts[1:]).removesuffix(".__init__")
        assert name in KERNEL_LEVELS or path.name == "__init__.py", f"{path} has no level"
        level = KERNEL_LEVELS.index(name) if name in KERNEL_LEVELS else len(KERNEL_LEVELS)
        allowed = {f"flash_attn2.{name}" for name in KERNEL_LEVELS[:level]}
        assert ours <= allowed, ours - allowed
        return
    bad = {name for name in ours if name.split(".")[0] not in MAY[room]}
    assert not bad, f"{path} must not import {bad}"


@pytest.mark.parametrize("path", [f for f in CODE if f.parts[0] == "flash_attn2"], ids=str)
def test_the_kernel_library_needs_torch_and_triton_alone(path):
    outside = {name.split(".")[0] for name in imports(path)} - {"torch", "triton", "flash_attn2"}
    if path.stem == "bench_report":     # the only one that draws, and only then
        outside -= {"matplotlib"}
    import sys
    assert outside <= sys.stdlib_module_names, outside


def test_the_reference_shares_nothing_with_what_it_judges():
    assert imports(Path("flash_attn2/reference.py")) == {"torch"}


@pytest.mark.parametrize("path", CODE, ids=str)
def test_line_budget(path):
    limit = BUDGET.get(str(path), 250)
    assert len((REPO / path).read_text().splitlines()) <= limit


@pytest.mark.parametrize("path", CODE, ids=str)
def test_functions_are_short(path):
    for node in ast.walk(ast.parse((REPO / path).read_text())):
        if isinstance(node, ast.FunctionDef):
            length = node.end_lineno - node.lineno + 1
            assert length <= 60, f"{path}: {node.name} has {length} lines"


@pytest.mark.parametrize("path", CODE, ids=str)
def test_every_module_says_what_it_is(path):
    tree = ast.parse((REPO / path).read_text())
    assert ast.get_docstring(tree) or not tree.body


def test_every_module_has_a_test_file():
    untested = {"runtime/parallel.py": "test_train.py",
                "flash_attn2/reference.py": "test_reference.py", "data/format.py": "test_data.py",
                "data/prepare.py": "test_data.py", "data/sources.py": "test_data.py",
                "flash_attn2/bench_cases.py": "test_bench.py", "flash_attn2/bench_report.py": "test_bench.py"}
    for path in CODE:
        if path.parts[0] == "configs" or path.stem == "__init__":
            continue
        stem = "hopper" if path.parts[:2] == ("flash_attn2", "hopper") else path.stem
        name = untested.get(str(path), f"test_{stem}.py")
        assert (REPO / "tests" / name).is_file(), f"{path} has no tests/{name}"


def test_readme_map_is_the_tree():
    """Every path in README's map exists, and every room, verb and module stands in it, or its folder within a room."""
    block = re.search(r"```\n(README\.md .*?)```", (REPO / "README.md").read_text(), re.S)[1]
    listed, room = set(), ""
    for line in block.splitlines():
        name = line.split()[0] if line.strip() else ""
        if not name or (line.startswith(" " * 16)):
            continue
        if not line.startswith(" "):
            room = name if name.endswith("/") else ""
        listed.add(name if not line.startswith(" ") else room + name)
    for name in listed:
        assert (REPO / name).exists(), f"README's map lists {name}, which is not there"
    modules = {str(f) for f in CODE if f.parts[0] not in ("configs",) and f.stem != "__init__"}
    within = tuple(name for name in listed if name.endswith("/") and name.count("/") > 1)
    missing = {name for name in modules - listed if not name.startswith(within)}
    assert not missing, missing
