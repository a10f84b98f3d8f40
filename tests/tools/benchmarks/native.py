"""Packages without PyTorch: start to the first gradient, peak memory, and calls, against PyTorch's runtime and eager.

C and Python use both backends of the C library. Start: a whole fresh process with a gradient function of a small MLP.
Calls: gradient functions and steps of the models of ``doors`` at their stored example. Each backend has its own
process; they take turns; the figure is the median of medians.
"""

from __future__ import annotations

import json
import statistics
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from aot_backward_runtime.package.archive import open_package
from tests.support.c_library import _DTYPES, NATIVE

from . import doors, processes
from .report import Result, Target

TITLE = "from C and Python without PyTorch: start to the first gradient, memory, calls"
LARGEST = 200_000  # the target covers models with fewer parameters
LIBTORCH = f"{torch.__path__[0]}/lib/libtorch_cpu.so"
_PEAK = """
print('{"peak":', 1024 * next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")), "}")
"""
_EAGER = """
import torch
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
x = torch.randn(8, 16, requires_grad=True)
torch.autograd.grad(net(x).square().mean(), [x, *net.parameters()])
"""
_TORCH = """
import sys, torch, aot_backward_runtime
aot_backward_runtime.load(sys.argv[1]).grad("grad")(torch.randn(8, 16))
"""
_PYTHON = """
import array, sys
import aot_backward_native as abn
x = memoryview(array.array("f", [0.5]) * 128).cast("B").cast("f", (8, 16))
abn.load(sys.argv[1], backend=sys.argv[2]).grad("grad")(x)
"""
_EXPORT = """
import sys, torch, aot_backward as ab
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
def loss(x): return net(x).square().mean()
batch = torch.export.Dim("batch", min=2, max=4096)
grad = ab.Grad(loss, [ab.Variant((torch.randn(8, 16),), dynamic_shapes=({0: batch},))], wrt=["x", *(f"net.{n}" for n, _ in net.named_parameters())])
tiny = ab.Grad(lambda x: x.square().sum(), [ab.Variant((torch.ones(2),))])
ab.export(sys.argv[1], {"grad": grad, "tiny": tiny}, tune="none", runtime="standalone")
print("{}")
"""


def measure(quick: bool, threads: list[int]) -> Result:
    result = Result("native", TITLE, ["what", "by", "start ms", "peak MB", "call us", "of libtorch's"])
    program = _build()
    small = processes.package("native-mlp")
    if not (processes.REUSE and small.exists()):
        processes.run(_EXPORT, small, threads=1)
    _start(result, program, small, 3 if quick else 21)
    models = ("mlp",) if quick else tuple(doors.NAMES)
    for name in models:
        for kind in ("grad", "step"):
            _calls(result, program, name, kind, quick)
    _conclude(result)
    return result


def _build() -> Path:
    folder = processes.WORK / "native"
    subprocess.run(["make", "-s", "-C", str(NATIVE), f"BUILD={folder}", "-j2"], check=True)
    source, program = Path(__file__).with_suffix(".c"), folder / "native"
    subprocess.run(
        [
            "gcc",
            "-O2",
            str(source),
            "-o",
            str(program),
            "-I",
            str(NATIVE / "include"),
            "-L",
            str(folder),
            "-laot_backward",
            f"-Wl,-rpath,{folder}",
        ],
        check=True,
    )
    return program


def _write_inputs(path: Path, tensors: list[torch.Tensor]) -> None:
    with path.open("wb") as file:
        for t in tensors:
            code, bits = _DTYPES[t.dtype]
            file.write(
                struct.pack(f"<{3 + t.dim()}q", code, bits, t.dim(), *t.shape) + t.contiguous().numpy().tobytes()
            )


def _whole(argv: list[str]) -> tuple[float, int]:
    """Return the seconds from the start to the end of a process, and its peak memory in bytes."""
    began = processes.now()
    done = subprocess.run(argv, capture_output=True, text=True, env=processes.environment(1))
    seconds = processes.now() - began
    if done.returncode:
        raise RuntimeError(done.stderr.strip())
    return seconds, json.loads(done.stdout)["peak"]


def _start(result: Result, program: Path, package: Path, rounds: int) -> None:
    inputs = package.with_suffix(".inputs")
    _write_inputs(inputs, [torch.full((8, 16), 0.5)])

    def c(backend: str) -> list[str]:
        return [str(program), str(package), "grad", backend, str(inputs), "0"]

    peers: dict[str, list[str]] = {
        "Python alone": [sys.executable, "-c", _PEAK],
        "C, standalone": c("standalone"),
        "Python, standalone": [sys.executable, "-c", _PYTHON + _PEAK, str(package), "standalone"],
        "C, libtorch": c(LIBTORCH),
        "Python, libtorch": [sys.executable, "-c", _PYTHON + _PEAK, str(package), LIBTORCH],
        "PyTorch's runtime": [sys.executable, "-c", _TORCH + _PEAK, str(package)],
        "eager": [sys.executable, "-c", _EAGER + _PEAK],
    }
    found: dict[str, list[tuple[float, int]]] = {name: [] for name in peers}
    for _ in range(rounds):
        for name, argv in peers.items():
            found[name].append(_whole(argv))
    for name, measured in found.items():
        seconds, peak = statistics.median(s for s, _ in measured), statistics.median(p for _, p in measured)
        result.rows.append(["start to the first gradient", name, f"{1e3 * seconds:.1f}", f"{peak / 1e6:.1f}", "", ""])
        result.data.append(
            {"what": "start", "by": name, "seconds": seconds, "peak": peak, "all_s": [s for s, _ in measured]}
        )
    _write_inputs(inputs, [torch.ones(2)])
    for backend in ("standalone", LIBTORCH):
        call = _asked([str(program), str(package), "tiny", backend, str(inputs), "0.5"])["call_s"]
        name = f"C, {'standalone' if backend == 'standalone' else 'libtorch'}"
        result.rows.append(["a function of two numbers", name, "", "", f"{1e6 * call:.2f}", ""])
        result.data.append({"what": "tiny", "by": name, "call_s": call})


