"""examples/ddp_step: two processes under torchrun agree with one process on whole batches. A resumed training ends in
the same bits."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

FOLDER = Path(__file__).parents[2] / "examples" / "ddp_step"


def script(*argv: object, env: dict[str, str] | None = None) -> list[float]:
    """Run a script and return the losses that it prints."""
    done = subprocess.run(
        [sys.executable, *map(str, argv)], capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [float(loss) for loss in re.findall(r"^epoch \d+: loss ([0-9.]+)$", done.stdout, re.MULTILINE)]


def test_two_processes_and_one(tmp_path: Path) -> None:
    package = tmp_path / "ddp_step.pt2"
    script(FOLDER / "export.py", package)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    train = (FOLDER / "train.py", package)
    both, parts, alone = tmp_path / "both", tmp_path / "parts", tmp_path / "alone"
    losses = script(*torchrun, *train, both)
    assert len(losses) == 12 and losses[-1] < 0.1 < losses[0]
    assert script(*torchrun, *train, parts, 5) + script(*torchrun, *train, parts) == losses
    assert parts.read_bytes() == both.read_bytes()
    torch.testing.assert_close(script(*train, alone), losses, rtol=1e-3, atol=1e-5)
    ours, theirs = load_file(both), load_file(alone)
    assert ours.keys() - {"random/cpu/1"} == theirs.keys()
    for name, tensor in theirs.items():
        if not name.startswith("random/"):
            torch.testing.assert_close(
                ours[name], tensor, rtol=1e-3, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}"
            )
