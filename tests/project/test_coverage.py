"""Test a fixed sample of the operators of `make coverage` (docs/benchmarks/coverage.md), and the tool: it finds errors
and survives crashes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from aot_backward_exporters import torch_api

from ..tools.coverage import cases, exporting, report

ROOT = Path(__file__).parents[2]

SAMPLE = {
    "op_db": (
        "add",
        "mul",
        "div.floor_rounding",
        "pow",
        "exp",
        "lgamma",
        "sigmoid",
        "where",
        "clamp",
        "special.i0e",
        "fft.rfft",
        "complex",
        "sum",
        "mean",
        "std",
        "logsumexp",
        "prod",
        "cumsum",
        "cumprod",
        "logcumsumexp",
        "cummax",
        "amax",
        "median",
        "norm",
        "masked.softmax",
        "matmul",
        "addmm",
        "einsum",
        "linalg.cholesky",
        "linalg.solve",
        "linalg.svd",
        "linalg.norm",
        "triangular_solve",
        "cat",
        "stack",
        "split",
        "index_select",
        "gather",
        "scatter_add",
        "index_put",
        "take_along_dim",
        "sort",
        "topk",
        "roll",
        "as_strided",
        "tril",
        "diag_embed",
        "unfold",
        "nn.functional.pad.reflect",
        "nn.functional.interpolate.bilinear",
        "nn.functional.grid_sample",
        "nn.functional.conv2d",
        "nn.functional.conv_transpose2d",
        "nn.functional.max_pool2d",
        "nn.functional.avg_pool1d",
        *("nn.functional.layer_norm", "nn.functional.batch_norm", "softmax", "nn.functional.gelu", "nn.functional.elu"),
        *("nn.functional.cross_entropy", "nn.functional.nll_loss", "nn.functional.embedding", "nn.functional.dropout"),
        *("nn.functional.scaled_dot_product_attention",),
    ),
    "module_db": (
        "nn.Linear",
        "nn.Conv2d",
        "nn.BatchNorm2d",
        "nn.GroupNorm",
        "nn.LSTM",
        "nn.GRUCell",
        "nn.MultiheadAttention",
        "nn.Bilinear",
    ),
    "autograd_function_db": ("MulGenVmapAutogradFunction", "ScaleGradGenVmapAutogradFunction"),
    "custom_op_db": ("NumpyMulCustomOp",),
    "hop_db": (
        "cond.simple",
        *(("map.simple", "map.nested", "map.triple_nested") if torch_api.at_least("2.13") else ()),
    ),
}
"""One or more operators of each kind; all pass. Before torch 2.13, an assertion of Inductor fails when it lowers a
map."""


def coverage(*arguments: object) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "tests.tools.coverage", *map(str, arguments)]
    return subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, stdin=subprocess.DEVNULL)


def read(path: Path) -> dict[str, dict[str, Any]]:
    return {r["operator"]: r for r in map(json.loads, path.read_text().splitlines())}


def test_a_sample_of_all_kinds(tmp_path: Path) -> None:
    names = ",".join(sorted({n for own in SAMPLE.values() for n in own}))
    done = coverage(
        "--names",
        names,
        "--only",
        ",".join(SAMPLE),
        "--samples",
        1,
        "--size",
        24,
        "--resume",
        tmp_path / "results",
        "--docs",
        tmp_path / "c",
    )
    found = json.loads((tmp_path / "c.json").read_text())["operators"]
    verdicts = {(o["database"], o["operator"]): (o["verdict"], [c["reason"] for c in o["cases"]]) for o in found}
    assert {k: v for k, v in verdicts.items() if v[0] != "pass"} == {}, done.stderr
    assert len(verdicts) >= 60 and done.returncode == 0


def test_what_misbehaves_gets_a_verdict_and_the_rest_goes_on(tmp_path: Path) -> None:
    done = coverage(
        "--only", "faults", "--resume", tmp_path / "results", "--limit", 40, "--jobs", 1, "--docs", tmp_path / "c"
    )
    found = read(tmp_path / "results")
    assert {n: (r["verdict"], r["reason"]) for n, r in found.items() if r["verdict"] in ("crashed", "no gradient")} == {
        "aborts": ("crashed", "run in eager: SIGABRT"),
        "aborts_while_traced": ("crashed", "captured: SIGABRT"),
        "hangs_while_traced": ("crashed", "captured: no end after 40 s"),
        "no_gradient": ("no gradient", "no output of a sample has a gradient"),
    }, done.stderr
    assert found["sound"]["verdict"] == "pass" and found["data_dependent"]["verdict"] == "refused"
    assert report.is_miscompiled(found["dishonest"]) and "off by" in found["dishonest"]["reason"]
    page = (tmp_path / "c.md").read_text()
    assert "| faults | 7 | 7 | 7 | 1 | 2 | 1 | 0 | 3 | 1 | 16.7 |" in page and "**dishonest**" in page

    before = (tmp_path / "results").read_text()
    again = coverage("--only", "faults", "--resume", tmp_path / "results")
    assert again.returncode == 0 and (tmp_path / "results").read_text() == before  # everything was done
    with (tmp_path / "results").open("a") as file:
        file.write('{"database": "faults", "operator": "sou')  # the last line of a killed run
    coverage("--only", "faults", "--resume", tmp_path / "results", "--again", "refused", "--names", "data_dependent")
    assert [
        json.loads(line)["operator"] for line in (tmp_path / "results").read_text()[len(before) :].splitlines()
    ] == ["data_dependent"]


def test_a_spoilt_gradient_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    (case,) = cases.of("faults", "sound", cases.operators("faults")["sound"], 1)
    run_fresh = exporting.run_fresh

    def spoilt(*arguments: Any) -> Any:
        rounds = run_fresh(*arguments)
        rounds[-1][case.name]["gradient of input[0]"][1, 1] += 1e-3
        return rounds

    verdicts = []
    for run in (run_fresh, spoilt):
        monkeypatch.setattr(exporting, "run_fresh", run)
        exporting.settle([case], 1, lambda *_: None, lambda _, verdict, reason, __: verdicts.append((verdict, reason)))
    assert len(case.rounds) == 2 and verdicts[0] == ("pass", "")
    assert verdicts[1][0] == "wrong" and verdicts[1][1].startswith("round 1: gradient of input[0] is off by 0.00")


def test_an_unknown_operator_is_named() -> None:
    done = coverage("--only", "faults", "--names", "sound,speed")
    assert done.returncode == 2 and "no operator 'speed' in faults" in done.stderr


@pytest.mark.parametrize(
    ("page", "least"), [("coverage", (95, 95)), ("coverage-record", (95, 95)), ("coverage-onnx", (70, 90))]
)
def test_the_figures_in_the_docs(page: str, least: tuple[int, int]) -> None:
    """Every operator was run, none is wrong or crashed, and the page agrees with the JSON file."""
    found = json.loads((ROOT / "docs" / "benchmarks" / f"{page}.json").read_text())
    for name, d in found["databases"].items():
        assert d["run"] == d["operators"] and d["wrong"] == d["crashed"] == 0, name
        assert d["pass_percent"] >= dict(zip(("op_db", "module_db"), least, strict=True)).get(name, 0)
    assert report.page(found) == (ROOT / "docs" / "benchmarks" / f"{page}.md").read_text()
