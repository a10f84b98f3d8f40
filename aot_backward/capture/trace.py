"""Trace a module or a function on example inputs to its joint graph: forward and backward in one functional ATen graph.

The trace is ``aot_export_joint_with_descriptors`` on the module itself, so real autograd sees custom backwards, hooks
inside the forward, autocast and checkpointing. Descriptors, never order or names, identify each placeholder (parameter,
buffer, input or cotangent) and the gradient in each output. ``partition.py`` makes the graphs that are compiled.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.export import Dim
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from aot_backward_exporters import sixteen_bits, torch_api
from aot_backward_exporters.process_state import sizes_of_one_open
from aot_backward_runtime.entries.named_tensors import state_of
from aot_backward_runtime.errors import ExportError
from aot_backward_runtime.format.manifest import Ambient, Tree

from . import diagnostics, fx_graph, preserve, pytrees
from .ambient import current_ambient
from .joint_graph import Joint
from .program_module import FlatProgram, SignatureOwner, device_type, inner_name
from .shapes import dynamic_shapes as spellings
from .shapes import narrowed, output_aliasing
from .shapes.narrowed import Narrowed
from .shapes.symbolic_shapes import Sizes, expression_of, write
from .trace_environment import decompositions, no_unseen_randomness, tracing
from .user_code import attribute_writes, hooks, size_guards, source_lines
from .user_code.size_guards import Places


@dataclass(frozen=True)
class _Example:
    """The program and the example that it is traced on."""

    program: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dynamic_shapes: Any
    signature: Callable[..., Any]
    first_only: bool


def trace_program(
    program: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dynamic_shapes: Any,
    *,
    signature: Callable[..., Any],
    kind: str = "module",
    first_only: bool = False,
) -> Joint:
    """Trace ``program`` on ``args`` and ``kwargs`` (real tensors; their ``requires_grad`` counts). ``kind``: of the
    entry.

    ``first_only``: only the first output is differentiated; the others are returned, too. Raise :class:`ExportError`
    with the cause if the gradients could not be correct.
    """
    diagnostics.refuse_inputs(args, kwargs)
    example = _Example(program, args, kwargs, dynamic_shapes, signature, first_only)
    with (
        attribute_writes.recorded_writes(program) as writes,
        diagnostics.errors_of_a_trace(program, writes, lambda: program(*args, **kwargs)),
        preserve.slots_kept(program),
        hooks.refused_or_traced(program),
        no_unseen_randomness(),
    ):
        on_parameters = hooks.of_parameters(program, kind)
        joint = _traced_with_retries(example)
    diagnostics.refuse_assigned_buffers(program, writes)
    return replace(joint, hooks=on_parameters)


def _traced_with_retries(example: _Example) -> Joint:
    """Trace, and retry at most once for each of these reasons, except for copies, which can need several retries:

    - A dynamic size is first traced without assuming that it is at least 2, so that a batch of 1 is supported if the
      program allows it. If it does not, and no ``Dim`` would be narrowed, sizes from 2 on are supported.
    - Outputs that turn out to be views are copied.
    """
    copies: frozenset[int] = frozenset()
    size_one = example.dynamic_shapes is not None
    first_error: Exception | None = None
    while True:
        try:
            with sizes_of_one_open() if size_one else contextlib.nullcontext():
                joint, views = _traced(example, copies)
        except (Narrowed, torch_api.ConstraintViolationError, torch_api.GuardOnDataDependentSymNode) as error:
            if not size_one:
                if first_error is None:
                    raise
                raise first_error from error
            size_one, first_error = False, error
            continue
        if joint is not None:
            if first_error is not None and any(joint.sizes.narrowed()):
                raise first_error
            return joint
        if copies >= views:
            raise ExportError(f"outputs {sorted(views)} still share memory with an input after being copied")
        copies |= views


def _traced(example: _Example, copied: frozenset[int]) -> tuple[Joint | None, frozenset[int]]:
    """Trace once: make fake inputs, the joint graph, and the sizes that its guards leave. Return the same as
    :func:`joint_of`."""
    args, kwargs, signature, shapes = example.args, example.kwargs, example.signature, example.dynamic_shapes
    names, argument_names = pytrees.input_names(signature, args, kwargs)
    owner = SignatureOwner(signature)
    dims = _dims(owner, args, kwargs, shapes)
    fake_mode, fake_args, fake_kwargs, equalities, original, checked = torch_api.make_fake_inputs(
        owner, args, kwargs, shapes
    )
    flat = FlatProgram(example.program, (fake_args, fake_kwargs), copied, example.first_only)
    inputs = tuple(v for v in flat.flat if isinstance(v, torch.Tensor))
    tensor_names = tuple(n for n, v in zip(names, flat.flat, strict=True) if isinstance(v, torch.Tensor))
    dim_specs = spellings.declared(shapes, signature, args, kwargs)
    env, declared = fake_mode.shape_env, narrowed.declared_sizes(dim_specs, inputs, tensor_names)
    _guard_bounds(dim_specs, inputs, tensor_names)

    def settle(graph: GraphModule, places: Places) -> Sizes:
        # raises if the trace narrowed a declared size; may also replace one symbol by another, so read the sizes
        # afterwards
        try:
            torch_api.produce_guards_and_solve_constraints(fake_mode, graph, checked, equalities, original)
        except torch_api.ConstraintViolationError as error:
            narrowed.raise_if_refused(env, declared, places, error)
        env.frozen = False  # the partitioner and the compiler still add guards
        sizes = Sizes.of_inputs(
            env, inputs, {place: dim.__name__ for place, dim in dims.items() if dim.__name__.isidentifier()}
        )
        stated = {s.name: dims[s.input, s.dim] for s in sizes.symbols if (s.input, s.dim) in dims}
        roots = {name: getattr(dim, "root", dim) for name, dim in stated.items()}  # 2 * Dim("half") has a root
        ranges = {name: narrowed.bounds(dim) for name, dim in roots.items()}
        return replace(sizes, declared=ranges, dims={name: dim.__name__ for name, dim in roots.items()}, places=places)

    ambient = current_ambient(device_type(args, kwargs, example.program))
    facts = Described(fake_mode, ambient, tensor_names, argument_names, _in_tree(args, kwargs))
    requires_grad = [t.requires_grad for t in inputs]
    joint, views = joint_of(flat, inputs, facts, settle)
    if joint is None:
        return None, views
    for i, name in enumerate(tensor_names):
        if ("input", i) in joint.gradients and not requires_grad[i]:
            raise ExportError(
                f"the forward calls requires_grad_() on its input {name!r}, which changes the caller's tensor; write {name} = "
                f"{name}.detach().requires_grad_(), or export with an example that requires a gradient"
            )
    return replace(
        joint, shared=output_aliasing.shared(flat.places, joint.outputs, joint.output_requires_grad, joint.sizes)
    ), views


def _guard_bounds(
    declared: Sequence[tuple[int, int, Any]], inputs: Sequence[torch.Tensor], names: Sequence[str]
) -> None:
    """Add the bounds of hints, which torch.export 2.13 ignores: a comparison makes each a guard, which narrows the
    symbol's range."""
    for number, dim, hint in declared:
        if spellings.is_hint(hint):
            size = inputs[number].shape[dim]
            if not ((hint.min is None or size >= hint.min) and (hint.max is None or size <= hint.max)):
                raise ExportError(f"{names[number]}.shape[{dim}] of the example is {size}, not within {hint!r}")


