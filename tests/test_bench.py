"""The benchmark without a GPU: what it counts, its float64, its options, and its record as table, JSON and picture; one
contest on a CPU whose clock is made up, and a whole small one on a GPU."""
import ast
import inspect
import json
import random

import pytest
import torch

from flash_attn2 import bench, bench_cases, bench_report, masks, reference
from flash_attn2.bench_cases import Case, document_lengths, errors, exact

CPU = torch.device("cpu")
SMALL = [Case(mask, 16, T, 600) for mask in ("causal", "full", "window", "documents") for T in (96, 300)]


@pytest.fixture
def small(monkeypatch):
    """A benchmark of d_model 32, windows of 40 and documents of 50."""
    for name, value in dict(D_MODEL=32, WINDOW=40, DOCUMENT=50, CHUNK=32).items():
        monkeypatch.setattr(bench_cases, name, value)


def dense(case: Case) -> torch.Tensor:
    """(B, T, T) bool, from the reference: which keys a query sees."""
    starts = case.doc_start(CPU)
    window = (case.window - 1, None) if case.window else None
    seen = reference.seen(case.T, case.T, causal=case.mask != "full", window=window, doc_q=starts, doc_k=starts)
    return seen.expand(case.B, case.T, case.T)


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_pairs_and_flops_are_what_brute_force_counts(small, case):
    row = {**case.row(CPU), "ms": {"forward": [1.0], "backward": [4.0]}}
    assert row["pairs"] == dense(case).sum()
    bench_report.complete(row)
    forward = sum(2 * 2 * 16 for head in range(row["H"]) for _ in range(row["pairs"]))      # two products of 2 D
    assert row["tflops"]["forward"] == pytest.approx(forward / 1e-3 / 1e12)
    assert row["tflops"]["backward"] == pytest.approx(2.5 * forward / 4e-3 / 1e12)
    assert row["tflops"]["both"] == pytest.approx(3.5 * forward / 5e-3 / 1e12)


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_bounds_and_kernel_mask_say_the_same_as_the_reference(small, case):
    seen, j = dense(case), torch.arange(case.T)
    lo, hi = case.bounds(CPU)
    assert torch.equal((j >= lo[:, None]) & (j <= hi[:, None]), seen[-1])
    if case.mask == "documents":
        mask = case.kernel_mask(CPU)
        assert torch.equal((j >= mask.lo[..., None]) & (j <= mask.hi[..., None]), seen)


