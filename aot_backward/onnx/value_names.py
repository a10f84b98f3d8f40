"""Name the inputs and outputs of an entry's ONNX graphs after the program's arguments, parameters and results."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

from aot_backward_exporters.onnx.model import Names, NumberInput, labelled
from aot_backward_runtime.errors import ExportError
from aot_backward_runtime.format.manifest import EntrySpec, Plan, StepSpec, Tree, VariantSpec

from .arguments import NUMBERS, argument_names, constant_names, free_name, number_name

ROLES = ("forward", "backward", "inference", "gradient", "step", "accumulate")


@dataclass(frozen=True)
class Part:
    """One ONNX graph of an entry, made from one plan. ``file``: the suffix of the file's name: "backward", or
    nothing."""

    entry: str
    variant: int
    role: str
    plan: Plan
    names: Names
    about: dict[str, str]
    library: str

    @property
    def file(self) -> str:
        return self.role if self.role not in ("gradient", "step") else ""


def parts(name: str, entry: EntrySpec, number: int) -> list[Part]:
    """Return the graphs of variant ``number`` of the entry. A step that can accumulate gradients also has the optimizer
    alone."""
    variant = entry.variants[number]
    plans = [(role, plan) for role in ROLES if (plan := getattr(variant, role)) is not None]
    if entry.step is not None and entry.step.update is not None:
        plans.append(("update", entry.step.update))
    out = []
    for role, plan in plans:
        if plan.call is None:
            if role == "forward" or role == "gradient":
                raise ExportError(f"{name}: the {role} only returns its inputs: there is no graph to write")
            continue
        out.append(
            Part(
                name,
                number,
                role,
                plan,
                _names(entry, variant, role, plan),
                _about(name, entry, number, role),
                plan.call.library,
            )
        )
    return out


def _names(entry: EntrySpec, variant: VariantSpec, role: str, plan: Plan) -> Names:
    constants = constant_names(entry)
    vector = next((s.weight for s in entry.state if s.name == NUMBERS), "") if entry.step is not None else ""
    numbers = _numbers(entry.step) if entry.step is not None else ()
    symbols = {s.name: s.label for s in variant.symbols}
    arguments = argument_names(entry, variant)
    used_names = {*constants.values(), *(n.name for n in numbers), *arguments}
    output_names = [free_name(name, "output", used_names) for name in _results(variant, entry.kind)]
    assert plan.call is not None
    saved = _saved_names(variant, arguments)
    inputs = []
    for operand in plan.call.operands:
        kind, _, key = operand.partition(":")
        if kind == "input":
            inputs.append(arguments[int(key)])
        elif kind == "saved":
            inputs.append(saved[int(key)])
        elif kind == "cotangent":
            inputs.append(f"grad.{output_names[variant.differentiable[int(key)]]}")
        else:
            inputs.append(f"size.{labelled(key, symbols)}".replace(" ", ""))
    by_name = {s.name: s.weight for s in entry.state}
    outputs: list[tuple[str, str]] = []
    if plan.outputs:
        for name, source, spec in zip(output_names, plan.outputs, variant.outputs, strict=True):
            if not source.startswith("result:") and spec.requires_grad and role == "forward":
                raise ExportError(
                    f"{name} is an unchanged input or parameter, and its incoming gradient would bypass the graph: return a copy (.clone())"
                )
        sources = [(n, _source(source, plan, by_name)) for n, source in zip(output_names, plan.outputs, strict=True)]
        outputs += [(n, source) for n, source in sources if source]
    if role == "forward":
        outputs += [(f"saved.{i}", s) for i, s in enumerate(plan.saved) if s.startswith("result:")]
    for gradient in plan.gradients:
        if gradient.source:
            kind, _, key = gradient.of.partition(":")
            outputs.append((f"grad.{key if kind == 'parameter' else arguments[int(key)]}", gradient.source))
    if entry.step is not None and role in ("step", "update"):
        last = max((int(s.partition(":")[2]) for s in plan.outputs if s.startswith("result:")), default=-1)
        for enabled, output in ((entry.step.norm, "grad_norm"), (entry.step.finite, "finite")):
            if enabled:
                last += 1
                outputs.append((output, f"result:{last}"))
        outputs.append((f"updated.{numbers[1].name}", "first:finite" if entry.step.finite else "first:"))
    if len(set(inputs)) != len(inputs) or len({n for n, _ in outputs}) != len(outputs):
        raise ExportError(
            f"two inputs or two outputs would have the same name: {sorted([*inputs, *(n for n, _ in outputs)])}; rename an argument or a result"
        )
    return Names(tuple(inputs), constants, tuple(outputs), vector, numbers, symbols)


def _source(source: str, plan: Plan, weights: Mapping[str, str]) -> str:
    """Return ``source`` in the form of :class:`Names`: inputs by their place among the graph's own, "" for other
    inputs."""
    kind, _, key = source.partition(":")
    if kind == "parameter":
        return f"constant:{weights[key]}"
    if kind == "input":
        assert plan.call is not None
        if source not in plan.call.operands:
            return ""  # the graph does not read this argument, which is returned unchanged: the caller has it
        return f"input:{plan.call.operands.index(source)}"
    return source


def _saved_names(variant: VariantSpec, arguments: list[str]) -> list[str]:
    """Return the names of a backward's saved tensors. A saved argument keeps the argument's name, so that it is passed
    once."""
    saved = variant.forward.saved if variant.forward is not None else ()
    return [
        arguments[int(s.partition(":")[2])] if s.startswith("input:") else f"saved.{i}" for i, s in enumerate(saved)
    ]


def _results(variant: VariantSpec, kind: str) -> list[str]:
    """Return the names of the flat output tensors: ``output``, ``output.0``, the keys of a dict; a loss is ``loss``."""
    leaves = dict(_leaves(variant.out_tree, ""))
    names = [leaves[i] or "output" for i in range(len(variant.outputs))]
    names = [f"output.{n}" if n[0].isdigit() else n for n in names]
    if kind in ("grad", "step") and names[0] in ("output", "output.0"):
        names[0] = "loss"
    return names


def _leaves(tree: Tree, path: str) -> Iterator[tuple[int, str]]:
    if tree.kind == "tensor":
        yield tree.index, path
    keys = tree.keys or range(len(tree.children))
    for key, child in zip(keys, tree.children, strict=True):
        yield from _leaves(child, f"{path}.{key}" if path else str(key))


def _numbers(step: StepSpec) -> tuple[NumberInput, ...]:
    return (
        NumberInput("optimizer.accumulate", 0.0),
        NumberInput("optimizer.first", float(step.fresh)),
        *(NumberInput(number_name(n), n.value) for n in step.numbers),
    )


def _about(name: str, entry: EntrySpec, number: int, role: str) -> dict[str, str]:
    """Return ``metadata_props``: a description of the graph, and the sizes and numbers that it is valid for."""
    variant = entry.variants[number]
    out = {"entry": name, "kind": entry.kind, "variant": str(number), "graph": role}
    if variant.mode:
        out["mode"] = variant.mode
    if variant.symbols:
        out["dimensions"] = json.dumps({s.label: {"minimum": s.minimum, "maximum": s.maximum} for s in variant.symbols})
    labels = {s.name: s.label for s in variant.symbols}
    if variant.guards:
        out["guards"] = json.dumps([labelled(g, labels) for g in variant.guards])
    if variant.double is not None:
        out["left out"] = "gradients of gradients"
    if variant.ambient.autocast:
        out["autocast"] = variant.ambient.autocast
    if entry.step is not None:
        out["optimizer"] = entry.step.optimizer
        limits = {number_name(n): [asdict(i) for i in n.allowed] for n in entry.step.numbers if n.allowed}
        if limits:
            out["allowed"] = json.dumps(limits)
    missing = [
        g.of
        for plan in (variant.backward, variant.gradient)
        if plan is not None
        for g in plan.gradients
        if not g.source
    ]
    if missing:
        out["no gradient"] = json.dumps(missing)
    return out
