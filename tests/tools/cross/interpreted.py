"""Run libraries for GPUs on a machine without one, and compare them with eager.

The library comes from the package. Its host code allocates, calls operators and launches kernels. ``driver.c``
simulates the GPU: memory is the host's, operators are the CPU's, and a launch goes to Triton's interpreter with the
source of the kernel (:mod:`.played`). This does not check the machine code, nor CUDA's operators.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from aot_backward_exporters.toolchain.gcc import compiler

from ...support import oracle
from .binaries import symbols
from .jobs import Call, Library, Played
from .watched import Compiled

_OPERATOR = "aoti_torch_cuda_"
_JUMP = (
    "void *to_{name}; __attribute__((naked)) void aoti_torch_cuda_{name}(void) "
    '{{ __asm__("movq to_{name}@GOTPCREL(%rip), %r11; jmp *(%r11)"); }}\n'
)


@dataclass(frozen=True)
class Verdict:
    """``error``: the largest relative error of a tensor. ``launches``: the number of launches. ``refused`` and
    ``wrong``: the reason, or ""."""

    error: float = 0.0
    launches: int = 0
    refused: str = ""
    wrong: str = ""


def judge(
    libraries: Sequence[tuple[Path, Compiled, dict[str, str]]],
    weights: dict[str, torch.Tensor],
    *,
    say: Callable[[str], object] = sys.stderr.write,
) -> list[Verdict]:
    """Return a verdict for each library. Call each twice, at two sizes if sizes are dynamic.

    A library is its file, its source, and its constants. ``weights``: the package's weights, by key. A backward gets
    the tensors that its forward saves; the forward must come first. ``say`` gets the tracebacks.
    """
    given, eager = [], []
    saved: dict[tuple[str, int], dict[str, torch.Tensor]] = {}
    for path, compiled, constants in libraries:
        operators = tuple(
            name.removeprefix(_OPERATOR) for _, name in symbols(path, "--undefined-only") if name.startswith(_OPERATOR)
        )
        entry = compiled.graph.name.rpartition(".")[0]
        calls = [(seed, _inputs(compiled, saved.setdefault((entry, seed), {}), 2 * seed, seed)) for seed in (0, 1)]
        own = {key: weights[key].clone() for key in constants.values()}
        given.append(Library(str(path), operators, compiled.kernels, constants, own, calls))
        eager.append(_eager(compiled, copy.deepcopy(given[-1])))
        output = next(iter(compiled.graph.module.graph.find_nodes(op="output")))
        for (seed, inputs), call in zip(calls, eager[-1], strict=True):
            saved[entry, seed] |= dict(zip(_placeholders(compiled), copy.deepcopy(inputs), strict=True))
            saved[entry, seed] |= {node.name: value for node, value in zip(output.args[0], call.outputs, strict=True)}
    donated = (compiled.graph.donated for _, compiled, _ in libraries)
    return [compared(*row) for row in zip(given, _play(given, say), eager, donated, strict=True)]


def _placeholders(compiled: Compiled) -> list[str]:
    return [node.name for node in compiled.graph.module.graph.find_nodes(op="placeholder")]


def _inputs(compiled: Compiled, saved: dict[str, torch.Tensor], more: int, seed: int) -> list[torch.Tensor]:
    """Return the inputs of a call: tensors that the forward saved, or random ones. Random integers are 0 or 1.

    Each dynamic size is larger by ``more`` than in the example."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for node in compiled.graph.module.graph.find_nodes(op="placeholder"):
        fake = node.meta["val"]
        like = torch.empty_strided(_sizes(fake.shape, more), _sizes(fake.stride(), more), dtype=fake.dtype)
        if node.name in saved and saved[node.name].shape == like.shape:
            made.append(like.copy_(saved[node.name]))
        elif fake.dtype.is_floating_point:
            made.append(like.copy_(torch.randn(like.shape, generator=generator)))
        else:
            made.append(like.copy_(torch.randint(0, 2, like.shape, generator=generator)))
    return made


def _sizes(sizes: Sequence[Any], more: int) -> list[int]:
    found = []
    for size in sizes:
        if isinstance(size, torch.SymInt):
            known = size.node.shape_env.backed_var_to_val
            expression = size.node.shape_env.replace(size.node.expr)
            found.append(int(expression.xreplace({symbol: known[symbol] + more for symbol in expression.free_symbols})))
        else:
            found.append(size)
    return found


