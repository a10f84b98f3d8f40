"""A ``step`` entry on its way into a package: captured, compiled, and made ready to be checked."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from torch import nn

from aot_backward_runtime.errors import ExportError
from aot_backward_runtime.format.manifest import EntrySpec, StateSpec

from ..capture import partition, preserve, program_module, trace
from ..capture.shapes import dynamic_shapes
from ..capture.step import optimizer_spec
from ..capture.step import step_graph as steps
from ..capture.user_code import source_location
from ..checks import eager_check, step_check
from ..entries import Step
from .variant_spec import prepared, requiring, variant_spec

if TYPE_CHECKING:
    from .builder import Build, Check


def add_step(build: Build, name: str, entry: Step) -> tuple[EntrySpec, Check]:
    """What the manifest says of ``entry``, and its check. Graphs, weights and artifacts go to ``build``."""
    if not isinstance(entry.module, nn.Module):
        raise ExportError(f"entry {name!r}: module is a {type(entry.module).__name__}; a training step needs a torch.nn.Module")
    program = steps.ProgramWithLoss(entry.module, entry.loss_fn)
    names = optimizer_spec.parameters_of(entry.optimizer, entry.module)
    settings = optimizer_spec.Settings(entry.clip_norm, entry.clip_value, entry.skip_nonfinite or entry.loss_scale is not None, entry.loss_scale)
    trained = [p for g in entry.optimizer.param_groups for p in g["params"] if p.requires_grad]
    wanted = [("parameter", steps.MODULE + names[id(p)]) for p in trained]
    state = program_module.state_of(program)
    weights = {n: (build.key(name, n, t), t.detach()) for n, t in state.items()}
    variants, examples = [], []
    shared: steps.StepState | None = None
    for i, variant in enumerate(entry.variants):
        build.say(f"capture {name}", i, len(entry.variants))
        if variant.requires_grad is not None:
            raise ExportError(f"entry {name!r}: requires_grad names inputs, and a training step gives no gradients of inputs")
        signature = program.signature(variant.args)
        args, kwargs = prepared(variant, signature, build.specs[0].device)
        shapes = dynamic_shapes.normalized(variant.dynamic_shapes, signature, variant.args, variant.kwargs)
        mode = variant.mode or ("train" if entry.module.training else "eval")
        prefix = f"{name}.{i}"
        with (
            preserve.in_mode(entry.module, mode),
            requiring(program, wanted, args, kwargs) as (args, kwargs),
            source_location.errors_located(program, args, kwargs),
        ):
            joint = trace.trace_program(program, args, kwargs, shapes, signature=signature, kind="step", first_only=True)
            for fixed in dynamic_shapes.left_fixed(dynamic_shapes.declared(shapes, signature, args, kwargs), joint.input_names, joint.inputs):
                build.say(f"capture {name}: Dim.AUTO came out fixed, {fixed}", i, len(entry.variants))
            if joint.out_tree.kind in ("dict", "object", "namedtuple") and joint.out_tree.keys[0] != "loss":
                first = joint.out_tree.keys[0]
                raise ExportError(f"{prefix}: the first of the results is {first!r}; return the loss alone, first of a tuple, or named 'loss'")
            joint, loss_gradient = partition.with_scalar_loss(joint, prefix, weights)
            optimized = optimizer_spec.inspect_optimizer(entry.optimizer, names, steps.gets_gradient(joint))
            if shared is None:
                shared = steps.step_state(optimized, settings, program, waiting=entry.accumulate or entry.distributed)
                weights |= {n: (build.key(name, n, t), t) for n, t in shared.tensors.items()}
            elif optimized.trained != shared.optimized.trained:
                odd = sorted(set(optimized.trained) ^ set(shared.optimized.trained))
                raise ExportError(f"entry {name!r}: {odd[0]} gets a gradient in some variants only; the optimizer would treat it differently")
            if settings.loss_scale is not None:
                joint = steps.with_scaled_loss(joint, shared, loss_gradient)
            pieces, update = steps.split_step(joint, prefix, weights, shared)
            if i == 0:
                shared = dataclasses.replace(shared, spec=dataclasses.replace(shared.spec, numbers=update.allowed, in_place=update.in_place))
                if shared.gradients:
                    graph, plan = steps.update_alone(joint, f"{name}.update", weights, shared, update)
                    pieces.graphs.append(graph)
                    shared = dataclasses.replace(shared, spec=dataclasses.replace(shared.spec, update=plan))
            build.compile(pieces.graphs, joint)
            variants.append(eager_check.without_refused_emptiness(variant_spec(mode, joint, pieces), program, mode, args, kwargs))
            examples.append(step_check.Example(args, kwargs, mode))
        build.say(f"capture {name}", i + 1, len(entry.variants))
    assert shared is not None
    for n, tensor in shared.tensors.items():
        if tensor.numel() and bool((tensor == tensor.flatten()[0]).all()):
            build.fills[weights[n][0]] = float(tensor.flatten()[0])
    persistent = {steps.MODULE + n for n in entry.module.state_dict(keep_vars=True)}
    everything: dict[str, Any] = state | shared.tensors
    spec = EntrySpec(
        kind="step",
        state=tuple(StateSpec(n, weights[n][0], isinstance(t, nn.Parameter), t.requires_grad, n in persistent) for n, t in everything.items()),
        variants=tuple(variants),
        training=entry.module.training,
        step=shared.spec,
    )
    case = step_check.Case(program, entry.optimizer, settings, names, shared.optimized.trained, bool(shared.gradients), update.coarse)
    return spec, lambda package, i, stored: step_check.check(package, name, i, case, examples[i], stored)
