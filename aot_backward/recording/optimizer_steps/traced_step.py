"""Trace a kind of optimizer steps as a graph that writes parameters and state in place, compare its code with eager,
and time it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any

import torch

from aot_backward_exporters.graph import Graph
from aot_backward_runtime.errors import ExportError
from aot_backward_runtime.format.manifest import Speed, StateSlot, UpdateSpec, Verdict
from aot_backward_runtime.native.library import Library
from aot_backward_runtime.optimizer_steps.compiled_table import CompiledTable, Met
from aot_backward_runtime.optimizer_steps.compiled_update import CompiledUpdate
from aot_backward_runtime.optimizer_steps.interception import step_of

from ...capture import fx_graph
from ...capture.fx_graph import call
from ...capture.step import optimizer_graph
from ...capture.step.optimizer_spec import OptimizerSpec, Settings, inspect_optimizer
from ...checks.tolerance import Tolerance, compare
from .in_place_graph import in_place_graph, timed
from .observed_steps import ObservedStep, copied

_STEPS_COMPARED = 3  # steps that are compared, as many as of an exported step (checks/step_check.py)


class TracedStep:
    """``graph`` and ``spec`` of a kind of steps, called ``name``. Raise :class:`ExportError` if a graph cannot express
    it."""

    def __init__(self, name: str, kind: ObservedStep, mode: Any):
        assert kind.example is not None
        self._example = kind.example
        self.words = kind.words
        optimized = _inspected(self._example)
        parameters = {optimized.names[id(p)]: p for g in self._example.param_groups for p in g["params"]}
        trained_parameters = [parameters[n] for n in optimized.trained]
        with mode:
            fake = [mode.from_tensor(p.detach()) for p in trained_parameters]
            gradients = [mode.from_tensor(p.grad) for p in trained_parameters]
        update = optimizer_graph.trace(optimized, gradients, fake, mode, Settings())
        self.spec = UpdateSpec(
            optimizer=optimized.name,
            groups=optimized.groups,
            numbers=update.allowed,
            trained=optimized.trained,
            state=tuple(StateSlot(s.key, s.parameters[0]) for s in optimized.slots),
            library=name,
            verdict=Verdict("not run"),
        )
        self._reduced_precision = update.reduced_precision
        self.graph = _in_place(update.graph, self.spec, mode)

    def finished(self, library: Library, tune: str, target: str) -> UpdateSpec:
        """Return the spec with its verdict and times. Raise :class:`ExportError` if ``library`` differs from eager."""
        spec = _checked(self.spec, library, self._example, reduced_precision=self._reduced_precision)
        return (
            spec
            if tune == "none"
            else dataclasses.replace(spec, speed=_speed(spec, library, self._example, tune, target))
        )


def _inspected(example: torch.optim.Optimizer) -> OptimizerSpec:
    """Inspect the optimizer. Parameters are named by group and place. Each has its own step count; a step of an
    exported program shares one."""
    names = {id(p): f"{g}.{i}" for g, group in enumerate(example.param_groups) for i, p in enumerate(group["params"])}
    with_gradient = {names[id(p)] for group in example.param_groups for p in group["params"] if p.grad is not None}
    optimized = inspect_optimizer(example, names, with_gradient.__contains__)
    by_name = {names[id(p)]: p for group in example.param_groups for p in group["params"]}
    slots = []
    for slot in optimized.slots:
        for parameter in slot.parameters:
            value = example.state.get(by_name[parameter], {}).get(slot.key)
            if value is None:
                raise ExportError(f"its first step creates state[…][{slot.key!r}]")
            slots.append(dataclasses.replace(slot, parameters=(parameter,), value=value, starts_as=-1))
    order = {name: i for i, name in enumerate(optimized.trained)}
    slots.sort(key=lambda s: order[s.parameters[0]])
    return dataclasses.replace(optimized, slots=tuple(slots), fresh=False)


def _in_place(module: torch.fx.GraphModule, spec: UpdateSpec, mode: Any) -> Graph:
    """Return ``module``, which returns new parameters and state, as a graph that overwrites the old ones."""
    results = fx_graph.results_of(module)
    if results and isinstance(results[0], (list, tuple)):
        results = [node for part in results for node in part]
    placeholders = list(module.graph.find_nodes(op="placeholder"))
    with module.graph.inserting_before(fx_graph.output_of(module.graph)), mode:
        element = call(module.graph, torch.ops.aten.select.int, placeholders[-1], 0, 0)
        result = call(module.graph, torch.ops.aten.clone.default, element)
    targets = placeholders[len(spec.trained) : -1]
    return in_place_graph(
        spec.library, module, targets, results, result, _operand_names(spec), _result_name(spec), mode
    )


def _operand_names(spec: UpdateSpec) -> list[str]:
    """Return the names of the library's inputs, in order: gradients, parameters, state, numbers."""
    place = {
        p: f"param_groups[{g}]['params'][{i}]"
        for g, group in enumerate(spec.groups)
        for i, p in enumerate(group.parameters)
    }
    parameters = [place[p] for p in spec.trained]
    return [
        *(f"{p}.grad" for p in parameters),
        *parameters,
        *(f"state[{place[s.parameter]}][{s.key!r}]" for s in spec.state),
        "numbers",
    ]


