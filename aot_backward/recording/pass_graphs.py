"""Trace the compiled partitions of a recorded pass into functional ATen graphs.

The trace runs the interpreter (:mod:`aot_backward_runtime.tapes.interpreter`) on fake tensors, so the graph computes
the same as the interpreter.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from aot_backward_exporters import sixteen_bits, torch_api
from aot_backward_exporters.graph import Graph
from aot_backward_runtime.errors import ExportError
from aot_backward_runtime.format.manifest import Ambient, Segment, TensorSpec
from aot_backward_runtime.tapes.interpreter import Run
from aot_backward_runtime.tapes.tape import Op, Slot, Tape, slots

from ..capture.bind_graph import lift_constants
from ..capture.fx_graph import root_of
from ..capture.shapes.symbolic_shapes import Sizes, expression_of
from ..capture.trace_environment import decompositions, tracing
from .infer_shapes import Shapes
from .partition_tape import Partition
from .recorded_structure import ExamplePass


class TraceError(Exception):
    """``node``'s backward raised on fake tensors; ``__cause__`` is the exception."""

    def __init__(self, node: int, name: str):
        super().__init__(name)
        self.node, self.name = node, name


@dataclass
class TracedPartition:
    """A partition as a graph, before its sizes are written as expressions: further traces may still show symbols to be
    equal."""

    partition: Partition
    module: torch.fx.GraphModule
    # ("input", I), ("value", V) or ("size", symbol), and its fake tensor
    placeholders: list[tuple[str, Any, torch.Tensor]]
    results: list[torch.fx.Node]
    outputs: list[int]  # the value number of each result
    undefined_outputs: list[int]
    # Outputs with unshared memory: a leaf may take them without a copy
    unaliased: set[int] = field(default_factory=set)
    name: str = ""
    used_placeholders: list[tuple[str, Any, torch.Tensor]] = field(default_factory=list)
    undefined_values: list[int] = field(default_factory=list)  # values that were undefined when it was traced


def trace_partition(
    tape: Tape,
    partition: Partition,
    shapes: Shapes,
    values: dict[int, Any],
    scalars: Sequence[Any],
    ambient: Ambient,
    fake_mode: Any,
) -> TracedPartition:
    """Trace a compiled partition. ``values``: fake results of earlier partitions; this one's are added."""
    leaves = {
        op.operands[1].index: op.operands[0].index
        for op in tape.ops
        if op.kind == "accumulate" and isinstance(op.operands[1], Slot)
    }
    placeholders: list[tuple[str, Any, torch.Tensor]] = [("input", i, shapes.inputs[i]) for i in partition.inputs]
    placeholders += [("value", v, values[v]) for v in partition.values if values[v] is not None]
    in_shapes = {expression_of(n) for _, _, t in placeholders for n in t.shape}
    with fake_mode:  # a symbol that is in no tensor's shape is passed as the first dimension of an empty tensor
        placeholders += [("size", s, torch.empty((shapes.symints[s], 0))) for s in shapes.symbols if s not in in_shapes]
    outputs: list[int] = []
    undefined: list[int] = []

    def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        inputs: dict[int, torch.Tensor] = {}
        run_values: dict[int, Any] = dict.fromkeys(partition.values)
        for (kind, key, _), tensor in zip(placeholders, tensors, strict=True):
            if kind == "input":
                inputs[key] = tensor
            elif kind == "value":
                run_values[key] = tensor
        state = Run(inputs, shapes.sizes, scalars, (), ())  # type: ignore[arg-type]
        state.values.update(run_values)
        for n in partition.ops:
            try:
                state.step(tape.ops[n])
            except Exception as error:  # an operator's implementation on fake tensors may raise anything
                raise TraceError(tape.ops[n].node, tape.ops[n].name) from error
        out = {v: state.values[v] for v in partition.outputs}
        for v, leaf in leaves.items():
            if out.get(v) is not None:
                out[v] = _with_gradient_strides(out[v], shapes.inputs[leaf])
        # Assigned, not appended: torch may call this more than once
        outputs[:] = [v for v, t in out.items() if t is not None]
        undefined[:] = [v for v, t in out.items() if t is None]
        return tuple(out[v] for v in outputs)

    with _autocast_of(ambient, shapes), tracing(), torch.no_grad(), torch_api.V.set_fake_mode(fake_mode):
        module, signature = torch_api.aot_export_module(
            _FunctionModule(run), [t for _, _, t in placeholders], trace_joint=False, decompositions=decompositions()
        )
    if signature.buffers_to_mutate or signature.user_inputs_to_mutate:
        raise ExportError("a backward of the pass changes one of its operands in place")
    _split_variadic_arithmetic(module)
    sixteen_bits.mark_rounded(module)
    results = list(next(iter(module.graph.find_nodes(op="output"))).args[0])
    for v, node in zip(outputs, results, strict=True):
        values[v] = node.meta["val"]
    for v in undefined:
        values[v] = None
    undefined_values = [v for v in partition.values if values[v] is None]
    unaliased = _unaliased(tape, outputs, results)
    return TracedPartition(
        partition, module, placeholders, results, outputs, undefined, unaliased, undefined_values=undefined_values
    )


