"""The files of the golden packages (tests/golden). Their native code runs on the torch that it was built for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from aot_backward_runtime.package.archive import open_package

FOLDER = Path(__file__).parents[1] / "golden"
PAIR = FOLDER / "1.0-pair.pt2"
BUILT = ".".join(open_package(PAIR).manifest.torch.split(".")[:2])

needed = pytest.mark.skipif(
    not torch.__version__.startswith(f"{BUILT}."), reason=f"mutates golden packages, which need torch {BUILT}"
)
