"""examples/onnx_training: onnxruntime alone reaches eager's accuracy on the digits."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "examples" / "onnx_training"


def script(*argv: object) -> str:
    done = subprocess.run([sys.executable, *map(str, argv)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def accuracy(said: str, whose: str) -> float:
    found = re.search(rf"^{whose}: test accuracy ([0-9.]+) %$", said, re.MULTILINE)
    assert found is not None, said
    return float(found[1])


def test_without_torch_in_the_process_to_the_same_accuracy(tmp_path: Path) -> None:
    """train.py asserts that torch was not imported."""
    said = script(FOLDER / "export.py", tmp_path / "digits.onnx")
    eager = accuracy(said, "eager")
    ours = accuracy(script(FOLDER / "train.py", tmp_path / "digits.onnx"), "onnxruntime")
    assert eager > 96 and abs(ours - eager) <= 0.7  # three images of 450
