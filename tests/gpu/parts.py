"""The parts of ``python -m tests.gpu``: each gives rows (what, outcome, figure), and an outcome that is not "right" is a failure."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import aot_backward as ab
from aot_backward.verify import verify_package
from aot_backward_runtime import load
from tests.cross import programs

CARRIED = Path(__file__).parent / "carried"
RELATIVE = 1e-4
ROUNDS = 50
Row = tuple[str, str, str]


def native(device: str, quick: bool) -> Iterator[Row]:
    """Exported on this machine, for it: forward and every gradient beside eager, at sizes that no example had."""
    for name in ("mlp", "convolutions") if quick else ("mlp", "convolutions", "attention"):
        with tempfile.TemporaryDirectory() as folder:
            module, x = programs.module(name)
            module, x = module.to(device), x.detach().to(device).requires_grad_()
            path = ab.export_module(module, (x,), dynamic_shapes=programs.ROWS, path=Path(folder) / "m.pt2", target=device)
            yield f"{name}, native", *_as_eager(load(path).module(), module, name, device)


def step(device: str, quick: bool) -> Iterator[Row]:
    """Three steps of AdamW beside eager's."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    batches = [(torch.randn(n, 4, device=device), torch.randint(0, 3, (n,), device=device)) for n in (6, 9, 2)]
    with tempfile.TemporaryDirectory() as folder:
        path = ab.export_step(
            net, batches[0], loss_fn=nn.functional.cross_entropy, optimizer=optimizer, dynamic_shapes=(programs.ROWS[0],) * 2,
            path=Path(folder) / "s.pt2", target=device,
        )  # fmt: skip
        loaded = load(path).step()
        for batch in batches:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(batch[0]), batch[1])
            loss.backward()
            optimizer.step()
            ours = loaded(*batch)
        errors = {n: _error(loaded.parameters[n], p) for n, p in net.named_parameters()} | {"loss": _error(ours, loss)}
    worst = max(errors, key=lambda n: errors[n])
    yield "AdamW, three steps", "right" if errors[worst] <= RELATIVE else f"{worst} is off", f"{errors[worst]:.1e} relative ({worst})"


def carried(device: str, quick: bool) -> Iterator[Row]:
    """Packages that were compiled for GPUs where there was none."""
    for path in sorted(CARRIED.glob("*.pt2")):
        try:
            yield f"{path.stem}, compiled elsewhere", *_verified(path)
        except ab.IncompatibleError as error:
            expected = device == "cpu" or "built with torch" in str(error)
            yield f"{path.stem}, compiled elsewhere", "right" if expected else "refused", f"refused: {str(error).partition('. ')[0]}"


def cross(device: str, quick: bool) -> Iterator[Row]:
    """Compiled here as if there were no GPU, and run on it."""
    if device == "cpu":
        yield "cross-compiled", "right", "not without a build for CUDA"
        return
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability())
    for name in ("mlp",) if quick else ("mlp", "convolutions"):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "c.pt2"
            programs.write(path, name, True, f"cuda:{arch}")
            yield f"{name}, cross-compiled", *_verified(path)
            yield f"{name}, cross-compiled, other sizes", *_as_eager(load(path).module(), programs.module(name)[0].to(device), name, device)


class Loss(nn.Module):
    """An MLP and a loss."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(width, width), nn.GELU())], nn.Linear(width, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x).square().mean()


def speed(device: str, quick: bool) -> Iterator[Row]:
    """Forward and backward of an MLP, interleaved: eager, torch.compile's modes, and ours."""
    for width, rows in ((32, 16),) if quick else ((32, 16), (256, 64), (2048, 1024)):
        times = _timed(width, rows, device, quick)
        for way, seconds in times.items():
            yield f"{width} wide, {rows} rows, {way}", "right", f"{seconds * 1e6:.0f} µs, {seconds / times['ours']:.2f} times ours"