def _unaliased(tape: Tape, outputs: Sequence[int], results: Sequence[torch.fx.Node]) -> set[int]:
    """Return the outputs with one reader that share memory neither with an input nor with another output."""
    roots = [root_of(r) for r in results]
    readers: dict[int, int] = {}
    for op in tape.ops:
        for s in slots(op.operands):
            if s.kind == "value":
                readers[s.index] = readers.get(s.index, 0) + 1
    returned = {s.index for s in slots(tape.outputs) if s.kind == "value"}
    return {
        v
        for v, root in zip(outputs, roots, strict=True)
        if root.op == "call_function" and roots.count(root) == 1 and readers.get(v) == 1 and v not in returned
    }


def assume_results(
    op: Op, examples: Sequence[ExamplePass], values: dict[int, Any], shapes: Shapes, fake_mode: Any
) -> None:
    """Add to ``values`` the fake results of an uncompiled operation, inferred from the recorded ones; the runtime
    checks the real ones.

    Ranks, dtypes and the order of strides come from ``examples``. A size that equals a symbol's value in every example
    is that symbol.
    """
    numbers = [_symbol_values(shapes, e) for e in examples]
    for number in op.results:
        if number < 0:
            continue
        results = [e.values.get(number) for e in examples]
        if any(t is not None and t.layout is not torch.strided for t in results):
            continue  # no graph reads it: see sparse_operations
        tensors = [t for t in results if t is not None]
        if not tensors or len(tensors) < len(results):
            values[number] = None
            continue
        first = tensors[0]
        if any(t.dim() != first.dim() or t.dtype != first.dtype for t in tensors):
            raise ExportError(
                f"the results of {op.name or op.kind} differ in dtype or number of dimensions between passes"
            )
        shape = [_infer_size([t.shape[d] for t in tensors], numbers, shapes) for d in range(first.dim())]
        order = sorted(range(len(shape)), key=lambda d: (first.stride(d), -d))
        strides: list[Any] = [1] * len(shape)
        dense: Any = 1
        # Dense in the observed order; a result with other strides is copied before native code reads it
        for d in order:
            strides[d] = dense
            dense = dense * shape[d]
        with fake_mode:
            values[number] = torch.empty_strided(shape, strides, dtype=first.dtype, device=first.device)


def _symbol_values(shapes: Shapes, example: ExamplePass) -> dict[Any, int]:
    return {
        s: example.shapes[k.input][k.dim] if k.input >= 0 else example.sizes[k.dim] for s, k in shapes.symbols.items()
    }


def _infer_size(sizes: Sequence[int], numbers: Sequence[dict[Any, int]], shapes: Shapes) -> Any:
    for symbol, symint in shapes.symints.items():
        # use the symbol even if it has one value in all examples: these may be of one batch size although the group is
        # not
        if all(n[symbol] == s for n, s in zip(numbers, sizes, strict=True)):
            return symint
    if len(set(sizes)) == 1:
        return sizes[0]
    raise ExportError(
        f"a result of a hook or custom function has a size that changes ({list(sizes)}) and equals no size of the pass"
    )


