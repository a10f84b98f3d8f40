"""Test the command of the long runs: short runs of its parts pass, and a leak is found."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from ..tools.endurance import parts

ROOT = Path(__file__).parents[2]


def test_the_parts_run_and_a_leak_is_found(tmp_path: Path) -> None:
    names = [n for n in parts.PARTS if n != "structures"]
    command = [
        sys.executable,
        "-m",
        "tests.tools.endurance",
        "--work",
        tmp_path / "work",
        "--docs",
        tmp_path / "found",
        "--calls",
    ]
    done = subprocess.run([*command, "60", "--only", ",".join(names)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "found.json").read_text())["parts"]
    assert list(found) == names and all(f["samples"][-1]["calls"] == 60 for f in found.values())
    leak = subprocess.run([*command, "400", "--only", "module,leaking"], cwd=ROOT, capture_output=True, text=True)
    assert leak.returncode == 1 and "module: flat" in leak.stdout, leak.stdout + leak.stderr
    assert "leaking: descriptors from" in leak.stdout and "private from" in leak.stdout
