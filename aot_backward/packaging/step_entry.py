"""Capture and compile a ``step`` entry, and prepare its check."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from aot_backward_exporters.graph import Graph
from aot_backward_exporters.sixteen_bits import computes_in_16_bits
from aot_backward_runtime.entries.named_tensors import state_of
from aot_backward_runtime.errors import ExportError
from aot_backward_runtime.format.manifest import EntrySpec, StateSpec, SymbolSpec, VariantSpec, Verdict
from aot_backward_runtime.loader import Package

from ..capture import partition
from ..capture.step import optimizer_spec
from ..capture.step import step_graph as steps
from ..checks import speed, step_check
from ..checks.declared_sizes import unserved_sizes
from ..checks.example_sizes import Example, sizes_to_check
from ..checks.stored_results import Stored
from ..entries import Step
from . import tuning
from .contents import Check, Contents
from .variant_capture import add_further_variants, captured_variant
from .variant_spec import variant_spec

_WHOLE = "whole"
"""The only candidate: one graph."""

_Captured = tuple[Example, Sequence[Graph]]
"""The example of a variant and its compiled graphs."""


def add_step(contents: Contents, name: str, entry: Step) -> tuple[EntrySpec, Check]:
    """Return the manifest's description of ``entry`` and its check. Graphs, weights and libraries go to
    ``contents``."""
    if not isinstance(entry.module, nn.Module):
        raise ExportError(
            f"entry {name!r}: module is a {type(entry.module).__name__}; a training step needs a torch.nn.Module"
        )
    program = steps.ProgramWithLoss(entry.module, entry.loss_fn)
    names = optimizer_spec.parameters_of(entry.optimizer, entry.module)
    settings = optimizer_spec.Settings(
        entry.clip_norm,
        entry.clip_value,
        entry.skip_nonfinite or entry.loss_scale is not None,
        entry.loss_scale,
        entry.ema,
    )
    parameters = [p for g in entry.optimizer.param_groups for p in g["params"] if p.requires_grad]
    targets = [("parameter", steps.MODULE + names[id(p)]) for p in parameters]
    state = state_of(program)
    weights = {n: (contents.weight_key(name, n, t), t.detach()) for n, t in state.items()}
    variants, captures = [], list[_Captured]()
    step_state: steps.StepState | None = None
    pending = list(entry.variants)  # grows if code for some sizes does not serve others
    for i, variant in enumerate(pending):
        if variant.requires_grad is not None:
            raise ExportError(
                f"entry {name!r}: requires_grad names inputs, but a training step does not return gradients of inputs"
            )
        mode = variant.mode or ("train" if entry.module.training else "eval")
        prefix = f"{name}.{i}"
        with captured_variant(
            contents,
            name,
            (i, len(pending)),
            variant,
            program,
            module=entry.module,
            mode=mode,
            kind="step",
            signature=program.signature(variant.args),
            names=lambda example: targets,
        ) as (example, _, joint):
            if joint.out_tree.kind in ("dict", "object", "namedtuple") and joint.out_tree.keys[0] != "loss":
                first = joint.out_tree.keys[0]
                raise ExportError(
                    f"{prefix}: expected the loss as the first result, got {first!r}; return the loss alone, first in a tuple, or named 'loss'"
                )
            joint, loss_gradient = partition.with_scalar_loss(joint, prefix, weights)
            optimized = optimizer_spec.inspect_optimizer(entry.optimizer, names, steps.gets_gradient(joint))
            if step_state is None:
                step_state = steps.step_state(
                    optimized, settings, program, waiting=entry.accumulate or entry.distributed
                )
                weights |= {n: (contents.weight_key(name, n, t), t) for n, t in step_state.tensors.items()}
            elif optimized.trained != step_state.optimized.trained:
                mismatches = sorted(set(optimized.trained) ^ set(step_state.optimized.trained))
                raise ExportError(
                    f"entry {name!r}: {mismatches[0]} gets a gradient in some variants only; the optimizer would treat it differently"
                )
            if settings.loss_scale is not None:
                joint = steps.with_scaled_loss(joint, step_state, loss_gradient)
            partitions, update = steps.split_step(joint, prefix, weights, step_state)
            if i == 0:
                step_state = dataclasses.replace(
                    step_state,
                    spec=dataclasses.replace(step_state.spec, numbers=update.allowed, in_place=update.in_place),
                )
                if step_state.gradients:
                    graph, plan = steps.update_alone(joint, f"{name}.update", weights, step_state, update)
                    partitions.graphs.append(graph)
                    step_state = dataclasses.replace(step_state, spec=dataclasses.replace(step_state.spec, update=plan))
            contents.compile(partitions.graphs, joint)
            variants.append(variant_spec(mode, joint, partitions))
            unserved = unserved_sizes(variants[-1], joint.sizes, program, example)
            add_further_variants(
                contents, name, pending, i, len(entry.variants), unserved, program.signature(variant.args)
            )
            captures.append((example, partitions.graphs))
    assert step_state is not None
    for n, tensor in step_state.tensors.items():
        if tensor.numel() and bool((tensor == tensor.flatten()[0]).all()):
            contents.fills[weights[n][0]] = float(tensor.flatten()[0])
    persistent = {steps.MODULE + n for n in entry.module.state_dict(keep_vars=True)}
    tensors: dict[str, Any] = state | step_state.tensors
    spec = EntrySpec(
        kind="step",
        state=tuple(
            StateSpec(n, weights[n][0], isinstance(t, nn.Parameter), t.requires_grad, n in persistent)
            for n, t in tensors.items()
        ),
        variants=tuple(variants),
        training=entry.module.training,
        step=step_state.spec,
    )
    reduced_precision = any(computes_in_16_bits(graph.module) for _, graphs in captures for graph in graphs)
    case = step_check.Case(
        program,
        entry.optimizer,
        settings,
        names,
        step_state.optimized.trained,
        bool(step_state.gradients),
        reduced_precision,
    )
    timed_spec = _timed(contents, name, spec, case, captures)

    def check(
        load: Callable[[], Package], i: int, variant: VariantSpec, stored: Stored, zero: SymbolSpec | None
    ) -> Verdict:
        return step_check.check(load, name, i, variant, case, sizes_to_check(variant, captures[i][0], zero), stored)

    return timed_spec, check


def _timed(
    contents: Contents, name: str, spec: EntrySpec, case: step_check.Case, captures: Sequence[_Captured]
) -> EntrySpec:
    """Return ``spec`` with the measured speed of each variant that this machine can run."""
    package = contents.package_of(name, spec) if contents.tune != "none" else None
    if package is None:
        return spec
    variants = []
    for i, (variant, (example, _)) in enumerate(zip(spec.variants, captures, strict=True)):
        label = f"{name} variant {i}" if len(spec.variants) > 1 else name
        subject = tuning.Subject(name, i, label, speed.StepTimed(name, case), example)
        measurement = tuning.measure(contents, subject, {_WHOLE: package}, {_WHOLE: 0})
        variants.append(dataclasses.replace(variant, speed=measurement))
    return dataclasses.replace(spec, variants=tuple(variants))
