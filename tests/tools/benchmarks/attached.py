"""``python -m tests.tools.benchmarks.attached MODEL PACKAGE STEPS``: the script of ``unmodified.py`` with one line more, ``attach``.

Where there is no such file yet, the module is exported to it, and nothing is run.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch.export import Dim

from aot_backward_runtime import load

from . import unmodified

EXPORTED = "{}"  # what a run that exports prints


def export(name: str, path: Path) -> None:
    import aot_backward as ab

    torch.manual_seed(0)
    make, batch, rows, _ = unmodified.MODELS[name]
    ab.export_module(make(), (batch(rows)[0],), dynamic_shapes=({0: Dim("rows", min=2)},), path=path)


def main(name: str, path: Path, steps: int) -> None:
    if not path.exists():
        export(name, path)
        print(EXPORTED)
        return
    unmodified.main(name, "foreach", steps, lambda net: load(path).module().attach(net))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
