"""Tape -> graphs: a recorded pass, cut where Python code runs, each piece traced into a functional ATen graph.

The trace runs the interpreter (``aot_backward_runtime.passes.interpreter``) on fake tensors, so what is compiled is what would be interpreted.
Between two pieces stand, in eager's order, the operations that no graph can hold: hooks, custom functions, and the leaves that take their
gradients.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from aot_backward_runtime.errors import ExportError
from aot_backward_runtime.format.manifest import Ambient, Segment, TensorSpec
from aot_backward_runtime.passes.interpreter import Run
from aot_backward_runtime.passes.tape import CALLS_OUT, Op, Slot, Tape, slots

from .. import torch_api
from ..capture.bind_graph import lift_constants
from ..capture.fx_graph import root_of
from ..capture.shapes.symbolic_shapes import Sizes, expression_of
from ..capture.trace_environment import decompositions, tracing
from ..graph import Graph
from .infer_shapes import Shapes


class NotTraced(Exception):
    """``node``'s backward failed on fake tensors, with the error that is the cause of this one."""

    def __init__(self, node: int, name: str):
        super().__init__(name)
        self.node, self.name = node, name


OPAQUE = frozenset({"MkldnnRnnLayerBackward0"})
"""Nodes whose backward stays as it is: one operator of oneDNN, which nothing would be gained by compiling (and whose missing list of batch
sizes AOTInductor's proxy executor cannot pass on, torch 2.13)."""


@dataclass(frozen=True)
class Piece:
    """Operations that become one graph, or a single one that stays as it is.

    ``inputs``, ``needs``: the tensors and earlier values that go in; ``gives``: the values that are used later, by whatever.
    """

    ops: tuple[int, ...]
    compiled: bool
    inputs: tuple[int, ...] = ()
    needs: tuple[int, ...] = ()
    gives: tuple[int, ...] = ()


@dataclass
class Traced:
    """A piece as a graph, before its sizes are spelled: symbols may still turn out to be equal."""

    piece: Piece
    module: torch.fx.GraphModule
    placeholders: list[tuple[str, Any, torch.Tensor]]  # ("input", I), ("value", V) or ("size", symbol), and its fake tensor
    results: list[torch.fx.Node]
    gives: list[int]
    undefined: list[int]
    own: set[int] = field(default_factory=set)  # values whose memory is theirs alone
    name: str = ""
    operands: list[tuple[str, Any, torch.Tensor]] = field(default_factory=list)  # the placeholders that are left
    absent: list[int] = field(default_factory=list)  # values that were undefined when it was traced


def cut(tape: Tape, hook_groups: Sequence[int], traced: bool = True, opaque: Set[str] = OPAQUE, single: Set[int] = frozenset()) -> list[Piece]:
    """The pieces of a pass in the order in which they run. ``hook_groups``: which hooks are one object. ``traced``: whether custom functions
    whose backward is plain (``function_code.py``) become part of the graphs. ``opaque``: nodes by name, and ``single``: operations by number,
    that stay as they are.

    A hook sees what eager would have done by then, so everything before it runs before it. Only the hooks that unpack saved tensors look at
    nothing: those of one object are called together, before the operations between them (the next object is another checkpoint, whose
    recomputed tensors should not be there at the same time).
    """
    pieces: list[list[int]] = []
    compiled: list[bool] = []
    graph: list[int] = []
    leaves: list[int] = []
    unpacking: int | None = None

    def flush() -> None:
        nonlocal unpacking
        if graph:
            pieces.append(list(graph))
            compiled.append(True)
        for n in leaves:
            pieces.append([n])
            compiled.append(False)
        graph.clear()
        leaves.clear()
        unpacking = None

    for n, op in enumerate(tape.ops):
        if op.kind == "accumulate":
            leaves.append(n)
        elif (n not in single and (op.kind not in CALLS_OUT and op.name not in opaque)) or (traced and n in tape.plain_customs):
            graph.append(n)
        else:
            group = None
            if op.kind == "unpack_hook":
                index = op.operands[0].index
                group = hook_groups[index] if index < len(hook_groups) else -1 - index
            if group is None or group != unpacking:
                flush()
            unpacking = group
            pieces.append([n])
            compiled.append(False)
    flush()
    used = _users(tape)
    out = []
    for numbers, is_graph in zip(pieces, compiled, strict=True):
        if not is_graph:
            out.append(Piece(tuple(numbers), False))
            continue
        inside = {r for n in numbers for r in tape.ops[n].results if r >= 0}
        members = set(numbers)
        reads = [s for n in numbers for s in slots(tape.ops[n].operands)]
        out.append(
            Piece(
                ops=tuple(numbers),
                compiled=True,
                inputs=tuple(dict.fromkeys(s.index for s in reads if s.kind == "input")),
                needs=tuple(dict.fromkeys(s.index for s in reads if s.kind == "value" and s.index not in inside)),
                gives=tuple(r for r in sorted(inside) if used.get(r, set()) - members),
            )
        )
    return out


