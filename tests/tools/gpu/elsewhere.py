"""Run packages that were compiled on a machine or in a process without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

import aot_backward as ab
from aot_backward_runtime import load
from tests.tools.cross import programs

from .compared import MEASURED, NOT_RUN, Row, beside, interleaved, verified

MODULES = {"mlp": None, "convolutions": 2e-3, "attention": None, "flash": 3e-2, "efficient": 1e-3}
"""Programs to compare also at other sizes and with native compilation, and the tolerance if it is not that of float32:
cuDNN rounds to TF32, and the kernels of attention do not support float64 as a reference."""
CARRIED = Path(__file__).parent / "carried"
ROOT = Path(__file__).parents[3]


def carried(device: str, quick: bool) -> Iterator[Row]:
    """Verify the packages in this repository that another machine compiled."""
    for path in sorted(CARRIED.glob("*.pt2")):
        try:
            yield f"{path.stem}, compiled elsewhere", *verified(path)
        except ab.IncompatibleError as error:
            reasons = str(error)
            expected = device == "cpu" or "built with torch" in reasons or ", this GPU is sm_" in reasons
            yield (
                f"{path.stem}, compiled elsewhere",
                NOT_RUN if expected else "refused",
                f"refused: {reasons.partition('. ')[0]}",
            )


_WRITE = (
    "import sys; from pathlib import Path; from tests.tools.cross import programs; "
    "programs.write(Path(sys.argv[1]), sys.argv[2], True, sys.argv[3])"
)


def cross(device: str, quick: bool) -> Iterator[Row]:
    """Compile in a process that sees no GPU; run here; compare with eager and with native compilation."""
    if device == "cpu":
        yield "cross-compiled", NOT_RUN, "not without a build for CUDA"
        return
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability())
    names = ("mlp",) if quick else (*MODULES, "step", "recorded")
    with tempfile.TemporaryDirectory() as folder:
        blind = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(sys.path)}
        started = {}
        for name in names:  # all at once: compilation needs only the host
            argv = [sys.executable, "-c", _WRITE, str(Path(folder) / f"{name}.pt2"), name, f"cuda:{arch}"]
            started[name] = subprocess.Popen(argv, cwd=ROOT, env=blind, stderr=subprocess.PIPE, text=True)
        for name, process in started.items():
            _, said = process.communicate()
            if process.returncode:
                yield f"{name}, cross-compiled", f"FAILED: {said.strip().splitlines()[-1]}", ""
                continue
            path = Path(folder) / f"{name}.pt2"
            yield f"{name}, cross-compiled", *verified(path)
            if name in MODULES:
                yield from _as_native(name, path, device)


def _as_native(name: str, path: Path, device: str) -> Iterator[Row]:
    module, x = programs.module(name)
    module, x = module.to(device), x.detach().to(device)
    inputs = [torch.randn(n, *x.shape[1:], device=device, dtype=x.dtype) for n in (7, 2)]
    crossed = load(path).module()
    yield f"{name}, cross-compiled, other sizes", *beside(crossed, module, inputs, MODULES[name])
    with tempfile.TemporaryDirectory() as folder:
        made = ab.export_module(
            module, (x.requires_grad_(),), dynamic_shapes=programs.ROWS, path=Path(folder) / "n.pt2", target=device
        )
        native, batch = load(made).module(), torch.randn(64, *x.shape[1:], device=device, dtype=x.dtype)
        times = interleaved(
            {k: lambda m=m: m(batch).square().sum().backward() for k, m in (("cross", crossed), ("native", native))},
            device,
            50,
            5,
        )
    ratio = times["cross"] / times["native"]
    yield (
        f"{name}, cross-compiled over native",
        MEASURED,
        f"{ratio:.2f} of native's {times['native'] * 1e6:.0f} µs (asked: at most 1.15)",
    )