@dataclass(frozen=True)
class Described:
    """Facts about a joint graph that its trace does not contain."""

    fake_mode: Any
    ambient: Ambient
    input_names: tuple[str, ...]
    argument_names: tuple[str, ...]
    in_tree: Tree


def joint_of(
    flat: FlatProgram,
    inputs: tuple[torch.Tensor, ...],
    about: Described,
    settle: Callable[[GraphModule, Places], Sizes],
) -> tuple[Joint | None, frozenset[int]]:
    """Return the joint graph of ``flat`` on fake ``inputs``; or None, and the outputs that it must copy. ``settle``:
    returns the sizes after the trace."""
    with contextlib.ExitStack() as stack, torch.enable_grad(), tracing():
        outermost = FlatProgram.forward.__code__
        with (
            source_lines.recorded_lines(flat.program, outermost),
            size_guards.recorded(flat.program, outermost) as places,
        ):
            described = torch_api.aot_export_joint_with_descriptors(
                stack, flat, inputs, decompositions=decompositions(), keep_inference_input_mutations=True
            )
        captured, meta = described._aot_graph_capture, described._aot_state.fw_metadata
        graph = captured.graph_module
        source_lines.spread(graph)
        places = size_guards.located(places, graph)
        parameters, buffers = (
            [inner_name(n) for n in spec] for spec in (described.params_spec, described.buffers_spec)
        )
        diagnostics.refuse_mutations(meta, parameters, buffers, about.input_names)
        diagnostics.refuse_nodes(graph, flat.program)
        views = _views(meta) | _repeats(graph, meta)
        if views:
            return None, views
        sixteen_bits.mark_rounded(graph)
        joint = _described_joint(flat, inputs, about, settle(graph, places), described, [*parameters, *buffers])
    return joint, frozenset()


