"""Run every part of ``make gpu`` that does not need a GPU, on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ..tools.gpu.parts import PARTS

ROOT = Path(__file__).parents[2]


def test_every_part_runs_without_a_gpu(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "tests.tools.gpu", "--device", "cpu", "--quick", "--docs", str(tmp_path / "page")]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "page.json").read_text())["rows"]
    assert {row[0] for row in rows} == {*PARTS}
    assert {row[2] for row in rows} == {"right", "measured", "not run"}
    compared = {row[0] for row in rows if row[2] == "right"}
    assert compared == {"native", "precision", "step", "recorded", "runtime", "graphs", "recapture", "tiny-step"}
    refused = [row[3] for row in rows if row[0] == "carried"]
    assert len(refused) == 3 and all("was built for sm_90 with CUDA 13.0" in words for words in refused)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.tools.gpu", "--only", "native"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2 and "sees no GPU. Use --device cpu for the parts that do not need one." in done.stderr
