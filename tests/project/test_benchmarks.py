"""Run the benchmarks and check the form of their reports. No test depends on a time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def bench(*arguments: object) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "tests.tools.benchmarks", *map(str, arguments)]
    return subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, stdin=subprocess.DEVNULL)


def test_a_subject_in_a_hurry(tmp_path: Path) -> None:
    done = bench(
        "--quick", "--only", "overhead", "--threads", 1, "--work", tmp_path / "work", "--json", tmp_path / "all.json"
    )
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "all.json").read_text())
    assert (
        document["machine"].keys() >= {"date", "cpu", "cores", "torch", "python", "threads", "load_average"}
        and document["quick"]
    )
    (subject,) = document["subjects"]
    assert subject["subject"] == "overhead"
    assert [(d["kind"], d["number"]) for d in subject["data"]] == [("passed", 1), ("returned", 1), ("bound", 1)]
    for row, data in zip(subject["rows"], subject["data"], strict=True):
        assert len(row) == len(subject["columns"])
        assert data["times"].keys() == {"raw", "grad"} and all(
            t["median_s"] >= t["min_s"] > 0 for t in data["times"].values()
        )
    assert [t.keys() for t in subject["targets"]] == [{"asked", "reached", "met", "off_by"}] * 2
    assert json.loads((tmp_path / "work" / "overhead.json").read_text())["rows"] == subject["rows"]
    assert all(column in done.stdout for column in subject["columns"]) and "== targets" in done.stdout


def test_the_doors_are_compared_with_the_best_of_eager(tmp_path: Path) -> None:
    """Results are kept in one file per model. Models that have one are not measured again."""
    kept = tmp_path / "work" / "doors"
    kept.mkdir(parents=True)
    peers = {
        "eager": 100,
        "module open": 200,
        "module fixed": 80,
        "grad open": 25,
        "replay open": 50,
        "foreach": 400,
        "fused": 300,
        "step open": 60,
    }
    times = {p: {"median_s": 1e-6 * t, "min_s": 1e-6 * t, "samples": 3} for p, t in peers.items()}
    for model, less in (("mlp", ()), ("embedding", ("foreach", "fused", "step open"))):
        row = {
            "model": model,
            "parameters": 420,
            "rows": 16,
            "threads": 1,
            "times": {p: t for p, t in times.items() if p not in less},
        }
        (kept / f"{model}.json").write_text(json.dumps({"threads": [1], "quick": True, "rows": [row]}))
    done = bench("--quick", "--only", "doors", "--threads", 1, "--work", tmp_path / "work", "--reuse")
    assert done.returncode == 0, done.stderr
    table = [line.split() for line in done.stdout.splitlines()]
    assert [
        "mlp",
        "420",
        "16",
        "1",
        "100",
        "200",
        "25",
        "50",
        "400",
        "300",
        "60",
        "1.25",
        "4.00",
        "2.00",
        "5.00",
    ] in table
    assert [
        "embedding",
        "420",
        "16",
        "1",
        "100",
        "200",
        "25",
        "50",
        "-",
        "-",
        "-",
        "1.25",
        "4.00",
        "2.00",
        "-",
    ] in table
    assert "module, 16 rows: a dynamic batch takes 2.50 times as long as a static one" in done.stdout
    assert "1.25 at worst (mlp, 16 rows, 1 threads); below in 0 of 2" in done.stdout