def _described_joint(
    flat: FlatProgram,
    inputs: tuple[torch.Tensor, ...],
    about: Described,
    sizes: Sizes,
    described: Any,
    state: Sequence[str],
) -> Joint:
    """Identify the traced graph's placeholders and outputs by their descriptors. ``state``: the names of parameters and
    buffers, in its order."""
    captured, meta = described._aot_graph_capture, described._aot_state.fw_metadata
    graph = captured.graph_module
    placeholders = {node.name: _place_of(node.meta["desc"]) for node in graph.graph.find_nodes(op="placeholder")}
    output_node = fx_graph.output_of(graph.graph)
    results = list(pytree.tree_leaves(output_node.args[0]))
    descriptors = list(output_node.meta["desc"])
    if len(results) != len(descriptors):  # otherwise None leaves would shift results against descriptors
        results = list(pytree.tree_flatten(output_node.args[0], is_leaf=lambda v: v is None)[0])

    start = len(meta.mutated_inp_runtime_indices)
    count = start + meta.num_outputs + meta.num_intermediate_bases + meta.num_outputs_rng_offset
    outputs: list[Any] = []
    for value, info in zip(results[start:], meta.output_info, strict=False):
        if info.output_type is torch_api.OutputType.is_input:
            outputs.append(
                ("state", state[info.base_idx]) if info.base_idx < len(state) else ("input", info.base_idx - len(state))
            )
        else:
            outputs.append(value if isinstance(value, Node) and isinstance(value.meta["val"], torch.Tensor) else None)
    slots = tuple(_place_of(d.grad_of) if isinstance(d, torch_api.GradAOTOutput) else None for d in descriptors[count:])
    gradients = {
        t: v if isinstance(v, Node) else None for t, v in zip(slots, results[count:], strict=True) if t is not None
    }
    return Joint(
        graph=graph,
        fake_mode=about.fake_mode,
        sizes=sizes,
        placeholders=placeholders,
        outputs=tuple(outputs),
        output_requires_grad=tuple(bool(o.requires_grad) for o in meta.output_info),
        forward_values=count,
        gradients=gradients,
        gradient_slots=slots,
        cotangents=tuple(index for kind, index in placeholders.values() if kind == "cotangent"),
        cotangent_values=tuple(
            n.meta["val"] for n in graph.graph.find_nodes(op="placeholder") if placeholders[n.name][0] == "cotangent"
        ),
        inputs=inputs,
        state=state_of(flat.program),
        input_names=about.input_names,
        argument_names=about.argument_names,
        in_tree=about.in_tree,
        out_tree=_out_tree(
            described.out_spec, results[start : start + meta.num_outputs], outputs, flat.constants, sizes
        ),
        ambient=about.ambient,
        trace_inputs=captured.updated_flat_args,
    )


