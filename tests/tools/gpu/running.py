"""The runtime on a GPU: devices, streams, memory, threads, faults, and CUDA graphs."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import aot_backward as ab
from aot_backward_runtime import ExecutionError, InputError, WeightsError, load
from aot_backward_runtime.loader import Package
from tests.support.simulated_gpu import graphed
from tests.tools.cross import programs

from .compared import MEASURED, NOT_RUN, Row, beside, ratios, run, settle


def _outcome(right: bool, wrong: str = "off") -> str:
    return "right" if right else wrong


def runtime(device: str, quick: bool) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        module, x = programs.module("mlp")
        module, x = module.to(device), x.detach().to(device)
        path = ab.export_module(
            module,
            (x.clone().requires_grad_(),),
            dynamic_shapes=programs.ROWS,
            path=Path(folder) / "m.pt2",
            target=device,
        )
        yield from _placed(path, x)
        yield "four threads", *_threads(path, module, x)
        if device == "cuda":
            yield "side streams", *_streams(path, module, x)
            yield "memory over 200 calls", *_flat(path, x)
            yield "the second GPU", *_second(path, module, x)
            yield "a fault in a kernel", *_fault(Path(folder))
            yield "out of memory", *_exhausted(Path(folder))


def _placed(path: Path, x: torch.Tensor) -> Iterator[Row]:
    module = load(path).module()
    try:
        module(x.to("cpu" if x.is_cuda else "meta"))
        yield "an input elsewhere", "no error", ""
    except InputError as error:
        yield "an input elsewhere", "right", str(error)
    module.to("cpu" if x.is_cuda else "meta")
    try:
        module(x)
        yield "weights elsewhere", "no error", ""
    except WeightsError as error:
        yield "weights elsewhere", "right", str(error)


def _threads(path: Path, module: nn.Module, x: torch.Tensor) -> tuple[str, str]:
    grads: dict[str, float] = {}
    loaded = load(path).module()

    def work(name: str) -> None:
        for i in range(20):
            xs = (x + i).detach().requires_grad_()
            ours = torch.autograd.grad(loaded(xs).square().sum(), xs)[0]
            expected = torch.autograd.grad(module(xs).square().sum(), xs)[0]
            grads[name] = max(grads.get(name, 0.0), float((ours - expected).norm() / expected.norm()))

    threads = [threading.Thread(target=work, args=(str(n),)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    return _outcome(
        len(grads) == 4 and max(grads.values()) <= 1e-5
    ), f"{max(grads.values(), default=9):.1e} relative, 80 passes"


def _streams(path: Path, module: nn.Module, x: torch.Tensor) -> tuple[str, str]:
    """Use two side streams in turn, with and without CUDA graphs, with only the synchronization that eager needs."""
    worst = 0.0
    for package in (load(path), load(path, cudagraphs=True)):
        loaded = package.module()
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        found = []
        for i in range(12):
            stream = streams[i % 2]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                xs = (x + i).requires_grad_()
                found.append((xs, torch.autograd.grad(loaded(xs).square().sum(), xs)[0]))
        torch.cuda.synchronize()
        for xs, ours in found:
            expected = torch.autograd.grad(module(xs).square().sum(), xs)[0]
            worst = max(worst, float((ours - expected).norm() / expected.norm()))
    return _outcome(worst <= 1e-5), f"{worst:.1e} relative, 24 passes on two streams"


def _flat(path: Path, x: torch.Tensor) -> tuple[str, str]:
    loaded = load(path).module()

    def calls(n: int) -> int:
        for _ in range(n):
            loaded.zero_grad()
            loaded(x).sum().backward()
        settle("cuda")
        return int(torch.cuda.memory_allocated())

    before = calls(5)
    after = calls(200)
    return _outcome(after == before, "memory grew"), f"{before} bytes before, {after} after, by PyTorch's allocator"


def _second(path: Path, module: nn.Module, x: torch.Tensor) -> tuple[str, str]:
    if torch.cuda.device_count() < 2:
        return NOT_RUN, "this machine has fewer than two GPUs"
    loaded = load(path, device="cuda:1").module()
    ours = run(loaded, dict(loaded.named_parameters()), x.to("cuda:1"))
    eagers = run(module, dict(module.named_parameters()), x)
    worst = max(ratios({n: t.to("cuda:0") for n, t in ours.items()}, eagers, None, None).values())
    return _outcome(worst <= 1), f"{worst:.2g} of the tolerance, while cuda:0 is current"


_FAULT = """
import sys, torch, aot_backward_runtime as ab
grad = ab.load(sys.argv[1]).grad()
table = torch.randn(10, 4, device="cuda")
grad(table, torch.tensor([1, 2, 3], device="cuda"))
try:
    grad(table, torch.tensor([1, 2, 10_000_000], device="cuda"))
except ab.AotBackwardError as error:
    print(type(error).__name__, error, flush=True)