def _eager(compiled: Compiled, library: Library) -> list[Call]:
    """Run the graph with ATen's operators on the CPU."""
    graph = compiled.graph
    module = torch.fx.GraphModule({}, torch.fx.Graph())
    for attribute, (key, _) in graph.constants.items():
        module.register_buffer(attribute, library.weights[key])
    module.graph = copy.deepcopy(graph.module.graph)
    module.graph.owning_module = module
    calls = []
    with torch.no_grad():
        for seed, inputs in library.calls:
            torch.manual_seed(seed)
            outputs = list(torch.fx.Interpreter(module).run(*inputs))
            calls.append(Call(outputs, inputs, {key: tensor.clone() for key, tensor in library.weights.items()}))
    return calls


def _play(libraries: list[Library], say: Callable[[str], object]) -> list[Played]:
    with tempfile.TemporaryDirectory() as folder:
        operators = sorted({name for library in libraries for name in library.operators})
        driver, jobs, results = _driver(Path(folder), operators), Path(folder) / "jobs", Path(folder) / "results"
        torch.save({"operators": operators, "libraries": libraries}, jobs)
        argv = [sys.executable, "-m", "tests.tools.cross.played", str(driver), str(jobs), str(results)]
        done = subprocess.run(argv, capture_output=True, text=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
        if done.returncode:
            last = (done.stderr.strip() or "no message").splitlines()[-1]
            return [Played(failed=f"the process ended with {done.returncode}: {last}") for _ in libraries]
        say(done.stderr)
        return torch.load(results, weights_only=False)


def _driver(folder: Path, operators: Sequence[str]) -> Path:
    source, library = folder / "driver.c", folder / "libcuda.so.1"
    source.write_text(
        (Path(__file__).parent / "driver.c").read_text() + "".join(_JUMP.format(name=name) for name in operators)
    )
    argv = [
        *compiler(),
        "-x",
        "c",
        "-O1",
        "-w",
        "-shared",
        "-fPIC",
        "-Wl,-soname,libcuda.so.1",
        str(source),
        "-o",
        str(library),
    ]
    subprocess.run(argv, check=True, capture_output=True)
    return library


def compared(library: Library, played: Played, eager: list[Call], donated: Sequence[int]) -> Verdict:
    """``donated``: inputs that the library may write into."""
    if played.refused or played.failed:
        return Verdict(refused=played.refused, wrong=played.failed)
    unused = len(library.kernels) - played.kernels
    if unused:
        return Verdict(wrong=f"{unused} of its kernels were not launched")
    worst, wrong = 0.0, []
    for number, (a, e) in enumerate(zip(played.calls, eager, strict=True)):
        kept = [at for at in range(len(e.inputs)) if at not in donated]
        pairs = {f"result {at}": (x, y) for at, (x, y) in enumerate(zip(a.outputs, e.outputs, strict=True))}
        pairs |= {f"input {at}": (a.inputs[at], e.inputs[at]) for at in kept}
        pairs |= {key: (a.weights[key], e.weights[key]) for key in e.weights}
        scale = max((float(y.norm()) for y in e.outputs if y.is_floating_point()), default=0.0)
        if not scale:
            wrong.append(f"call {number}: all that eager returns is zero, which proves nothing")
        for name, (x, y) in pairs.items():
            error = _error(x, y, scale)
            worst = max(worst, error)
            if not error <= oracle.RELATIVE.get(y.dtype, 0.0):
                wrong.append(f"call {number}, {name} is off by {error:.2g}")
    return Verdict(worst, played.launches, wrong="; ".join(wrong[:3]))


def _error(actual: torch.Tensor, expected: torch.Tensor, scale: float) -> float:
    """Return the relative error of the norm, like :mod:`tests.support.oracle`.

    The reference is the tensor's norm, or a tenth of the largest norm, because some gradients are zero except for
    rounding. The error is infinite if shape or dtype differ, or if eager's numbers are not finite."""
    if (actual.dtype, actual.shape) != (expected.dtype, expected.shape) or not expected.isfinite().all():
        return float("inf")
    if torch.equal(actual, expected):
        return 0.0
    if not expected.is_floating_point():
        return float("inf")
    return float((actual.double() - expected.double()).norm() / max(float(expected.norm()), 0.1 * scale))