def trace(
    tape: Tape,
    piece: Piece,
    shapes: Shapes,
    values: dict[int, Any],
    scalars: Sequence[Any],
    ambient: Ambient,
    contexts: Mapping[int, Any],
    fake_mode: Any,
) -> Traced:
    """The graph of a compiled piece. ``values``: what earlier pieces give, fake; this one's are added. ``contexts``: of custom functions."""
    leaves = {op.operands[1].index: op.operands[0].index for op in tape.ops if op.kind == "accumulate" and isinstance(op.operands[1], Slot)}
    given: list[tuple[str, Any, torch.Tensor]] = [("input", i, shapes.inputs[i]) for i in piece.inputs]
    given += [("value", v, values[v]) for v in piece.needs if values[v] is not None]
    shown = {expression_of(n) for _, _, t in given for n in t.shape}
    with fake_mode:
        carriers = [("size", s, torch.empty((shapes.carried[s], 0))) for s in shapes.symbols if s not in shown]
    given += carriers
    known: dict[str, Any] = {}

    def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        inputs: dict[int, torch.Tensor] = {}
        run_values: dict[int, Any] = dict.fromkeys(piece.needs)
        for (kind, where, _), tensor in zip(given, tensors, strict=True):
            if kind == "input":
                inputs[where] = tensor
            elif kind == "value":
                run_values[where] = tensor
        state = Run(inputs, shapes.sizes, scalars, contexts, ())  # type: ignore[arg-type]
        state.values.update(run_values)
        for n in piece.ops:
            try:
                state.step(tape.ops[n])
            except Exception as error:  # whatever an operator's implementation on fake tensors raises
                raise NotTraced(tape.ops[n].node, tape.ops[n].name) from error
        out = {v: state.values[v] for v in piece.gives}
        for v, leaf in leaves.items():
            if out.get(v) is not None:
                out[v] = _laid_like(out[v], shapes.inputs[leaf])
        known["gives"] = [v for v, t in out.items() if t is not None]
        known["undefined"] = [v for v, t in out.items() if t is None]
        return tuple(out[v] for v in known["gives"])

    with _under(ambient, shapes), tracing(), torch.no_grad(), torch_api.V.set_fake_mode(fake_mode):
        wrapper = _Wrapped(run)
        module, signature = torch_api.aot_export_module(wrapper, [t for _, _, t in given], trace_joint=False, decompositions=decompositions())
    if signature.buffers_to_mutate or signature.user_inputs_to_mutate:
        raise ExportError("a backward of the pass changes one of its operands in place")
    _binary(module)
    output = next(iter(module.graph.find_nodes(op="output")))
    results = list(output.args[0])
    for v, node in zip(known["gives"], results, strict=True):
        values[v] = node.meta["val"]
    for v in known["undefined"]:
        values[v] = None
    absent = [v for v in piece.needs if values[v] is None]
    traced = Traced(piece, module, given, results, known["gives"], known["undefined"], absent=absent)
    roots = [root_of(r) for r in results]
    readers: dict[int, int] = {}
    for op in tape.ops:
        for s in slots(op.operands):
            if s.kind == "value":
                readers[s.index] = readers.get(s.index, 0) + 1
    outputs = {s.index for s in slots(tape.outputs) if s.kind == "value"}
    for v, root in zip(traced.gives, roots, strict=True):
        if root.op == "call_function" and roots.count(root) == 1 and readers.get(v) == 1 and v not in outputs:
            traced.own.add(v)
    return traced


