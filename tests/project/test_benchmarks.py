"""The benchmarks run, and say what they found in the shape that is promised; no time is looked at."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ..tools.benchmarks import report

ROOT = Path(__file__).parents[2]


def bench(*arguments: object) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "tests.tools.benchmarks", *map(str, arguments)]
    return subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, stdin=subprocess.DEVNULL)


def test_a_subject_in_a_hurry(tmp_path: Path) -> None:
    done = bench("--quick", "--only", "overhead", "--threads", 1, "--work", tmp_path / "work", "--json", tmp_path / "all.json")
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "all.json").read_text())
    assert document["machine"].keys() >= {"date", "cpu", "cores", "torch", "python", "threads", "load_average"} and document["quick"]
    (subject,) = document["subjects"]
    assert subject["subject"] == "overhead" and [(d["kind"], d["number"]) for d in subject["data"]] == [("passed", 1), ("returned", 1), ("bound", 1)]
    for row, data in zip(subject["rows"], subject["data"], strict=True):
        assert len(row) == len(subject["columns"])
        assert data["times"].keys() == {"raw", "grad"} and all(t["median_s"] >= t["min_s"] > 0 for t in data["times"].values())
    assert [t.keys() for t in subject["targets"]] == [{"asked", "reached", "met", "off_by"}] * 2
    assert json.loads((tmp_path / "work" / "overhead.json").read_text())["rows"] == subject["rows"]
    assert all(column in done.stdout for column in subject["columns"]) and "== targets" in done.stdout


def test_an_unknown_subject_is_named() -> None:
    done = bench("--only", "overhead,speed")
    assert done.returncode == 2 and "unknown subject 'speed'" in done.stderr and done.stdout == ""


@pytest.mark.parametrize("met", [True, False])
def test_a_target_that_is_met_is_off_by_nothing(met: bool) -> None:
    target = report.Target("asked", "reached", met, "4 µs")
    assert target.off_by == ("" if met else "4 µs")
    result = report.Result("subject", "title", ["name", "ms"], [["a", "1.0"], ["bcd", "10.0"]], targets=[target])
    assert result.text().splitlines()[1:] == ["  name    ms", "  ----  ----", "  a      1.0", "  bcd   10.0"]
    assert (report.targets([result]).split()[-3:] == ["MISSED", "4", "µs"]) is not met