def _asked(argv: list[str]) -> dict[str, Any]:
    done = subprocess.run(argv, capture_output=True, text=True, env=processes.environment(1))
    if done.returncode:
        raise RuntimeError(done.stderr.strip())
    return json.loads(done.stdout)


def _calls(result: Result, program: Path, name: str, kind: str, quick: bool) -> None:
    package = processes.package(f"doors-{name}-open")
    if not package.exists():
        processes.run(doors._EXPORT, name, package, "open", threads=1)
    archive = open_package(package)
    if kind not in archive.manifest.entries:
        return
    from aot_backward.checks.verify import stored_example
    from aot_backward_runtime.native.weights import load_examples

    variant = archive.manifest.entries[kind].variants[0]
    tensors = [t.detach() for t in stored_example(variant, kind, 0, load_examples(archive)).tensors]
    inputs = package.with_suffix(".inputs")
    _write_inputs(inputs, tensors)
    parameters = doors.Program(name).size()
    found: dict[str, list[float]] = {"standalone": [], LIBTORCH: []}
    try:
        for _ in range(1 if quick else 5):
            for backend, calls in found.items():
                calls.append(
                    _asked([str(program), str(package), kind, backend, str(inputs), "0.1" if quick else "0.3"])[
                        "call_s"
                    ]
                )
    except RuntimeError as error:
        result.rows.append(
            [
                f"{name}, {parameters:,} parameters, {kind}",
                "C, standalone",
                "",
                "",
                "",
                str(error).rpartition(" calls ")[2][:60],
            ]
        )
        result.data.append({"what": kind, "model": name, "parameters": parameters, "refused": str(error)})
        return
    standalone, libtorch = (statistics.median(calls) for calls in found.values())
    label = f"{name}, {parameters:,} parameters, {kind}"
    result.rows.append([label, "C, standalone", "", "", f"{1e6 * standalone:.1f}", f"{libtorch / standalone:.2f}"])
    result.rows.append([label, "C, libtorch", "", "", f"{1e6 * libtorch:.1f}", "1.00"])
    result.data.append(
        {"what": kind, "model": name, "parameters": parameters, "standalone_s": standalone, "libtorch_s": libtorch}
    )


def _conclude(result: Result) -> None:
    start = {d["by"]: d for d in result.data if d["what"] == "start"}
    c, python = start["C, standalone"], start["Python, standalone"]
    over = python["seconds"] - start["Python alone"]["seconds"]
    said: list[tuple[str, str, bool, str]] = [
        (
            "C and standalone: the first gradient within 5 ms",
            f"{1e3 * c['seconds']:.1f} ms",
            c["seconds"] <= 0.005,
            f"{1e3 * c['seconds'] - 5:.1f} ms",
        ),
        ("with at most 8 MB", f"{c['peak'] / 1e6:.1f} MB", c["peak"] <= 8e6, f"{c['peak'] / 1e6 - 8:.1f} MB"),
        (
            "Python: within 60 ms over the interpreter's start",
            f"{1e3 * over:.0f} ms",
            over <= 0.06,
            f"{1e3 * over - 60:.0f} ms",
        ),
    ]
    tiny = min(d["call_s"] for d in result.data if d["what"] == "tiny" and d["by"] == "C, standalone")
    said.append(
        (
            "a call within 3 us over the raw library",
            f"{1e6 * tiny:.2f} us with it",
            tiny <= 3e-6,
            f"{1e6 * tiny - 3:.2f} us",
        )
    )
    rows = [d for d in result.data if "standalone_s" in d and d["parameters"] < LARGEST]
    if rows:
        speeds = {f"{d['model']}, {d['what']}": d["libtorch_s"] / d["standalone_s"] for d in rows}
        slow = sorted((s, n) for n, s in speeds.items() if s < 0.9)
        mean = statistics.geometric_mean(speeds.values())
        reached = f"{mean:.2f} in the geometric mean; below 0.9: {', '.join(f'{n} {s:.2f}' for s, n in slow) or 'none'}"
        said.append(
            (
                f"standalone at least 0.9 of libtorch's speed, models under {LARGEST:,} parameters",
                reached,
                not slow,
                f"{len(slow)} of {len(rows)}",
            )
        )
    result.targets += [Target(*one) for one in said]