def assume(op: Op, examples: Sequence[Any], values: dict[int, Any], shapes: Shapes, fake_mode: Any) -> None:
    """What an operation that stays as it is will give, as far as the recorded passes tell: its looks are checked when it has run.

    ``examples``: ``record.Example``; their values give ranks, dtypes and strides. A size that is a symbol's number in every example is
    that symbol.
    """
    numbers = [_symbol_numbers(shapes, e) for e in examples]
    for number in op.results:
        if number < 0:
            continue
        seen = [e.values.get(number) for e in examples]
        if any(t is not None and t.layout is not torch.strided for t in seen):
            continue  # no graph reads it: sparse_operations
        if not seen or any(t is None for t in seen):
            values[number] = None
            continue
        if any(t.dim() != seen[0].dim() or t.dtype != seen[0].dtype or t.layout is not torch.strided for t in seen):
            raise ExportError(f"the results of {op.name or op.kind} look different in two passes")
        shape = [_as_size([t.shape[d] for t in seen], numbers, shapes) for d in range(seen[0].dim())]
        order = sorted(range(len(shape)), key=lambda d: (seen[0].stride(d), -d))
        strides: list[Any] = [1] * len(shape)
        dense: Any = 1
        for d in order:  # row-major in the order seen: what lies otherwise is copied before native code reads it
            strides[d] = dense
            dense = dense * shape[d]
        with fake_mode:
            values[number] = torch.empty_strided(shape, strides, dtype=seen[0].dtype, device=seen[0].device)


def sparse_operations(tape: Tape, examples: Sequence[Any]) -> set[int]:
    """The operations that give or read a sparse tensor. Native code has none: they stay as they are."""
    sparse = {Slot("value", v) for e in examples for v, t in e.values.items() if t is not None and t.layout is not torch.strided}
    if not sparse:
        return set()
    made = {n for n, op in enumerate(tape.ops) if any(Slot("value", r) in sparse for r in op.results)}
    return made | {n for n, op in enumerate(tape.ops) if not sparse.isdisjoint(slots(op.operands))}


def _symbol_numbers(shapes: Shapes, example: Any) -> dict[Any, int]:
    return {s: example.shapes[k.input][k.dim] if k.input >= 0 else example.sizes[k.dim] for s, k in shapes.symbols.items()}


def _as_size(seen: Sequence[int], numbers: Sequence[dict[Any, int]], shapes: Shapes) -> Any:
    for symbol, carried in shapes.carried.items():
        # also where it is one number in all of them: the examples may be of one batch size though the group is not
        if all(n[symbol] == s for n, s in zip(numbers, seen, strict=True)):
            return carried
    if len(set(seen)) == 1:
        return seen[0]
    raise ExportError(f"a size of what a hook or custom function gives changes ({list(seen)}) and is no size of the pass")


def finish(name: str, piece: Piece, traced: Traced | None, sizes: Sizes, tape: Tape) -> tuple[Graph | None, list[Segment]]:
    """The graph as the compiler gets it, and the steps that run the piece. A graph that computes nothing is not worth a call."""
    graph = traced.module if traced is not None else None
    if traced is None or graph is None or not any(r.op == "call_function" for r in traced.results):
        return None, [Segment((n,)) for n in piece.ops]
    inputs: list[tuple[str, Any, torch.Tensor]] = []
    for node, (kind, where, fake) in zip(graph.graph.find_nodes(op="placeholder"), traced.placeholders, strict=True):
        if not node.users:
            graph.graph.erase_node(node)
            continue
        inputs.append((kind, where, fake))
    constants: dict[str, tuple[str, torch.Tensor]] = {}
    lift_constants(graph, constants, next((fake.device for kind, _, fake in inputs if kind != "size"), torch.device("cpu")))
    graph.graph.lint()
    graph.recompile()
    traced.name, traced.operands = name, inputs
    count = sum(1 for n in graph.graph.nodes if n.op == "call_function")
    segment = Segment(piece.ops, name, operands(traced, sizes), tuple(traced.gives), tuple(traced.undefined), tuple(traced.absent))
    return Graph(name, graph, *specs(traced, sizes), constants, count), [segment]


