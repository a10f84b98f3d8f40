"""Run examples as their docstrings say: one process exports, another loads. `make demo` runs the digits."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from ..support.exports import shared

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def script(*argv: object) -> str:
    done = subprocess.run([sys.executable, *map(str, argv)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def exported(example: str) -> Path:
    """Return the package that the example's ``export.py`` writes. test_native_examples.py uses it too."""

    def export(path: Path) -> None:
        assert script(EXAMPLES / example / "export.py", path).endswith(f"wrote {path}\n")

    return shared(f"example-{example}", export)


def test_digits_by_make_demo(tmp_path: Path) -> None:
    """Use the environment of the tests, and tell make that it is up to date."""
    venv = Path(sys.executable).parent.parent
    for name in ("Makefile", "examples", "pyproject.toml", "constraints.txt", "runtime"):
        (tmp_path / name).symlink_to(ROOT / name)
    argv = ["make", "demo", f"VENV={venv}", "-o", f"{venv}/.installed", "-o", f"{venv}/.native-installed"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stdout + done.stderr
    # load.py asserts the accuracies and the differences of the losses. Times depend on the machine.
    for way in ("eager", "eager, Adam(fused=True)", "loaded module", "loaded training step"):
        assert re.search(rf"^{re.escape(way)} +[0-9.]+ +[0-9.]+ +9[0-9.]+%  [0-9.e+-]+$", done.stdout, re.MULTILINE), (
            done.stdout
        )
    assert "entry 'step' variant 0: " in done.stdout and f"open file://{tmp_path}/build/digits.html\n" in done.stdout
    assert (tmp_path / "build" / "digits.html").is_file()
    assert script(tmp_path / "examples" / "digits" / "export.py", tmp_path / "digits.pt2").endswith("digits.pt2\n")


def test_forces_equal_eagers() -> None:
    said = script(EXAMPLES / "forces" / "load.py", exported("forces"))
    assert "  125 " in said and "the sum drifted by" in said


def test_digits_by_a_compiled_step() -> None:
    said = script(EXAMPLES / "digits_step" / "train.py", exported("digits_step"))
    accuracy = re.search(r"test accuracy ([0-9.]+) %", said)
    assert accuracy is not None and float(accuracy[1]) > 96
    assert "the same weights, bit for bit: True; the same file: True" in said
    epochs = re.findall(r"epoch (\d+): (loss .*)", said)
    assert len(epochs) == 30 and epochs[:15] == epochs[15:]  # the second half was stopped and resumed
