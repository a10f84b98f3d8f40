"""Test the fuzzing commands (``python -m tests.tools.fuzz``, and ``.native`` for the C library) with a few hundred
mutations, and with faults that they must notice. They mutate golden packages, so nothing is compiled.
docs/benchmarks/fuzzing.md reports a longer run."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from ..support import golden_files
from ..tools.fuzz import native, report, spoiling

ROOT = Path(__file__).parents[2]
BASES = "golden-pair,golden-passes"


def fuzz(folder: Path, *arguments: object, before: str = "") -> subprocess.CompletedProcess[str]:
    """Run the command in a process that executes ``before`` first."""
    code = f"import sys\n{before}\nfrom tests.tools.fuzz.__main__ import main\nmain()"
    argv = [sys.executable, "-c", code, "--packages", folder, "--bases", BASES, "--jobs", 1, *arguments]
    return subprocess.run(list(map(str, argv)), capture_output=True, text=True, cwd=ROOT, timeout=900)


@golden_files.needed
def test_spoilt_packages_are_refused_or_right_and_a_run_goes_on(tmp_path: Path) -> None:
    first = fuzz(tmp_path, "--count", 100)
    assert first.returncode == 0, first.stdout + first.stderr
    done = fuzz(tmp_path, "--count", 200, "--docs", tmp_path / "fuzzing")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("100 mutations")
    found = json.loads((tmp_path / "fuzzing.json").read_text())
    assert found["mutations"] == 200 and not found["faults"]
    assert sum(kind["refused"] for kind in found["by kind"].values()) > 70
    assert sum(kind.get("right", 0) for kind in found["by kind"].values()) > 40
    assert "| all | 200 |" in (tmp_path / "fuzzing.md").read_text()
    records = report.read(tmp_path / "results-1.jsonl")
    assert sorted(r["number"] for r in records) == list(range(200))


@golden_files.needed
def test_it_fails_where_a_check_is_missing(tmp_path: Path) -> None:
    """Without the check of a library's headers, the dynamic linker reads a truncated file and the process ends."""
    without = "from aot_backward_runtime.package import archive\narchive.check_library_file = lambda *_: None"
    done = fuzz(tmp_path, "--count", 150, before=without)
    assert done.returncode == 1, done.stdout + done.stderr
    verdicts = {r["verdict"] for r in report.read(tmp_path / "results-1.jsonl")}
    assert verdicts >= {"refused", "right"}
    assert verdicts & {"wrong", "signal", "untyped error"}


@golden_files.needed
def test_what_ends_or_stops_a_process_is_noticed(tmp_path: Path) -> None:
    """The report names the mutation that did it, and the rest of its batch is run."""
    evil = (
        "import os, time\n"
        "from tests.tools.fuzz import judging\n"
        "sound = judging.judge\n"
        "def judge(made, folder, work):\n"
        "    if ': length' in made.what:\n"
        "        os.abort()\n"
        "    if made.what.startswith('zero'):\n"
        "        time.sleep(1000)\n"
        "    return sound(made, folder, work)\n"
        "judging.judge = judge"
    )
    done = fuzz(tmp_path, "--count", 12, "--limit", 2, before=evil)
    assert done.returncode == 1, done.stdout + done.stderr
    records = {r["number"]: r for r in report.read(tmp_path / "results-1.jsonl")}
    assert sorted(records) == list(range(12))
    for number, record in records.items():
        made = spoiling.spoilt(1, number, tmp_path, tuple(BASES.split(",")))
        expected = "signal" if ": length" in made.what else "hang" if made.what.startswith("zero") else ""
        assert record["verdict"] == expected if expected else record["verdict"] in ("refused", "right"), record
    assert {"signal", "hang"} <= {r["verdict"] for r in records.values()}


def test_signatures_and_what_they_sign_are_spoilt(tmp_path: Path) -> None:
    shutil.copy(golden_files.PAIR, tmp_path / "targets.pt2")
    (tmp_path / "targets.pt2.sig").write_text(json.dumps({"verificationMaterial": {"publicKey": {"hint": "x"}}}))
    made = [spoiling.spoilt(1, number, tmp_path, ("targets",)) for number in range(300)]
    signatures = {m.what.partition(":")[0].partition(" ")[0] for m in made if m.kind == "signatures"}
    assert {"the", "byte", "delete"} <= signatures  # the package, bytes of the signature, its fields


@golden_files.needed
def test_spoilt_packages_through_the_c_library_under_sanitizers(tmp_path: Path) -> None:
    argv = [
        sys.executable,
        "-m",
        "tests.tools.fuzz.native",
        "--count",
        300,
        "--bases",
        "golden-pair",
        "--packages",
        tmp_path,
        "--docs",
        tmp_path / "c",
    ]
    done = subprocess.run(list(map(str, argv)), capture_output=True, text=True, cwd=ROOT, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    outcomes = json.loads((tmp_path / "native-1.jsonl").read_text())["outcomes"]
    assert sum(outcomes.values()) == 300 and outcomes["ran"] > 60 and outcomes["format"] > 60
    assert "300 mutations of seed 1" in (tmp_path / "c.md").read_text()


@golden_files.needed
def test_a_program_that_ends_is_noticed_and_the_others_of_its_batch_are_run(tmp_path: Path) -> None:
    shutil.copy(golden_files.FOLDER / "1.0-pair.pt2", tmp_path / "golden-pair.pt2")
    program = tmp_path / "program"  # fails at the second line in each process
    program.write_text("#!/bin/sh\nread line\necho '2'\nread line && echo 'runtime error' >&2 && exit 1\nexit 0\n")
    program.chmod(0o755)
    outcomes, faults = native.run(program, 1, range(5), tmp_path, tmp_path, ("golden-pair",))
    assert [f["number"] for f in faults] == [1, 3] and outcomes == {"format": 3}
    assert all("runtime error" in str(f["report"]) for f in faults)