def test_documents_fill_their_rows_and_are_the_same_each_time():
    case = Case("documents", 128, 32768 // 2)
    rows = case.documents()
    assert rows == case.documents() and rows[0] != rows[1]
    assert [sum(row) for row in rows] == [16384, 16384] and min(min(row) for row in rows) >= 1
    assert case.doc_start(CPU).shape == (2, 16384)
    long = document_lengths(2**24, random.Random(1))
    assert sum(long) == 2**24 and 3800 < 2**24 / len(long) < 4400


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_exact_is_the_reference(small, case):
    q, k, v, do = (torch.randn(case.T, 16, dtype=torch.float64) for _ in range(4))
    leaves = [x[None, :, None].requires_grad_() for x in (q, k, v)]
    o, _ = reference.attention(*leaves, dense(case)[-1])
    want = o, *torch.autograd.grad(o, leaves, do[None, :, None])
    for got, x in zip(exact(q.detach(), k.detach(), v.detach(), do, *case.bounds(CPU)).values(), want, strict=True):
        torch.testing.assert_close(got, x[0, :, 0])


def test_exact_sums_the_query_heads_of_a_group(small):
    case = Case("causal", 16, 96, group=2)
    q, do = (torch.randn(case.T, 2, 16, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(case.T, 1, 16, dtype=torch.float64) for _ in range(2))
    leaves = [x[None].requires_grad_() for x in (q, k, v)]
    o, _ = reference.attention(*leaves, dense(case)[-1])
    want = o, *torch.autograd.grad(o, leaves, do[None])
    got = bench_cases.exact_gqa(q.detach(), k[:, 0].detach(), v[:, 0].detach(), do, *case.bounds(CPU))
    for mine, x in zip(got.values(), want, strict=True):
        torch.testing.assert_close(mine, x[0, :, -1])
    assert (case.H, case.H_kv) == (2, 1)


def test_an_error_anywhere_shows():
    q, k, v, do = (torch.randn(200, 16) for _ in range(4))
    i = torch.arange(200)
    want = exact(q, k, v, do, torch.zeros_like(i), i)
    assert errors(want, want) == dict(o=0, dq=0, dk=0, dv=0)
    off_by_one = errors(exact(q, k, v, do, torch.zeros_like(i), (i - 1).clamp(min=0)), want)
    assert min(off_by_one.values()) > 0.05
    for name in want:
        wrong = {**want, name: want[name].clone()}
        wrong[name][77] += 0.1 * wrong[name][77].abs().max()
        assert [key for key, e in errors(wrong, want).items() if e > 1e-3] == [name]
        wrong[name][3, 5] = float("nan")
        assert not errors(wrong, want)[name] < 1


# Options

def test_default_covers_every_mask_and_slow_contenders_only_where_they_are_quick():
    args = bench.parse([])
    assert {c.mask for c in bench.cases(args)} == set(bench_cases.CONTENDERS)
    assert {c.head_dim for c in bench.cases(args)} == {64, 128}
    assert {c.T for c in bench.cases(args) if c.mask == "causal"} == {2048, 8192, 32768, 131072}


def test_sweep_is_every_power_of_two():
    lengths = [c.T for c in bench.cases(bench.parse(["--sweep", "--mask", "causal", "--head-dim", "64"]))]
    assert lengths == [512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072]


def test_options_choose_shapes_and_contenders():
    args = bench.parse("--only flash_attn2,sdpa:* --T 512 1000 --head-dim 256 --mask full window".split())
    assert bench.cases(args) == [Case("full", 256, 512, 32768), Case("full", 256, 1000, 32768),
                                 Case("window", 256, 512, 32768), Case("window", 256, 1000, 32768)]
    assert bench.contenders(args, "full") == ["flash_attn2", "sdpa:flash", "sdpa:cudnn", "sdpa:efficient", "sdpa:math"]
    assert bench.contenders(args, "window") == ["flash_attn2"]
    assert bench.contenders(bench.parse(["--only", "sdpa"]), "documents") == ["sdpa"]
    assert bench.cases(bench.parse(["--only", "varlen_attn"]))[0].mask == "window"


@pytest.mark.parametrize("argv, rule", [
    ("--only fa4", "no contender is called 'fa4'; known: flash_attn2, flash_attn2:triton, flex"),
    ("--only varlen_attn --mask full", "none of these contenders takes the mask full"),
    ("--T 0", "--group, --T and --head-dim must be at least 1"),
    ("--rounds 0", "--rounds, --tokens, --d-model, --group"),
    ("--head-dim 96", "--d-model 2048 must be a multiple of --head-dim times --group 1"),
    ("--group 3", "--d-model 2048 must be a multiple of --head-dim times --group 3"),
    ("--mask sparse", "invalid choice: 'sparse'"),
    ("--T 512 --sweep", "not allowed with"),
    ("--json nowhere/a.json", "there is no folder nowhere"),
    ("--plot .", "or this is one itself"),
    ("--from a.json --json b.json", "--from measures nothing"),
    ("--from a.json --sweep", "--from measures nothing"),
])
def test_what_cannot_be_asked_is_an_error(argv, rule, capsys):
    with pytest.raises(SystemExit) as stop:
        bench.main(argv.split())
    assert stop.value.code == 2 and rule in capsys.readouterr().err


@pytest.mark.parametrize("argv, text, rule", [
    ("--from {}", None, "cannot read"),
    ("--from {}", "{", "cannot read"),
    ("--from {}", '{"format": "other"}', "is not a record of this benchmark"),
    ("--from {}", '{"format": "flash_attn2.bench 1"}', "is not a whole record of this benchmark: KeyError"),
    ("--from {}", '{"format": "flash_attn2.bench 1", "rows": [{}]}', "is not a whole record of this benchmark"),
    ("--plot {}", None, "must end in .png"),
])
def test_what_the_user_can_mend_is_one_line(argv, text, rule, tmp_path):
    path = tmp_path / "record.json"
    if text:
        path.write_text(text)
    with pytest.raises(SystemExit) as stop:
        bench.main(argv.format(path).split())
    assert stop.value.code.startswith("error: ") and rule in stop.value.code and "\n" not in stop.value.code


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_without_a_gpu_it_is_one_line():
    with pytest.raises(SystemExit) as stop:
        bench.main([])
    assert stop.value.code == "error: the benchmark needs an NVIDIA GPU; --from FILE shows a kept record without one"


def test_without_matplotlib_a_plot_is_refused_first(monkeypatch, tmp_path):
    monkeypatch.setattr(bench_report, "find_spec", lambda name: None)
    monkeypatch.setattr(bench, "measure", lambda *_: pytest.fail("measured"))
    with pytest.raises(SystemExit) as stop:
        bench.main(["--plot", str(tmp_path / "a.png")])
    assert stop.value.code == "error: --plot needs matplotlib: pip install matplotlib, or nanolong[bench]"


# A record

def row(mask: str, T: int, name: str, tflops: float = 0.0, reason: str = "") -> dict:
    """Three rounds at 1/2, 1 and 2 times tflops, or a reason."""
    case = Case(mask, 128, T)
    one = {**case.row(CPU), "contender": name}
    if reason:
        return {**one, "skipped": reason}
    ms = 4 * 2048 * one["pairs"] / tflops / 1e9
    one |= {"ms": {"forward": [ms, 2 * ms, ms / 2], "backward": [2.5 * ms] * 3}, "peak_gib": 1.25,
            "error": dict(o=1e-3, dq=2e-3, dk=4e-3, dv=3e-3)}
    bench_report.complete(one)
    return one


@pytest.fixture
def record() -> dict:
    out = "out of memory"
    return {"format": bench_report.FORMAT, "date": "2026-01-01T00:00:00+00:00", "commit": None, "gpu": "NVIDIA X",
            "torch": "2.11", "triton": "3.6", "cudnn": 91900, "dtype": "bfloat16", "d_model": 2048, "tokens": 32768,
            "window": 4096, "document": 4096, "rounds": 3, "rows": [
                row("causal", 2048, "flash_attn2", 500), row("causal", 2048, "sdpa:flash", 250),
                row("causal", 2048, "sdpa:math", 5), row("causal", 8192, "flash_attn2", 400),
                row("causal", 8192, "sdpa:flash", reason=out), row("causal", 32768, "sdpa:flash", reason=out),
                row("documents", 32768, "flash_attn2", 450), row("documents", 32768, "varlen_attn", 300)]}


def test_table(record):
    lines = list(bench_report.table(record, bench_report.shapes(record["rows"])))
    assert lines == [
        "", "causal, head width 128 (16 heads)", bench_report.COLUMNS,
        "    2048  flash_attn2         500 [250-1000]    500 [500-500]   500  2.00   1.25  1.0e-03  4.0e-03",
        "    2048  sdpa:flash           250 [125-500]    250 [250-250]   250  1.00   1.25  1.0e-03  4.0e-03",
        "    2048  sdpa:math           5.0 [2.5-10.0]    5.0 [5.0-5.0]     5  0.02   1.25  1.0e-03  4.0e-03",
        "    8192  flash_attn2          400 [200-800]    400 [400-400]   400         1.25  1.0e-03  4.0e-03",
        "  sdpa:flash, T = 8192, 32768: out of memory",
        "", "causal, documents, mean 4096, head width 128 (16 heads)", bench_report.COLUMNS,
        "   32768  flash_attn2          450 [225-900]    450 [450-450]   450  1.50   1.25  1.0e-03  4.0e-03",
        "   32768  varlen_attn          300 [150-600]    300 [300-300]   300  1.00   1.25  1.0e-03  4.0e-03"]
    assert max(map(len, (*bench_report.head(record), *lines))) <= 100


def test_a_gradient_that_is_not_a_number_is_the_one_that_shows(record):
    record["rows"][0]["error"]["dq"] = float("nan")
    assert bench_report.line(record["rows"][0], None).endswith("nan")


def test_table_prints_a_shape_before_the_next_is_measured(record):
    shapes = bench_report.shapes(record["rows"])

    def measured():
        yield next(shapes)
        pytest.fail("the second shape was asked for before the first was printed")
    lines = bench_report.table(record, measured())
    assert "sdpa:math" in [next(lines) for _ in range(6)][-1]


def test_record_survives_json(record, tmp_path):
    bench_report.save(record, tmp_path / "a.json")
    assert bench_report.load(tmp_path / "a.json") == record


def test_a_kept_record_is_shown_and_drawn_without_a_gpu(record, tmp_path, capsys):
    bench_report.save(record, tmp_path / "a.json")
    bench.main(["--from", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.png")])
    shown = capsys.readouterr().out
    assert all(line in shown for line in bench_report.table(record, bench_report.shapes(record["rows"])))
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    bench.main(["--from", str(tmp_path / "a.json"), "--only", "flash*", "--T", "8192", "--mask", "causal"])
    shown = capsys.readouterr().out
    assert " 8192 " in shown and " 2048 " not in shown and "sdpa:flash" not in shown


def test_nothing_to_plot_is_one_line(record, tmp_path):
    bench_report.save(record, tmp_path / "a.json")
    with pytest.raises(SystemExit, match="nothing to plot"):
        bench.main(["--from", str(tmp_path / "a.json"), "--T", "32768", "--mask", "causal",
                    "--plot", str(tmp_path / "a.png")])


def test_drawing_is_imported_only_to_draw():
    tree = ast.parse(inspect.getsource(bench_report))
    assert not [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom) and "matplotlib"
                in ast.unparse(node)]


# A contest

@pytest.fixture
def clock(small, monkeypatch):
    """A CPU that passes for a GPU: every call takes 2 ms, and memory is what it is."""
    def milliseconds(call, calls, flush):
        for _ in range(calls):
            call()
        return 2.0
    monkeypatch.setattr(bench, "milliseconds", milliseconds)
    monkeypatch.setattr(bench, "FLUSH_BYTES", 1)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(bench, "free_bytes", lambda: 2**30)


def test_contest_gives_every_contender_a_row_or_a_reason(clock):
    rows = {r["contender"]: r for r in bench.compare(Case("causal", 16, 300, 600), list(bench_cases.PLAIN), 3, CPU)}
    assert list(rows) == list(bench_cases.PLAIN)
    measured = {name for name, r in rows.items() if "skipped" not in r}
    assert measured == {"sdpa:flash", "sdpa:math"}
    assert rows["sdpa:cudnn"]["skipped"] == "sdpa:cudnn runs on a GPU only; use sdpa on a cpu"
    assert "bfloat16 is silently wrong" in rows["flash_attn2"]["skipped"] and rows["flex"]["skipped"]
    for name in measured:
        assert rows[name]["ms"] == {"forward": [2.0] * 3, "backward": [2.0] * 3}
        assert all(1e-4 < e < 2e-2 for e in rows[name]["error"].values()), rows[name]["error"]
    json.dumps(list(rows.values()))


@pytest.mark.parametrize("mask", ["full", "window", "documents"])
def test_dense_sdpa_is_right_under_each_mask(clock, mask):
    name = "sdpa:math" if mask == "full" else "sdpa"
    one, = bench.compare(Case(mask, 16, 300, 600), [name], 1, CPU)
    assert all(e < 2e-2 for e in one["error"].values())


def test_what_does_not_fit_is_not_tried(clock, monkeypatch):
    monkeypatch.setattr(bench, "free_bytes", lambda: 2**20)
    one, = bench.compare(Case("causal", 16, 300, 600), ["sdpa:math"], 1, CPU)
    assert one["skipped"] == "its T x T tensors need about 0 GiB, 0 are free"


def test_a_contender_that_fails_leaves_the_contest_to_the_others(clock, monkeypatch):
    contender, calls = bench.contender, []

    def failing(name, *arguments):
        attend = contender(name, *arguments)

        def late(*qkv):
            calls.append(name)
            if name == "sdpa:flash" and calls.count(name) == 6:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
            return attend(*qkv)
        return late
    monkeypatch.setattr(bench, "contender", failing)
    flash, math = bench.compare(Case("causal", 16, 300, 600), ["sdpa:flash", "sdpa:math"], 3, CPU)
    assert flash["skipped"] == "out of memory" and "ms" not in flash
    assert len(math["ms"]["forward"]) == 3


def test_slow_contenders_say_so_and_the_record_is_kept(clock, monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "LENGTHS", {"causal": (96,), "documents": (300,)})
    path = tmp_path / "a.json"
    args = bench.parse(["--only", "sdpa:math,sdpa", "--mask", "causal", "documents", "--head-dim", "16",
                        "--d-model", "32", "--rounds", "1", "--json", str(path)])
    record = {"format": bench_report.FORMAT, "rows": []}
    for number, rows in enumerate(bench.measure(args, record, CPU), start=1):
        assert len(rows) == 1 and len(json.loads(path.read_text())["rows"]) == number
    assert [(r["contender"], "skipped" in r) for r in record["rows"]] == [("sdpa:math", False), ("sdpa", True)]


def test_varlen_takes_windows_and_documents_as_they_are_meant(small, monkeypatch):
    """Its call, with a dense stand-in for torch's kernel: window_size counts the keys before a query, itself not."""
    def varlen_attn(q, k, v, ends, ends_k, longest, longest_k, *, window_size):
        assert longest == int(ends.diff().max()) and torch.equal(ends, ends_k)
        token = torch.arange(len(q))
        doc = torch.searchsorted(ends, token, right=True)[None]
        left = None if window_size[0] < 0 else window_size[0]
        seen = reference.seen(len(q), len(q), window=(left, window_size[1]), doc_q=doc, doc_k=doc)
        return reference.attention(q[None], k[None], v[None], seen)[0][0]
    monkeypatch.setattr(bench_cases.varlen, "varlen_attn", varlen_attn)
    for case in SMALL:
        if case.mask == "full":
            continue
        q, k, v = (torch.randn(case.B, case.T, 2, 16, dtype=torch.float64) for _ in range(3))
        o = bench_cases.contender("varlen_attn", case, CPU, 0)(q, k, v)
        torch.testing.assert_close(o, reference.attention(q, k, v, dense(case))[0])


@pytest.mark.gpu
@pytest.mark.parametrize("mask", list(bench_cases.CONTENDERS))
def test_every_contender_runs_and_is_right(mask, monkeypatch):
    monkeypatch.setattr(bench_cases, "WINDOW", 300)
    monkeypatch.setattr(bench_cases, "DOCUMENT", 400)
    case, names = Case(mask, 64, 1024), bench_cases.CONTENDERS[mask]
    rows = bench.compare(case, list(names), 2, torch.device("cuda"))
    assert [r["contender"] for r in rows] == list(names)
    for one in rows:
        assert "skipped" not in one, one
        assert all(len(times) == 2 and min(times) > 0 for times in one["ms"].values())
        assert all(e < 1e-2 for e in one["error"].values()), one
        assert 0.1 < one["peak_gib"] < 40
    assert masks.pairs(case.kernel_mask(torch.device("cuda")), case.B, 1024, 1024) == rows[0]["pairs"]
