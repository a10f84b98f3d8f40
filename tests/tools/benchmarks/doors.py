"""Compare every kind of entry, and replay, with eager at several batch sizes: the models of ``make models`` and three
models like the examples.

``module``, ``grad`` and ``replay`` run forward and backward; ``step`` runs a whole step with AdamW. One package has a
dynamic batch, a second one a static batch. Separate processes export and record a model. Then one process per number of
threads measures it: the peers take turns, after their gradients were compared with eager's. If a model or its code
needs at least two rows, the row "1" has two. Results are kept in ``doors/`` of the work folder, one file per model;
``--reuse`` continues from there.
"""

from __future__ import annotations

import contextlib
import json
import statistics
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import Dim

from ...support.zoo import Case
from ..model_table import models
from . import clock, processes
from .programs import Loss, total
from .report import Result, Target

TITLE = "forward and backward, and a whole step with AdamW: microseconds (median), and how many times faster than the best of eager"
PASSES, STEPS = ("module", "grad", "replay"), ("step",)
_DOORS = (*PASSES, *STEPS)
OPTIMIZERS = ("foreach", "fused")
ROWS, FIXED = (1, 16, 256), 16
QUICK = ("mlp", "embedding")
SMALL = 1_000_000
# So small that thousands of steps hardly change the gradients: numbers near zero (denormals) are slow
LEARNING_RATE = 1e-6
_RECORDED = 120  # passes per number of rows, one size after the other, as in a script
_WARM = 40  # warm-up passes: replay times its choices during the first ones


class _Makemore(nn.Module):
    """Predict the next character from the eight before it (Bengio et al., 2003), as in the lectures "makemore"."""

    def __init__(self) -> None:
        super().__init__()
        self.characters, self.hidden, self.out = nn.Embedding(27, 24), nn.Linear(8 * 24, 128), nn.Linear(128, 27)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.hidden(self.characters(x).flatten(1))))