def _timed(width: int, rows: int, device: str, quick: bool) -> dict[str, float]:
    torch.manual_seed(0)
    loss, x = Loss(width).to(device), torch.randn(rows, width, device=device)
    with tempfile.TemporaryDirectory() as folder:
        grad = load(ab.export_grad(loss, (x,), path=Path(folder) / "g.pt2", target=device)).grad()
        ways: dict[str, Callable[[], Any]] = {"ours": lambda: grad(x), "eager": lambda: _backward(loss, loss, x)}
        for mode in () if quick else ("default", "reduce-overhead", "max-autotune"):
            ways[f"torch.compile {mode}"] = partial(_backward, loss, torch.compile(loss, mode=mode), x)
        return _interleaved(ways, device, 5 if quick else ROUNDS)


_START = """
import sys, time; started = time.perf_counter()
import torch, aot_backward_runtime
module = aot_backward_runtime.load(sys.argv[1]).module()
module(torch.randn(5, 8, device=sys.argv[2])).sum().backward()
next(module.parameters()).grad.sum().item()
print(time.perf_counter() - started)
"""


def start(device: str, quick: bool) -> Iterator[Row]:
    """Seconds from the process's start to the first gradient, in a fresh process."""
    with tempfile.TemporaryDirectory() as folder:
        module, x = programs.module("mlp")
        path = ab.export_module(module.to(device), (x.detach().to(device),), path=Path(folder) / "m.pt2", target=device)
        runs = [subprocess.run([sys.executable, "-c", _START, path, device], capture_output=True, text=True, check=True) for _ in range(3)]
        yield "start to first gradient", "right", f"{min(float(r.stdout) for r in runs):.2f} s"


PARTS: dict[str, Callable[[str, bool], Iterator[Row]]] = {f.__name__: f for f in (native, step, carried, cross, speed, start)}


def _as_eager(loaded: nn.Module, module: nn.Module, name: str, device: str) -> tuple[str, str]:
    loaded.load_state_dict(module.state_dict())
    errors: dict[str, float] = {}
    for rows in (7, 2):
        x = programs.module(name)[1].detach().to(device)
        x = x[torch.arange(rows, device=device) % x.shape[0]] + 0.1 * torch.randn(rows, *x.shape[1:], device=device)
        found = [_run(m, x.clone().requires_grad_()) for m in (loaded, module)]
        scale = max(float(t.double().norm()) for t in found[1].values())
        for n, e in found[1].items():
            errors[n] = max(errors.get(n, 0.0), float((found[0][n] - e).double().norm()) / max(float(e.double().norm()), 0.1 * scale))
    worst = max(errors, key=lambda n: errors[n])
    return "right" if errors[worst] <= RELATIVE else f"{worst} is off", f"{errors[worst]:.1e} relative ({worst})"


def _run(module: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    module.zero_grad()
    torch.manual_seed(3)
    output = module(x)
    output.square().sum().backward()
    gradients = {n: p.grad for n, p in module.named_parameters()} | {"input": x.grad}
    return {"output": output.detach()} | {n: g.detach().clone() for n, g in gradients.items() if g is not None}


def _verified(path: Path) -> tuple[str, str]:
    report = verify_package(path)
    if report.not_run:
        return "right", f"numbers not compared: {report.not_run}"
    wrong = [w for v in report.variants for w in v.wrong]
    worst = max((v.ratio for v in report.variants), default=0.0)
    return (wrong[0] if wrong else "right"), f"{worst:.2g} of what is allowed"


def _error(a: torch.Tensor, e: torch.Tensor) -> float:
    return float((a - e).detach().double().norm() / e.detach().double().norm().clamp_min(1e-12))


def _backward(loss: nn.Module, call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> None:
    for parameter in loss.parameters():
        parameter.grad = None
    call(x).backward()


def _interleaved(ways: dict[str, Callable[[], Any]], device: str, rounds: int) -> dict[str, float]:
    """Median seconds of each."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for n in range(rounds + 3):
        for name, call in ways.items():
            _settle(device)
            started = time.perf_counter()
            call()
            _settle(device)
            if n >= 3:
                times[name].append(time.perf_counter() - started)
    return {name: statistics.median(found) for name, found in times.items()}


def _settle(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
