"""Observed optimizer steps -> compiled updates: traced, compiled, compared with eager's step, and timed beside it."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from aot_backward_exporters.graph import Artifact, Graph
from aot_backward_exporters.inductor import compile, targets
from aot_backward_exporters.portable import graph_json
from aot_backward_exporters.progress import Progress
from aot_backward_runtime.compatibility import processor_name
from aot_backward_runtime.errors import AotBackwardError, ExportError
from aot_backward_runtime.format.manifest import Speed, StateSlot, TensorSpec, Timing, UpdateSpec, Verdict
from aot_backward_runtime.native.cuda_library import library_on
from aot_backward_runtime.native.library import Library
from aot_backward_runtime.optimizer_steps.compiled_update import CompiledUpdate
from aot_backward_runtime.optimizer_steps.update_table import UpdateTable
from aot_backward_runtime.package.update_checks import operand_names, result_name

from ...capture import fx_graph
from ...capture.fx_graph import call
from ...capture.step import optimizer_graph
from ...capture.step.optimizer_spec import OptimizerSpec, Settings, inspect_optimizer
from ...checks import stopwatch
from ...checks.tolerance import Tolerance, compare
from ...packaging.package_writer import library_spec
from ...packaging.tuning import SECONDS, TIE
from ..infer_shapes import fake_mode
from .observed_steps import ObservedStep, ObservedSteps, copied

log = logging.getLogger("aot_backward")
_STEPS = 3  # that are compared
_PREFIX = "update"


@dataclass
class CompiledStep:
    """One kind of step, ready for the package."""

    spec: UpdateSpec
    graph: Graph
    artifact: Artifact
    portable: bytes | None


@dataclass
class _Traced:
    kind: ObservedStep
    spec: UpdateSpec
    graph: Graph
    reduced_precision: bool


def compile_steps(observed: ObservedSteps, folder: Path, target: str, say: Progress, tune: str, skipped: Counter[str]) -> Iterator[CompiledStep]:
    """Those that came more than once. What cannot be compiled, or is not what eager makes, is left out, with the reason in ``skipped``."""
    mode = fake_mode()
    traced: list[_Traced] = []
    kinds = observed.repeated
    for done, (digest, kind) in enumerate(kinds.items()):
        say("trace optimizer steps", done, len(kinds))
        with _left_out(kind, skipped):
            traced.append(_traced(f"{_PREFIX}.{digest[:12]}", kind, mode))
    if not traced:
        return
    artifacts = _artifacts(traced, folder, mode, target, say, skipped)
    for done, step in enumerate(traced):
        say("check optimizer steps", done, len(traced))
        if step.spec.library in artifacts:
            with _left_out(step.kind, skipped):
                yield _finished(step, artifacts[step.spec.library], target, tune)
    say("check optimizer steps", len(traced), len(traced))


@contextlib.contextmanager
def _left_out(kind: ObservedStep, skipped: Counter[str]) -> Iterator[None]:
    """What is raised inside is the reason why ``kind`` is left out."""
    try:
        yield
    except (AotBackwardError, RuntimeError) as error:
        skipped[f"the optimizer step of {kind.name.rpartition('.')[2]}, called at {kind.line}: {str(error).partition(chr(10))[0]}"] += 1


def _artifacts(traced: Sequence[_Traced], folder: Path, mode: Any, target: str, say: Progress, skipped: Counter[str]) -> dict[str, Artifact]:
    """All graphs at once, by name; where the compiler refuses one, each alone."""
    (together := folder / _PREFIX).mkdir()
    name = targets.parsed(target)[0]
    try:
        return compile.compile_graphs([t.graph for t in traced], folder=together, fake_mode=mode, target=name, progress=say)
    except ExportError:
        found: dict[str, Artifact] = {}
        for step in traced:
            (alone := folder / step.graph.name).mkdir()
            with _left_out(step.kind, skipped):
                found |= compile.compile_graphs([step.graph], folder=alone, fake_mode=mode, target=name, progress=say)
        return found


def _traced(name: str, kind: ObservedStep, mode: Any) -> _Traced:
    example = kind.example
    assert example is not None
    optimized = _inspected(example)
    parameters = {optimized.names[id(p)]: p for g in example.param_groups for p in g["params"]}
    trained = [parameters[n] for n in optimized.trained]
    with mode:
        fake = [mode.from_tensor(p.detach()) for p in trained]
        gradients = [mode.from_tensor(p.grad) for p in trained]
    update = optimizer_graph.trace(optimized, gradients, fake, mode, Settings())
    spec = UpdateSpec(
        optimizer=optimized.name,
        groups=optimized.groups,
        numbers=update.allowed,
        trained=optimized.trained,
        state=tuple(StateSlot(s.key, s.parameters[0]) for s in optimized.slots),
        library=name,
        verdict=Verdict("not run"),
    )
    graph = dataclasses.replace(_in_place(update.graph, spec, mode), round_as_eager=update.reduced_precision)
    return _Traced(kind, spec, graph, update.reduced_precision)


def _finished(step: _Traced, artifact: Artifact, target: str, tune: str) -> CompiledStep:
    """The step checked and timed, and its graph as data."""
    example = step.kind.example
    assert example is not None
    library = library_on(torch.device("cpu"), lambda: artifact.library, library_spec(step.graph, artifact))
    spec = _checked(step.spec, library, example, reduced_precision=step.reduced_precision)
    if tune != "none":
        spec = dataclasses.replace(spec, speed=_speed(spec, library, example, tune, target))
    portable = None
    with contextlib.suppress(ExportError):  # without the graph as data the package works, and cannot be rebuilt
        portable = graph_json.graph_to_bytes(step.graph, int, {})
    return CompiledStep(spec, step.graph, artifact, portable)


def _inspected(example: torch.optim.Optimizer) -> OptimizerSpec:
    """Parameters are called by their group and place. Each has a count of its own steps, where a step of an exported program shares one."""
    names = {id(p): f"{g}.{i}" for g, group in enumerate(example.param_groups) for i, p in enumerate(group["params"])}
    with_gradient = {names[id(p)] for group in example.param_groups for p in group["params"] if p.grad is not None}
    optimized = inspect_optimizer(example, names, with_gradient.__contains__)
    by_name = {names[id(p)]: p for group in example.param_groups for p in group["params"]}
    slots = []
    for slot in optimized.slots:
        for parameter in slot.parameters:
            value = example.state.get(by_name[parameter], {}).get(slot.key)
            if value is None:
                raise ExportError(f"its first step makes state[…][{slot.key!r}]")
            slots.append(dataclasses.replace(slot, parameters=(parameter,), value=value, starts_as=-1))
    order = {name: i for i, name in enumerate(optimized.trained)}
    slots.sort(key=lambda s: order[s.parameters[0]])
    return dataclasses.replace(optimized, slots=tuple(slots), fresh=False)


def _in_place(module: torch.fx.GraphModule, spec: UpdateSpec, mode: Any) -> Graph:
    """``module``, which returns new parameters and state, as a graph that writes them to where the old ones are."""
    placeholders = list(module.graph.find_nodes(op="placeholder"))
    count = len(spec.trained)
    written = placeholders[count:-1]
    results = fx_graph.results_of(module)
    if results and isinstance(results[0], (list, tuple)):
        results = [node for part in results for node in part]
    with module.graph.inserting_before(fx_graph.output_of(module.graph)), mode:
        for target, new in zip(written, results, strict=True):
            if new is not target:
                call(module.graph, torch.ops.aten.copy_.default, target, new)
        one = call(module.graph, torch.ops.aten.select.int, placeholders[-1], 0, 0)
        result = call(module.graph, torch.ops.aten.clone.default, one)
    output = fx_graph.output_of(module.graph)
    output.args, output.meta = ((result,),), {}
    module.graph.lint()
    module.recompile()
    inputs = tuple(_spec(name, node.meta["val"]) for name, node in zip(operand_names(spec), placeholders, strict=True))
    count = sum(1 for n in module.graph.nodes if n.op == "call_function")
    return Graph(spec.library, module, inputs, (_spec(result_name(spec), result.meta["val"]),), {}, count)


def _spec(name: str, value: torch.Tensor) -> TensorSpec:
    shape, stride = tuple(map(int, value.shape)), tuple(map(int, value.stride()))
    return TensorSpec(name, str(value.dtype).removeprefix("torch."), value.device.type, shape, stride)


def _checked(spec: UpdateSpec, library: Library, example: torch.optim.Optimizer, *, reduced_precision: bool) -> UpdateSpec:
    """``spec`` with its verdict: a few steps beside eager's, each from what eager's left; :class:`ExportError` where a change is another one."""
    eager, ours = copied(example), copied(example)
    update = CompiledUpdate(spec, library)
    worst, name = 0.0, ""
    for _ in range(_STEPS):
        before = [(n, t.clone()) for n, t in _tensors(ours, spec)]
        type(eager).step(eager)
        update.bind(ours).run(ours)
        for (label, old), (_, found), (_, wanted) in zip(before, _tensors(ours, spec), _tensors(eager, spec), strict=True):
            if not wanted.is_floating_point():
                if not torch.equal(found, wanted):
                    raise ExportError(f"{label} is not what eager's step makes of it")
                continue
            stored = float(torch.linalg.vector_norm(wanted.double()))
            tolerance = Tolerance.of_change(wanted.dtype, stored, None, 0.0, reduced_precision=reduced_precision)
            ratio = compare(label, found.double() - old.double(), wanted.double() - old.double(), tolerance).ratio
            if not ratio <= 1:
                raise ExportError(f"{label} is wrong: {ratio:.3g} times what is allowed off eager's step")
            if ratio >= worst:
                worst, name = ratio, label
            with torch.no_grad():
                found.copy_(wanted)
    return dataclasses.replace(spec, verdict=Verdict("verified", name, round(worst, 6)))


def _tensors(optimizer: torch.optim.Optimizer, spec: UpdateSpec) -> list[tuple[str, torch.Tensor]]:
    """What a step writes, by name: parameters, then state."""
    by_name = {f"{g}.{i}": p for g, group in enumerate(optimizer.param_groups) for i, p in enumerate(group["params"])}
    names = operand_names(spec)[len(spec.trained) : -1]
    found = [by_name[n].detach() for n in spec.trained] + [optimizer.state[by_name[s.parameter]][s.key] for s in spec.state]
    return list(zip(names, found, strict=True))


def _speed(spec: UpdateSpec, library: Library, example: torch.optim.Optimizer, tune: str, target: str) -> Speed | None:
    """Whole steps, each as a script calls it, on copies: eager's with the flags that the script gave it."""
    eager, ours = copied(example), copied(example)
    table = UpdateTable([CompiledUpdate(spec, library)])
    compiled = torch.optim.Optimizer.profile_hook_step(table.run)
    try:
        with stopwatch.on_free_processors() as (threads, others):
            times = stopwatch.microseconds({"eager": lambda: type(eager).step(eager), "compiled": lambda: compiled(ours)}, SECONDS[tune])
    except RuntimeError as error:  # no reason to lose a step that is right
        log.info("%s could not be timed: %s", spec.library, error)
        return None
    return Speed(
        chosen="compiled" if times["compiled"] < TIE * times["eager"] else "eager",
        timings=tuple(Timing(name, (round(microseconds, 1),)) for name, microseconds in times.items()),
        sizes=("",),
        threads=threads,
        processor=processor_name(),
        tune=tune,
        target=target,
        torch=torch.__version__,
        others=others,
    )


def slower(spec: UpdateSpec) -> Iterator[str]:
    """In words, where the compiled step is not faster."""
    if spec.speed is not None and spec.speed.chosen == "eager":
        times: Mapping[str, float] = spec.speed.means
        yield f"the optimizer step of {spec.optimizer.rpartition('.')[2]}: eager {times['eager']:,.0f} µs, compiled {times['compiled']:,.0f} µs"