def _result_name(spec: UpdateSpec) -> str:
    """Return the name of the library's result. Readers of formats 1.11 to 1.14 compare this digest."""
    fields = [
        spec.optimizer,
        spec.trained,
        [*map(dataclasses.astuple, spec.groups), *map(dataclasses.astuple, spec.numbers)],
    ]
    return f"step {hashlib.sha256(json.dumps(fields).encode()).hexdigest()[:16]}"


def _checked(
    spec: UpdateSpec, library: Library, example: torch.optim.Optimizer, *, reduced_precision: bool
) -> UpdateSpec:
    """Return ``spec`` with its verdict: compare a few steps, each from eager's state. Raise :class:`ExportError` if a
    change differs from eager's."""
    eager, compiled = copied(example), copied(example)
    update = CompiledUpdate(spec, library)
    worst, name = 0.0, ""
    for _ in range(_STEPS_COMPARED):
        before = [(n, t.clone()) for n, t in _tensors(compiled, spec)]
        step_of(eager)(eager)
        update.bind(compiled).run(compiled)
        for (label, old), (_, actual), (_, expected) in zip(
            before, _tensors(compiled, spec), _tensors(eager, spec), strict=True
        ):
            if not expected.is_floating_point():
                if not torch.equal(actual, expected):
                    raise ExportError(f"{label} differs from eager's step")
                continue
            stored = float(torch.linalg.vector_norm(expected.double()))
            tolerance = Tolerance.of_change(expected.dtype, stored, None, 0.0, reduced_precision=reduced_precision)
            ratio = compare(label, actual.double() - old.double(), expected.double() - old.double(), tolerance).ratio
            if not ratio <= 1:
                raise ExportError(f"{label} is wrong: it differs from eager's step by {ratio:.3g} times the tolerance")
            if ratio >= worst:
                worst, name = ratio, label
            with torch.no_grad():
                actual.copy_(expected)
    return dataclasses.replace(spec, verdict=Verdict("verified", name, round(worst, 6)))


def _tensors(optimizer: torch.optim.Optimizer, spec: UpdateSpec) -> list[tuple[str, torch.Tensor]]:
    """Return the tensors that a step writes, by name: parameters, then state."""
    by_name = {f"{g}.{i}": p for g, group in enumerate(optimizer.param_groups) for i, p in enumerate(group["params"])}
    names = _operand_names(spec)[len(spec.trained) : -1]
    tensors = [by_name[n].detach() for n in spec.trained] + [
        optimizer.state[by_name[s.parameter]][s.key] for s in spec.state
    ]
    return list(zip(names, tensors, strict=True))


def _speed(spec: UpdateSpec, library: Library, example: torch.optim.Optimizer, tune: str, target: str) -> Speed | None:
    """Time whole steps on copies, each as a script calls it. Eager's keep the flags that the script set."""
    eager, compiled = copied(example), copied(example)
    table, met = CompiledTable([(spec.optimizer, CompiledUpdate(spec, library))]), Met(spec.optimizer)
    ways = {"eager": lambda: step_of(eager)(eager), "compiled": lambda: table.run(met, compiled)}
    return timed(spec.library, ways, tune, target)
