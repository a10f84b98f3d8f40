"""``python -m tests.tools.benchmarks.attached MODEL PACKAGE STEPS``: the script of ``unmodified.py`` plus one line,
``attach``.

If PACKAGE does not exist, export the module to it and run nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch.export import Dim

from aot_backward_runtime import load

from . import unmodified

EXPORTED = "{}"  # output of a run that only exports


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