def _place_of(descriptor: Any) -> tuple[str, Any]:
    """Return the key of a descriptor's input in :attr:`Joint.placeholders` and :attr:`Joint.gradients`."""
    if isinstance(descriptor, torch_api.ParamAOTInput):
        return "parameter", inner_name(descriptor.target)
    if isinstance(descriptor, torch_api.BufferAOTInput):
        return "buffer", inner_name(descriptor.target)
    if isinstance(descriptor, torch_api.PlainAOTInput):
        return "input", descriptor.idx
    if isinstance(descriptor, torch_api.TangentAOTInput) and isinstance(descriptor.output, torch_api.PlainAOTOutput):
        return "cotangent", descriptor.output.idx
    raise ExportError(f"the traced graph has an input of an unsupported kind: {descriptor}")


def _views(meta: Any) -> frozenset[int]:
    """Return the outputs that share memory with an input or with another output."""
    fresh_types = (
        torch_api.OutputType.non_alias,
        torch_api.OutputType.unsafe_view_alias,
        torch_api.OutputType.is_input,
    )
    return frozenset(i for i, o in enumerate(meta.output_info) if o.output_type not in fresh_types)


def _repeats(graph: GraphModule, meta: Any) -> frozenset[int]:
    """Return the outputs that are the same value as an earlier one: autograd could not tell their incoming gradients
    apart."""
    flat = pytree.tree_flatten(fx_graph.output_of(graph.graph).args[0], is_leaf=lambda v: v is None)[0]
    start = len(meta.mutated_inp_runtime_indices)
    seen: set[Any] = set()
    out = set()
    for i, (value, info) in enumerate(zip(flat[start : start + meta.num_outputs], meta.output_info, strict=True)):
        if isinstance(value, Node) and info.output_type is not torch_api.OutputType.is_input:
            if value in seen:
                out.add(i)
            seen.add(value)
    return frozenset(out)


def _in_tree(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tree:
    count = iter(range(1 << 30))

    def leaf(value: Any, path: str) -> Tree:
        return Tree("tensor", index=next(count)) if isinstance(value, torch.Tensor) else pytrees.constant(value, path)

    return pytrees.describe((args, kwargs), leaf)


def _out_tree(spec: Any, results: list[Any], outputs: list[Any], constants: dict[int, Any], sizes: Sizes) -> Tree:
    """Return the output's tree. ``outputs`` lists every flat result: tensors are numbered, the others are written into
    the tree."""
    position = iter(range(1 << 30))

    def leaf(i: int, path: str) -> Tree:
        if outputs[i] is not None:
            return Tree("tensor", index=next(position))
        value = results[i]
        if isinstance(value, Node):
            value = value.meta["val"]
        if isinstance(value, torch.SymInt):
            return Tree("size", expression=write(expression_of(value), sizes.names))
        return pytrees.constant(constants[i], f"output{path}")

    return pytrees.describe(pytree.tree_unflatten(list(range(len(results))), spec), leaf)


def _dims(owner: nn.Module, args: Any, kwargs: Any, dynamic_shapes: Any) -> dict[tuple[int, int], Dim]:
    """Return (flat tensor, dimension) -> its ``torch.export.Dim``, or an expression of one."""
    if dynamic_shapes is None:
        return {}
    arguments = torch_api._combine_args(owner, args, kwargs)
    try:
        torch_api._process_dynamic_shapes(arguments, dynamic_shapes)
    except Exception as error:
        cause = str(error).strip().partition("\n")[0]
        raise ExportError(
            f"dynamic_shapes does not fit the example: {cause}. Give sizes by argument, {{'x': {{0: Dim('batch', min=1, max=64)}}}}, and None for an "
            "argument with fixed sizes"
        ) from error
    declared = spellings.declared(dynamic_shapes, owner.forward, args, kwargs)
    return {(i, d): size for i, d, size in declared if isinstance(size, Dim)}
