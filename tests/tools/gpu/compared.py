"""Compare with eager, in the same process and on the same numbers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from aot_backward.checks.verify import verify_package

RELATIVE = {torch.float32: 1e-5, torch.float64: 1e-10}
"""Tolerance of ‖a − e‖ over the larger of ‖e‖ and a tenth of the largest norm. For 16 bits, eager's distance from
float64 decides."""
RIGHT, MEASURED, NOT_RUN = "right", "measured", "not run"
"""Outcomes that are not failures: compared and equal; a timing of compared code; not compared, with the reason."""
Row = tuple[str, str, str]
Tensors = dict[str, torch.Tensor]


def run(module: Callable[..., Any], parameters: Mapping[str, torch.Tensor], x: torch.Tensor, seed: int = 3) -> Tensors:
    """Return output and gradients, with random numbers from ``seed``. The strides of ``x`` stay."""
    x = x.detach().requires_grad_(x.is_floating_point())
    for p in parameters.values():
        p.grad = None
    torch.manual_seed(seed)
    output = module(x)
    output.float().square().sum().backward()
    gradients = {f"gradient of {n}": p.grad for n, p in parameters.items()} | {"gradient of the input": x.grad}
    return {"output": output.detach()} | {n: g.detach().clone() for n, g in gradients.items() if g is not None}


def beside(
    loaded: nn.Module, module: nn.Module, inputs: Sequence[torch.Tensor], relative: float | None = None
) -> tuple[str, str]:
    """Compare a loaded module with eager at all ``inputs``. Return the outcome and the worst tensor. ``relative``
    replaces the tolerance."""
    loaded.load_state_dict(module.state_dict())
    found: dict[str, float] = {}
    for x in inputs:
        ours, eagers = (run(m, dict(m.named_parameters()), x) for m in (loaded, module))
        if ours.keys() != eagers.keys():
            return f"only one of eager and ours has {sorted(ours.keys() ^ eagers.keys())[0]}", ""
        low = any(t.dtype in (torch.float16, torch.bfloat16) for t in eagers.values()) or torch.is_autocast_enabled(
            x.device.type
        )
        truth = in_float64(module, x) if low and relative is None else None
        for name, ratio in ratios(ours, eagers, truth, relative).items():
            found[name] = max(found.get(name, 0.0), ratio)
    worst = max(found, key=lambda n: found[n])
    return ("right" if found[worst] <= 1 else f"{worst} is off"), f"{found[worst]:.2g} of the tolerance ({worst})"


def ratios(ours: Tensors, eagers: Tensors, truth: Tensors | None, relative: float | None) -> dict[str, float]:
    scale = max(float(t.double().norm()) for n, t in eagers.items())
    out = {}
    for name, e in eagers.items():
        a = ours[name]
        if (a.dtype, a.shape) != (e.dtype, e.shape):
            out[name] = float("inf")
        elif truth is None:
            allowed = (relative or RELATIVE[e.dtype]) * max(float(e.double().norm()), 0.1 * scale)
            out[name] = float((a.double() - e.double()).norm()) / allowed
        else:
            t = truth[name]
            allowed = 2 * float((e.double() - t).norm()) + torch.finfo(torch.bfloat16).eps * 0.1 * max(
                float(t.norm()), 0.1 * scale
            )
            out[name] = float((a.double() - t).norm()) / allowed
    return out


def in_float64(module: nn.Module, x: torch.Tensor) -> Tensors:
    """Run the same program in float64, the reference for 16-bit results."""
    kept = [(t, t.data) for t in [*module.parameters(), *module.buffers()] if t.is_floating_point()]
    try:
        for t, data in kept:
            t.data = data.double()
        with torch.autocast(x.device.type, enabled=False):
            return run(module, dict(module.named_parameters()), x.double() if x.is_floating_point() else x)
    finally:
        for t, data in kept:
            t.data, t.grad = data, None


def verified(path: Path) -> tuple[str, str]:
    """Compare a package with the numbers that it stores."""
    report = verify_package(path)
    if report.not_run:
        return NOT_RUN, f"numbers not compared: {report.not_run}"
    wrong = [w for v in report.variants for w in v.wrong]
    return (
        wrong[0] if wrong else "right"
    ), f"{max((v.ratio for v in report.variants), default=0.0):.2g} of the tolerance"


def settle(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def interleaved(ways: Mapping[str, Callable[[], Any]], device: str, rounds: int, batch: int = 1) -> dict[str, float]:
    """Return the median seconds of a call of each way, with ``batch`` calls queued. Discard five rounds."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for n in range(rounds + 5):
        for name, call in ways.items():
            settle(device)
            started = time.perf_counter()
            for _ in range(batch):
                call()
            settle(device)
            if n >= 5:
                times[name].append((time.perf_counter() - started) / batch)
    return {name: statistics.median(found) for name, found in times.items()}