def operands(traced: Traced, sizes: Sizes) -> tuple[str, ...]:
    """What the graph is given, as the package states it."""
    return tuple(f"size:{sizes.size(fake.shape[0])}" if kind == "size" else f"{kind}:{where}" for kind, where, fake in traced.operands)


def specs(traced: Traced, sizes: Sizes) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """What the graph takes and gives."""
    words = {"input": "tensor {}", "value": "the gradient %v{}", "size": "size {}"}
    inputs = tuple(sizes.spec(words[kind].format(where), fake, False) for kind, where, fake in traced.operands)
    return inputs, tuple(sizes.spec(f"%v{v}", node.meta["val"], False) for v, node in zip(traced.gives, traced.results, strict=True))


def gradient_strides(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """The strides that eager gives the gradient of a leaf with these: its own where it is dense, else row-major ones."""
    leaf = torch.empty_strided(shape, stride, device="meta")
    return tuple(stride) if torch_api.is_non_overlapping_and_dense(leaf) else tuple(torch_api.contiguous_strides(tuple(shape)))


def origin(tape: Tape, index: int) -> str:
    """What an error calls a tensor of the pass: the first node that uses it."""
    return f"tensor {index} (of {tape.user_of(Slot('input', index))})"


class _Wrapped(nn.Module):
    def __init__(self, run: Any):
        super().__init__()
        self.run = run

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.run(*tensors)


def _binary(module: torch.fx.GraphModule) -> None:
    """Sizes that the tracer multiplied three at a time, ``operator.mul(16, s0, s1)``, which nothing could call (torch 2.13)."""
    for node in list(module.graph.nodes):
        if node.target in (operator.mul, operator.add) and len(node.args) > 2:
            first, *rest = node.args
            made = first
            with module.graph.inserting_before(node):
                for factor in rest:
                    previous, made = made, module.graph.call_function(node.target, (made, factor))
                    made.meta["val"] = node.target(*(a.meta["val"] if isinstance(a, torch.fx.Node) else a for a in (previous, factor)))
            node.replace_all_uses_with(made)
            module.graph.erase_node(node)


def _laid_like(grad: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
    """``grad`` with the strides that eager gives a leaf's gradient: the leaf's own where it is dense, else row-major ones."""
    if grad.layout is not torch.strided or grad.shape != leaf.shape:
        return grad
    wanted = leaf.stride() if torch_api.is_non_overlapping_and_dense(leaf) else torch_api.contiguous_strides(leaf.shape)
    if grad.stride() == tuple(wanted):
        return grad
    return torch.empty_strided(grad.shape, wanted, dtype=grad.dtype, device=grad.device).copy_(grad)


@contextlib.contextmanager
def _under(ambient: Ambient, shapes: Shapes) -> Iterator[None]:
    """The autocast state of the pass: the engine runs a backward under its caller's."""
    device = next((t.device.type for t in shapes.inputs), "cpu")
    if not ambient.autocast:
        with torch.autocast(device, enabled=False):
            yield
        return
    with torch.autocast(device, dtype=getattr(torch, ambient.autocast), cache_enabled=False):
        yield


def _users(tape: Tape) -> dict[int, set[int]]:
    """Value -> the operations that read it; -1 stands for the pass's outputs."""
    out: dict[int, set[int]] = {}
    for n, op in enumerate(tape.ops):
        for s in slots(op.operands):
            if s.kind == "value":
                out.setdefault(s.index, set()).add(n)
    for s in slots(tape.outputs):
        if s.kind == "value":
            out.setdefault(s.index, set()).add(-1)
    return out
