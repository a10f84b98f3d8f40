"""Each example is run as its docstring says, exported by one process and loaded by another: digits by `make demo`, forces by its scripts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"


def script(*argv: object) -> str:
    done = subprocess.run([sys.executable, *map(str, argv)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_digits_by_make_demo(tmp_path: Path) -> None:
    """In the environment that the tests run in, taken as set up."""
    venv = Path(sys.executable).parent.parent
    for name in ("Makefile", "examples", "pyproject.toml", "constraints.txt", "runtime"):
        (tmp_path / name).symlink_to(ROOT / name)
    argv = ["make", "demo", f"VENV={venv}", "-o", f"{venv}/.installed"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test accuracy 9" in done.stdout and "largest difference of the two loss curves" in done.stdout  # load.py asserts both itself
    assert script(tmp_path / "examples" / "digits" / "export.py", tmp_path / "digits.pt2").endswith("digits.pt2\n")


def test_forces_equal_eagers(tmp_path: Path) -> None:
    package = tmp_path / "forces.pt2"
    assert script(EXAMPLES / "forces" / "export.py", package).endswith(f"wrote {package}\n")
    said = script(EXAMPLES / "forces" / "load.py", package)
    assert "  125 " in said and "the sum drifted by" in said