def _example(folder: str, name: str) -> nn.Module:
    import importlib.util

    spec = importlib.util.spec_from_file_location(
        f"examples_{folder}", processes.ROOT / "examples" / folder / "export.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made: nn.Module = getattr(module, name)()
    return made


class _Positions(nn.Module):
    """A force field that makes its own leaf from the positions."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, positions: torch.Tensor, kinds: torch.Tensor) -> Any:
        return self.model(positions.detach().requires_grad_(), kinds)


_OWN: dict[str, Callable[[], Case]] = {
    "digits": lambda: Case(
        _example("digits", "network"), lambda n: (torch.rand(n, 1, 8, 8),), {"input": {0: Dim("batch", min=2)}}
    ),
    "forces": lambda: Case(
        _example("forces", "energy"),
        lambda n: (1.3 * n ** (1 / 3) * torch.rand(n, 3, dtype=torch.float64),),
        {"pos": {0: Dim("atoms", min=2)}},
    ),
    "makemore": lambda: Case(_Makemore(), lambda n: (torch.randint(0, 27, (n, 8)),), {"x": {0: Dim("batch", min=1)}}),
}
NAMES = (*models.NAMES, *_OWN)


class Program:
    """A model with a scalar loss, its arguments by number of rows, and its dynamic dimensions."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(7)
        case = _OWN[name]() if name in _OWN else models.make(name)
        self.model, self._args = case.module.train(), case.args
        if name == "forcefield":
            self.model = _Positions(self.model)
        self.loss = Loss(self.model)
        self.relative = case.relative or 1e-3  # tolerance of the gradients
        dims = case.dynamic_shapes
        self.least = max((dim.min for spec in dims.values() for dim in spec.values()), default=1)
        self.open = {
            a: {d: Dim(dim.__name__, min=dim.min, max=4096) for d, dim in spec.items()} for a, spec in dims.items()
        }

    def args(self, rows: int) -> tuple[torch.Tensor, ...]:
        torch.manual_seed(1)
        return tuple(v.detach() for v in self._args(max(rows, self.least)))

    @property
    def has_step(self) -> bool:
        """Whether a step can be exported. The compiler does not support optimizers of complex parameters."""
        return not any(p.is_complex() for p in self.model.parameters())

    def size(self) -> int:
        return sum(p.numel() for p in self.model.parameters())


_EXPORT = """
import json, sys
import torch
import aot_backward as ab
from tests.tools.benchmarks.doors import export
export(sys.argv[1], sys.argv[2], sys.argv[3])
print(json.dumps({}))
"""


def export(name: str, path: str, kind: str) -> None:
    """Write the package of ``kind`` "open", "fixed" or "recorded". Runs in a separate process."""
    import aot_backward as ab

    program = Program(name)
    if kind == "recorded":
        with ab.record(path) as recording:
            for rows in ROWS:
                args = program.args(rows)
                for _ in range(_RECORDED):
                    program.loss.zero_grad()
                    program.loss(*args).backward()
        if recording.skipped:
            raise RuntimeError(f"{name}: {recording.skipped}")
        return
    args = program.args(FIXED)
    of_model, of_loss = (program.open, (tuple(program.open.values()),)) if kind == "open" else (None, None)
    entries: dict[str, ab.Module | ab.Grad | ab.Step] = {
        "module": ab.Module(program.model, [ab.Variant(args, dynamic_shapes=of_model)]),
        "grad": ab.Grad(program.loss, [ab.Variant(args, dynamic_shapes=of_loss)]),
    }
    if program.has_step:
        optimizer = torch.optim.AdamW(program.loss.parameters(), lr=LEARNING_RATE)
        entries["step"] = ab.Step(program.loss, [ab.Variant(args, dynamic_shapes=of_loss)], optimizer)
    ab.export(path, entries)


def serve(spec: dict[str, Any]) -> Callable[[dict[str, Any]], Any]:
    """Answer requests in the measuring process: {"rows": n, "rounds": n, "seconds": s}."""
    import aot_backward_runtime
    from aot_backward_runtime.errors import InputError

    name, packages = spec["model"], spec["packages"]
    program = Program(name)
    parameters = list(program.loss.parameters())
    eager_steps = {kind: _eager_step(Program(name), kind) for kind in OPTIMIZERS} if program.has_step else {}
    loaded = {kind: aot_backward_runtime.load(packages[kind]) for kind in ("open", "fixed")}
    modules = {kind: p.module("module").train() for kind, p in loaded.items()}
    grads = {kind: p.grad("grad") for kind, p in loaded.items()}
    # A step trains its own weights
    steps = {kind: aot_backward_runtime.load(packages[kind]).step("step") for kind in loaded if program.has_step}

    def eager(args: tuple[torch.Tensor, ...]) -> None:
        for p in parameters:
            p.grad = None
        program.loss(*args).backward()

    def through(module: nn.Module) -> Callable[[tuple[torch.Tensor, ...]], None]:
        leaves = list(module.parameters())

        def call(args: tuple[torch.Tensor, ...]) -> None:
            for p in leaves:
                p.grad = None
            total(module(*args)).backward()

        return call

    def replayed() -> Any:
        """Return a replay, or a null context if the recording kept nothing because eager was as fast."""
        recorded = Path(packages["recorded"])
        return aot_backward_runtime.replay(recorded) if recorded.exists() else contextlib.nullcontext()

    def check(args: tuple[torch.Tensor, ...], kinds: Iterable[str]) -> None:
        torch.manual_seed(3)
        eager(args)
        expected = {n: p.grad for n, p in program.model.named_parameters()}
        found: dict[str, dict[str, Any]] = {}
        for kind in kinds:
            torch.manual_seed(3)
            through(modules[kind])(args)
            found[f"module, {kind}"] = {n: p.grad for n, p in modules[kind].named_parameters()}
            torch.manual_seed(3)
            gradients = grads[kind](*args)[1]
            found[f"grad, {kind}"] = {n: gradients.get(f"model.{n}") for n in expected}
        with replayed():
            torch.manual_seed(3)
            eager(args)
            found["replay"] = {n: p.grad for n, p in program.model.named_parameters()}
        largest = max(float(e.norm()) for e in expected.values() if e is not None)
        for door, gradients in found.items():
            for n, e in expected.items():
                g = gradients[n]
                if (
                    e is not None
                    and g is not None
                    and float((g - e).norm()) <= program.relative * max(float(e.norm()), 0.1 * largest)
                ):
                    continue
                if e is not None or g is not None:
                    raise RuntimeError(f"{name}, {door}: the gradient of {n} differs from eager's")

    def answer(request: dict[str, Any]) -> Any:
        args, seconds, rounds = program.args(request["rows"]), request["seconds"], request["rounds"]
        kinds = ("open", "fixed") if request["rows"] == FIXED else ("open",)
        try:
            check(args, kinds)
        except InputError:  # the export found that the code needs at least two rows
            args = program.args(request["rows"] + 1)
            check(args, kinds)
        within: dict[str, tuple[Callable[[], Any], Callable[[], Any] | None]] = {"eager": (partial(eager, args), None)}
        for kind in kinds:
            within[f"module {kind}"] = (partial(through(modules[kind]), args), None)
            within[f"grad {kind}"] = (partial(grads[kind], *args), None)
            if kind in steps:
                within[f"step {kind}"] = (partial(steps[kind], *args), None)
        within["replay open"] = (partial(eager, args), replayed)
        for kind, call in eager_steps.items():
            within[kind] = (partial(call, args), None)
        counts = {p: clock.batch_size(call) for p, (call, _) in within.items()}
        peers = {p: partial(_samples, call, context, counts[p], seconds) for p, (call, context) in within.items()}
        return {p: clock.summary(s) for p, s in clock.interleaved(peers, rounds).items()}

    return answer


def _samples(call: Callable[[], Any], context: Callable[[], Any] | None, count: int, seconds: float) -> list[float]:
    if context is None:
        call()
        return clock.samples(call, count, seconds)
    with context():
        for _ in range(_WARM):
            call()
        return clock.samples(call, count, seconds)


def _eager_step(program: Program, kind: str) -> Callable[[tuple[torch.Tensor, ...]], Any]:
    optimizer = torch.optim.AdamW(
        program.loss.parameters(), lr=LEARNING_RATE, fused=kind == "fused", foreach=kind == "foreach"
    )

    def step(args: tuple[torch.Tensor, ...]) -> Any:
        optimizer.zero_grad()
        value = program.loss(*args)
        value.backward()
        optimizer.step()
        return value

    return step


def measure(quick: bool, threads: list[int]) -> Result:
    columns = [
        "model",
        "parameters",
        "rows",
        "threads",
        "eager",
        "module",
        "grad",
        "replay",
        "foreach",
        "fused",
        "step",
    ]
    result = Result("doors", TITLE, [*columns, *(f"{d} x" for d in _DOORS)])
    kept = processes.WORK / "doors"
    kept.mkdir(parents=True, exist_ok=True)
    for name in QUICK if quick else NAMES:
        path = kept / f"{name}.json"
        found = json.loads(path.read_text()) if processes.REUSE and path.exists() else None
        if found is None or found["threads"] != threads or found["quick"] != quick:
            try:
                found = {"threads": threads, "quick": quick, "rows": list(_measured(name, quick, threads))}
            except RuntimeError as error:
                result.notes.append(f"{name} was not measured: {str(error).strip().splitlines()[-1]}")
                continue
            path.write_text(json.dumps(found, indent=1) + "\n")
        for row in found["rows"]:
            _add(result, row)
    _conclude(result)
    return result


def _packages(name: str) -> dict[str, Path]:
    out = {kind: processes.package(f"doors-{name}-{kind}") for kind in ("open", "fixed", "recorded")}
    for kind, path in out.items():
        if not (processes.REUSE and path.exists()):
            path.unlink(missing_ok=True)
            processes.run(_EXPORT, name, path, kind, threads=1)
    return out


def _measured(name: str, quick: bool, threads: list[int]) -> Iterator[dict[str, Any]]:
    packages = {kind: str(path) for kind, path in _packages(name).items()}
    parameters = Program(name).size()
    for count in threads:
        peer = processes.Peer(__name__, {"model": name, "packages": packages}, threads=count)
        for rows in (FIXED,) if quick else ROWS:
            times = peer.ask(rows=rows, rounds=1 if quick else 3, seconds=0.01 if quick else 0.04)
            yield {"model": name, "parameters": parameters, "rows": rows, "threads": count, "times": times}
        peer.close()


def ratios(row: dict[str, Any]) -> dict[str, float]:
    """Return how many times faster than the best eager peer each kind of entry is, with the better of its packages."""
    median = {p: t["median_s"] for p, t in row["times"].items()}
    best = {
        **dict.fromkeys(PASSES, median["eager"]),
        **dict.fromkeys(STEPS, min((median[p] for p in OPTIMIZERS if p in median), default=0.0)),
    }
    ours = {door: [t for p, t in median.items() if p in (f"{door} open", f"{door} fixed")] for door in best}
    return {door: best[door] / min(times) for door, times in ours.items() if times}


def _add(result: Result, row: dict[str, Any]) -> None:
    median, of = {p: t["median_s"] for p, t in row["times"].items()}, ratios(row)
    peers = ("eager", "module open", "grad open", "replay open", *OPTIMIZERS, "step open")
    times = [f"{1e6 * median[p]:.0f}" if p in median else "-" for p in peers]
    faster = [f"{of[d]:.2f}" if d in of else "-" for d in _DOORS]
    result.rows.append([row["model"], *(str(row[c]) for c in ("parameters", "rows", "threads")), *times, *faster])
    result.data.append(row)


def _conclude(result: Result) -> None:
    found = [(row, ratios(row)) for row in result.data]
    for door in _DOORS:
        of = [(row, r[door]) for row, r in found if door in r]
        row, worst = min(of, key=lambda pair: pair[1])
        slower = sum(r < 0.97 for _, r in of)
        where = f"{worst:.2f} at worst ({row['model']}, {row['rows']} rows, {row['threads']} threads); below in {slower} of {len(of)}"
        result.targets.append(
            Target(f"{door}: no row under 0.97 of the best of eager", where, worst >= 0.97, f"{0.97 - worst:.2f}")
        )
        mean = statistics.geometric_mean(r for row, r in of if row["parameters"] < SMALL)
        result.notes.append(
            f"{door}: {mean:.2f} times the best of eager in the geometric mean of models under a million parameters"
        )
        if door == "module":
            asked = "module 1.5 times eager, geometric mean, models under a million parameters"
            result.targets.append(Target(asked, f"{mean:.2f}", mean >= 1.5, f"{1.5 - mean:.2f}"))
        static = [
            row["times"][f"{door} open"]["median_s"] / row["times"][f"{door} fixed"]["median_s"]
            for row, _ in of
            if f"{door} fixed" in row["times"]
        ]
        if static:
            mean, most = statistics.geometric_mean(static), max(static)
            result.notes.append(
                f"{door}, {FIXED} rows: a dynamic batch takes {mean:.2f} times as long as a static one; {most:.2f} at most"
            )
    for rows in sorted({row["rows"] for row, _ in found}):
        some = [r for row, r in found if row["rows"] == rows]
        means = (f"{d} {statistics.geometric_mean(r[d] for r in some if d in r):.2f}" for d in _DOORS)
        result.notes.append(f"{rows} rows: {', '.join(means)}")