def graph_and_segments(
    name: str, partition: Partition, traced: TracedPartition | None, sizes: Sizes
) -> tuple[Graph | None, list[Segment]]:
    """Return the graph for the compiler, and the segments that run the partition. If the graph computes nothing, it is
    left out and its operations are interpreted."""
    if traced is None or not any(r.op == "call_function" for r in traced.results):
        return None, [Segment((n,)) for n in partition.ops]
    module = traced.module
    used: list[tuple[str, Any, torch.Tensor]] = []
    for node, (kind, key, fake) in zip(module.graph.find_nodes(op="placeholder"), traced.placeholders, strict=True):
        if not node.users:
            module.graph.erase_node(node)
            continue
        used.append((kind, key, fake))
    constants: dict[str, tuple[str, torch.Tensor]] = {}
    lift_constants(
        module, constants, next((fake.device for kind, _, fake in used if kind != "size"), torch.device("cpu"))
    )
    module.graph.lint()
    module.recompile()
    traced.name, traced.used_placeholders = name, used
    count = sum(1 for n in module.graph.nodes if n.op == "call_function")
    outputs, undefined_outputs, undefined_values = map(
        tuple, (traced.outputs, traced.undefined_outputs, traced.undefined_values)
    )
    return Graph(name, module, *graph_specs(traced, sizes), constants, count), [
        Segment(partition.ops, name, graph_operands(traced, sizes), outputs, undefined_outputs, undefined_values)
    ]


def graph_operands(traced: TracedPartition, sizes: Sizes) -> tuple[str, ...]:
    """Return the graph's operands as the package states them: ``input:I``, ``value:V``, ``size:EXPRESSION``."""
    return tuple(
        f"size:{sizes.size(fake.shape[0])}" if kind == "size" else f"{kind}:{key}"
        for kind, key, fake in traced.used_placeholders
    )


def graph_specs(traced: TracedPartition, sizes: Sizes) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Return the specs of the graph's inputs and outputs."""
    words = {"input": "tensor {}", "value": "the gradient %v{}", "size": "size {}"}
    inputs = tuple(sizes.spec(words[kind].format(key), fake, False) for kind, key, fake in traced.used_placeholders)
    return inputs, tuple(
        sizes.spec(f"%v{v}", node.meta["val"], False) for v, node in zip(traced.outputs, traced.results, strict=True)
    )


def gradient_strides(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Return the strides that eager gives the gradient of a leaf with these: its own if it is dense, else row-major
    ones."""
    leaf = torch.empty_strided(shape, stride, device="meta")
    return (
        tuple(stride)
        if torch_api.is_non_overlapping_and_dense(leaf)
        else tuple(torch_api.contiguous_strides(tuple(shape)))
    )


def input_name(tape: Tape, index: int) -> str:
    """Return the name of a tensor of the pass in errors: its number and the first node that reads it."""
    return f"tensor {index} (of {tape.user_of(Slot('input', index))})"


class _FunctionModule(nn.Module):
    def __init__(self, run: Any):
        super().__init__()
        self.run = run

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.run(*tensors)


def _split_variadic_arithmetic(module: torch.fx.GraphModule) -> None:
    """Split ``operator.mul(16, s0, s1)`` into two products. The tracer writes it for three sizes, and Python cannot
    call it (torch 2.13)."""
    for node in list(module.graph.nodes):
        if node.target in (operator.mul, operator.add) and len(node.args) > 2:
            first, *rest = node.args
            new_node = first
            with module.graph.inserting_before(node):
                for factor in rest:
                    previous, new_node = new_node, module.graph.call_function(node.target, (new_node, factor))
                    new_node.meta["val"] = node.target(
                        *(a.meta["val"] if isinstance(a, torch.fx.Node) else a for a in (previous, factor))
                    )
            node.replace_all_uses_with(new_node)
            module.graph.erase_node(node)


def _with_gradient_strides(grad: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
    """Return ``grad`` with the strides that eager gives a leaf's gradient: the leaf's own if it is dense, else
    row-major ones."""
    if grad.layout is not torch.strided or grad.shape != leaf.shape:
        return grad
    strides = (
        leaf.stride() if torch_api.is_non_overlapping_and_dense(leaf) else torch_api.contiguous_strides(leaf.shape)
    )
    if grad.stride() == tuple(strides):
        return grad
    return torch.empty_strided(grad.shape, strides, dtype=grad.dtype, device=grad.device).copy_(grad)


@contextlib.contextmanager
def _autocast_of(ambient: Ambient, shapes: Shapes) -> Iterator[None]:
    """Enter the autocast state of the recorded pass, which is the state of the code that called backward."""
    device = next((t.device.type for t in shapes.inputs), "cpu")
    if not ambient.autocast:
        with torch.autocast(device, enabled=False):
            yield
        return
    with torch.autocast(device, dtype=getattr(torch, ambient.autocast), cache_enabled=False):
        yield