"""


def _looked_up(table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return table[rows].square().sum()


def _fault(folder: Path) -> tuple[str, str]:
    example = torch.randn(10, 4, device="cuda"), torch.tensor([0, 1, 2], device="cuda")
    path = ab.export_grad(_looked_up, example, wrt="table", path=folder / "g.pt2", target="cuda")
    environment = {**os.environ, "CUDA_LAUNCH_BLOCKING": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", _FAULT, path], env=environment, capture_output=True, text=True)
    said = done.stdout.strip()
    return _outcome(
        said.startswith("ExecutionError") and "the GPU no longer answers this process" in said,
        "not an error of that call",
    ), said[:200]


def _exhausted(folder: Path) -> tuple[str, str]:
    """Make a call that needs 64 MB in a process that may allocate no more memory."""
    module, big = nn.Linear(8, 1 << 18).cuda(), torch.randn(64, 8, device="cuda")
    loaded = load(ab.export_module(module, (big,), path=folder / "big.pt2", target="cuda")).module()
    expected = loaded(big).detach().clone()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(
        torch.cuda.memory_reserved() / torch.cuda.get_device_properties(0).total_memory
    )
    try:
        loaded(big)
        raised = "nothing was raised"
    except (ExecutionError, torch.OutOfMemoryError) as error:
        raised = str(error)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    again = loaded(big).detach()
    return _outcome("failed" in raised and torch.equal(again, expected), "not an error of that call"), raised[:200]


def graphs(device: str, quick: bool) -> Iterator[Row]:
    """Compare training with CUDA graphs with eager, and report the calls. Without a GPU, simulate one."""
    with tempfile.TemporaryDirectory() as folder:
        module, x = programs.module("convolutions")
        module, x = module.to(device), x.detach().to(device)
        path = ab.export_module(
            module,
            (x.clone().requires_grad_(),),
            dynamic_shapes=programs.ROWS,
            path=Path(folder) / "m.pt2",
            target=device,
        )
        package = _graphed(path, device)
        inputs = [torch.randn(n, *x.shape[1:], device=device) for n in (6, 4, 6, 6, 4, 4, 6)]
        yield (
            "forward and backward, two sizes",
            *beside(package.module(), module, inputs, 2e-3 if device == "cuda" else 1e-4),
        )
        yield "", MEASURED, str(package.cudagraphs).replace("\n", ";")
        yield (
            "two forwards, then their backwards",
            *_waiting(package.module(), module, inputs[:4], 2e-3 if device == "cuda" else 1e-4),
        )
        yield "dropout, AdamW, ten steps", *_trained(Path(folder), device)


class Waits(nn.Module):
    """A module with a size that depends on values: the host waits for the GPU, and a capture does not allow that."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * 2).nonzero().float().sum() + x.sin().sum()


def recapture(device: str, quick: bool) -> Iterator[Row]:
    """After a failed capture, and after parameters move: graphs, random numbers and streams must still work."""
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        drops = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Dropout(0.2), nn.Linear(32, 4)).to(device)
        x = torch.randn(6, 8, device=device)
        path = Path(folder) / "p.pt2"
        entries = {"drops": ab.Module(drops, [ab.Variant((x.clone().requires_grad_(),))])}
        if device == "cuda":
            entries["waits"] = ab.Module(Waits(), [ab.Variant((x.clone(),), mode="eval")])
        ab.export(path, entries, target=device)
        package = _graphed(path, device)
        module, eager = package.module("drops"), drops
        if device == "cuda":
            before, waits = torch.cuda.current_stream(), package.module("waits").eval()
            with torch.no_grad():
                right = all(torch.allclose(waits(x + i), Waits()(x + i), rtol=1e-4) for i in range(4))
            drawn = torch.rand(3, device=device)
            same = torch.cuda.current_stream() == before and bool(((drawn >= 0) & (drawn < 1)).all())
            yield "a capture that fails", _outcome(right and same), str(package.cudagraphs).replace("\n", ";")
        yield "dropout after it", *beside(module, eager, [x + i for i in range(4)], 1e-4)
        with torch.no_grad():
            for m in (module, eager):
                weight = m.get_parameter("0.weight")
                weight.data = weight.data * 1.5
        yield "parameters that moved", *beside(module, eager, [x - i for i in range(4)], 1e-4)
        report = package.cudagraphs
        assert report is not None
        yield "captured graphs", _outcome(report.captured >= 4), str(report).replace("\n", ";")


def _graphed(path: Path, device: str) -> Package:
    return load(path, cudagraphs=True) if device == "cuda" else graphed(path)[0]


def _waiting(loaded: nn.Module, module: nn.Module, inputs: list[torch.Tensor], relative: float) -> tuple[str, str]:
    """Keep saved tensors while other graphs are captured and replayed."""
    worst = 0.0
    loaded.load_state_dict(module.state_dict())
    for i in range(5):
        found = []
        for m in (loaded, module):
            pairs = [(x + i, x.flip(0) - i) for x in inputs]
            m.zero_grad()
            for first, second in pairs:
                losses = [m(first).square().mean(), m(second).square().mean()]
                for loss in losses if i % 2 else reversed(losses):
                    loss.backward()
            found.append({n: p.grad.clone() for n, p in m.named_parameters() if p.grad is not None})
        worst = max(worst, *ratios(found[0], found[1], None, relative).values())
    return _outcome(worst <= 1), f"{worst:.2g} of the tolerance"


def _trained(folder: Path, device: str) -> tuple[str, str]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Dropout(0.2), nn.Linear(32, 3)).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    batch = torch.randn(16, 8, device=device), torch.randint(0, 3, (16,), device=device)
    loss_fn: Callable[..., Any] = nn.functional.cross_entropy
    path = ab.export_step(net, batch, loss_fn=loss_fn, optimizer=optimizer, path=folder / "s.pt2", target=device)
    package = _graphed(path, device)
    step, losses = package.step(), []
    for i in range(10):
        x, y = torch.randn(16, 8, device=device), torch.randint(0, 3, (16,), device=device)
        torch.manual_seed(i)
        optimizer.zero_grad()
        loss = loss_fn(net(x), y)
        loss.backward()
        optimizer.step()
        torch.manual_seed(i)
        losses.append(float((step(x, y) - loss.detach()).abs()))
    report = package.cudagraphs
    assert report is not None
    return _outcome(
        max(losses) <= 1e-4 and report.replayed == 9
    ), f"loss off by {max(losses):.1e} at most; {report}".replace("\n", ";")
