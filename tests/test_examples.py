"""Each example is run as its docstring says: exported by one process, loaded by another."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import aot_backward

EXAMPLES = Path(__file__).parents[1] / "examples"


def script(*argv: object) -> str:
    done = subprocess.run([sys.executable, *map(str, argv)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_digits_is_trained_by_native_code(tmp_path: Path) -> None:
    package = tmp_path / "digits.pt2"
    assert script(EXAMPLES / "digits" / "export.py", package).endswith(f"wrote {package}\n")
    said = script(EXAMPLES / "digits" / "load.py", package)  # asserts its accuracy, and that nothing is traced, itself
    assert "test accuracy 9" in said and "largest difference of the two loss curves" in said


def test_forces_equal_eagers(tmp_path: Path) -> None:
    package = tmp_path / "forces.pt2"
    assert script(EXAMPLES / "forces" / "export.py", package).endswith(f"wrote {package}\n")
    said = script(EXAMPLES / "forces" / "load.py", package)
    assert "  125 " in said and "the sum drifted by" in said


@pytest.mark.parametrize("name", sorted(p.parent.name for p in EXAMPLES.glob("*/export.py")))
def test_each_is_exported_by_the_command_line_too(name: str, tmp_path: Path) -> None:
    out = tmp_path / f"{name}.pt2"
    done = aot_backward("export", EXAMPLES / name / "export.py:entries", "-o", out)
    assert done.returncode == 0 and out.is_file(), done.stderr
