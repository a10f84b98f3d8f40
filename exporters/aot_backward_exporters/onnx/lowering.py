"""Lowers a captured graph for PyTorch's ONNX translations: functional, only operators that have a translation, explicit
casts.

Parameters, buffers and the numbers of an optimizer become placeholders after the graph's own; new values of in-place
writes become results after the graph's own. Operators without a translation are decomposed, by
:func:`.decompositions.table.ours` first, then by PyTorch's table. Operators that still lack one raise an error with
their name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx.traceback
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from aot_backward_runtime.errors import ExportError
from aot_backward_runtime.format.expressions import evaluate, symbols_of
from aot_backward_runtime.format.manifest import TensorSpec

from .. import torch_api
from ..decompositions.table import ours
from ..graph import LINE, Graph
from .rewrites import rewrite, widen

aten = torch.ops.aten
_NO_TYPE = (torch.complex32, torch.complex64, torch.complex128)
_CHECKS = {
    aten._assert_async.default, aten._assert_async.msg, aten._assert_scalar.default, aten._assert_tensor_metadata.default,
    aten.sym_constrain_range_for_size.default, aten.sym_constrain_range.default, aten._linalg_check_errors.default,
}  # fmt: skip
"""Operators that only raise. An ONNX graph cannot raise."""
_PARAMETERS_NAMED = 3  # parameters in a message: keeps it short; a guess


@dataclass(frozen=True)
class Lowered:
    """A lowered graph. ``module`` takes the graph's inputs, ``constants``, and one float64 scalar per element of
    ``vector`` that it reads.

    Its results are the graph's, then the new values of ``updated``. ``constants`` and ``updated`` are attributes, as in
    ``Graph.constants``. ``inputs``: the indices of the graph's inputs that remain; an input that only carries another
    input's size is dropped. ``numbers``: the positions of the scalars in the vector.
    """

    module: GraphModule
    inputs: tuple[int, ...]
    constants: tuple[str, ...]
    updated: tuple[str, ...]
    numbers: tuple[int, ...]


def lower(graph: Graph, known: Callable[[Any], bool], vector: str = "") -> Lowered:
    """Lower ``graph``. ``known``: whether an operator has a translation. ``vector``: the attribute that is an
    optimizer's vector of numbers, if any.

    Raise :class:`ExportError` with the operator that cannot be translated, and the line of user code that calls it.
    """
    try:
        return _lowered(graph, known, vector)
    except ExportError as error:
        raise located(graph, error) from error


def located(graph: Graph, error: ExportError) -> ExportError:
    """Return ``error`` with the gradient or value that its operator is part of, and the line of user code that calls
    it."""
    part, place = part_of(graph, error.operator), called_at(graph, error.operator)
    return ExportError.of(error.operator, f"{error}{part and f'; it is {part}'}{place and f'; it is called {place}'}")


def called_at(graph: Graph, operator: str) -> str:
    """Return the line of user code that calls the operator ("aten.mm.default"); "" if the capture did not record it."""
    lines = [n.meta[LINE] for n in graph.module.graph.nodes if str(n.target) == operator and LINE in n.meta]
    line = next((candidate for candidate in lines if candidate.file), None)
    if line is None:
        return ""
    return f"in {line.function}{f' of {line.module!r}' if line.module else ''} ({line.file}:{line.number}: {line.text})"


def part_of(graph: Graph, operator: str) -> str:
    """Describe the first call of the operator: the gradients that depend on it, otherwise the values that it is
    computed from."""
    first = next((n for n in graph.module.graph.nodes if str(n.target) == operator), None)
    if first is None:
        return ""
    descendants, ancestors = _closure([first], lambda n: n.users), _closure([first], lambda n: n.all_input_nodes)
    results = next(iter(graph.module.graph.find_nodes(op="output"))).args[0]
    output_names = [spec.name for spec, node in zip(graph.outputs, results, strict=True) if node in descendants]
    # The loss does not depend on it: it belongs to the backward
    if not any(name.startswith("output") for name in output_names):
        gradients = [
            name.removeprefix("gradient of ").partition(" from ")[0]
            for name in output_names
            if name.startswith("gradient of ")
        ]
        copies = [n for n in descendants if n.target is aten.copy_.default]
        gradients = gradients or [_parameter(graph, n) for n in copies if n.args[0].op == "get_attr"]  # type: ignore[union-attr]
        if names := list(dict.fromkeys(filter(None, gradients))):
            return f"part of the gradient of {_listed(names)}"
    inputs = dict(zip(graph.module.graph.find_nodes(op="placeholder"), graph.inputs, strict=True))
    sources = [
        _parameter(graph, n) if n.op == "get_attr" else inputs[n].name
        for n in ancestors
        if n.op in ("get_attr", "placeholder")
    ]
    names = list(dict.fromkeys(filter(None, sources)))
    return f"computed from {_listed(names)}" if names else ""


def _closure(nodes: Iterable[Node], neighbors: Callable[[Node], Iterable[Node]]) -> list[Node]:
    """Return ``nodes`` and all nodes that ``neighbors`` reaches from them, breadth first."""
    visited = dict.fromkeys(nodes)
    queue = list(visited)
    for node in queue:
        new = [n for n in neighbors(node) if n not in visited]
        visited.update(dict.fromkeys(new))
        queue += new
    return queue


def _parameter(graph: Graph, node: Any) -> str:
    """Return the parameter or buffer that ``node`` reads, directly or as its gradient; "" for an optimizer's own
    state."""
    attribute = str(node.target if node.op == "get_attr" else node.args[0].target)
    key = graph.constants[attribute][0] if attribute in graph.constants else ""
    return (
        ""
        if key.startswith("optimizer.") or key == "numbers"
        else key.removeprefix("module.").removeprefix("gradient.")
    )


def _listed(names: Sequence[str]) -> str:
    if len(names) > _PARAMETERS_NAMED:
        return f"{', '.join(names[:_PARAMETERS_NAMED])} and {len(names) - _PARAMETERS_NAMED} more"
    return " and ".join((", ".join(names[:-1]), names[-1])) if len(names) > 1 else names[0]


def _lowered(graph: Graph, has_translation: Callable[[Any], bool], vector: str) -> Lowered:
    _refuse(graph)
    first: dict[str, str] = {}
    for attribute, (key, _) in graph.constants.items():
        first.setdefault(key, attribute)
    canonical = {a: first[key] for a, (key, _) in graph.constants.items()}  # one tensor may have several names
    constants = tuple(a for a in first.values() if a != vector)
    length = graph.constants[vector][1].shape[0] if vector else 0
    fake_mode = torch_api.FakeTensorMode(
        allow_non_fake_inputs=True, allow_fallback_kernels=False, shape_env=torch_api.ShapeEnv()
    )
    symbols = _symbols(graph.inputs, fake_mode.shape_env)
    size_carriers = _size_carriers(graph.inputs)
    with fake_mode:
        inputs = [_fake(spec, symbols) for i, spec in enumerate(graph.inputs) if i not in size_carriers]
        weights = [
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for _, t in (graph.constants[a] for a in constants)
        ]
        scalars = [torch.empty((), dtype=torch.float64) for _ in range(length)]
    interpreter = _FunctionalInterpreter(graph, size_carriers, constants, canonical, vector)
    table = _decompositions(has_translation)
    with (
        fake_mode,
        torch.no_grad(),
        torch_api.symbolic_shapes_config.patch(backed_size_oblivious=True),
        torch.fx.traceback.preserve_node_meta(),
    ):
        flat = _traced(interpreter, table, inputs, weights, scalars)
    if static_names := [name for name, size in symbols.items() if not size.node.expr.is_Symbol]:
        raise ExportError(
            f"{graph.name}: the ONNX translation would hold for one value of {', '.join(static_names)} only; make that dimension static"
        )
    flat.graph.set_codegen(torch.fx.CodeGen())
    _drop_checks(flat)
    flat.graph.eliminate_dead_code()
    flat.recompile()
    _refuse_unknown(flat, graph, has_translation)
    rewrite(flat)
    torch_api.InsertTypePromotion(flat).run()
    widen(flat)
    numbers = _without_unused(flat, len(inputs) + len(constants), length)
    return Lowered(
        flat,
        tuple(i for i in range(len(graph.inputs)) if i not in size_carriers),
        constants,
        tuple(interpreter.updated),
        numbers,
    )


def _traced(
    interpreter: _FunctionalInterpreter, table: Mapping[Any, Any], inputs: Any, weights: Any, scalars: Any
) -> GraphModule:
    def run(*args: Any) -> Any:
        return interpreter.traced(*args)

    try:
        return make_fx(run, decomposition_table=dict(table), tracing_mode="symbolic")(inputs, weights, scalars)
    except ExportError as error:  # FX appends its own context to the message
        raise ExportError.of(error.operator, str(error).partition("\n")[0]) from error
    except Exception as error:  # a decomposition, PyTorch's or ours, may raise anything
        message = (str(error).splitlines() or [""])[0]
        raise ExportError.of(
            interpreter.current,
            f"{interpreter.current} as it is called here has no ONNX translation ({type(error).__name__}: {message}): leave this part to eager",
        ) from error


def _symbols(inputs: Sequence[TensorSpec], shape_env: Any) -> dict[str, torch.SymInt]:
    """Return new symbols for the sizes. Their example values equal no constant of a program by chance: a decomposition
    may compare the two, and would mistake a batch of 3 for the 3 channels of an image. The values have many divisors,
    because a program may test for divisibility."""
    names = sorted({name for spec in inputs for size in (*spec.shape, *spec.stride) for name in symbols_of(size)})
    out = {}
    for i, name in enumerate(names):
        hint, source = 27720 * (101 + 2 * i), torch_api.ConstantSource(name)
        symbol = shape_env.create_symbol(hint, source, dynamic_dim=torch_api.DimDynamic.DYNAMIC)
        out[name] = shape_env.create_symintnode(symbol, hint=hint, source=source)
    return out


def _size_carriers(inputs: Sequence[TensorSpec]) -> dict[int, dict[str, tuple[int, int]]]:
    """Return the empty inputs that only carry a size which other inputs also have: for each symbol, the input and the
    dimension."""
    positions: dict[str, tuple[int, int]] = {}
    carriers = [
        i
        for i, spec in enumerate(inputs)
        if spec.name.startswith("size ") and len(spec.shape) == 2 and spec.shape[1] == 0
    ]
    for i, spec in enumerate(inputs):
        if i not in carriers:
            for d, size in enumerate(spec.shape):
                if isinstance(size, str) and size.isidentifier():
                    positions.setdefault(size, (i, d))
    symbols = {i: symbols_of(inputs[i].shape[0]) for i in carriers}
    return {i: {name: positions[name] for name in names} for i, names in symbols.items() if names <= positions.keys()}


def _fake(spec: TensorSpec, symbols: Mapping[str, torch.SymInt]) -> torch.Tensor:
    shape, stride = ([evaluate(size, symbols) for size in sizes] for sizes in (spec.shape, spec.stride))  # type: ignore[arg-type]
    return torch.empty_strided(shape, stride, dtype=getattr(torch, spec.dtype))


class _FunctionalInterpreter(torch.fx.Interpreter):
    """Runs a graph for :func:`make_fx`. Constants are tensors that are passed in; no tensor changes in place."""

    def __init__(
        self,
        graph: Graph,
        carried: Mapping[int, Mapping[str, tuple[int, int]]],
        constants: Sequence[str],
        alike: Mapping[str, str],
        vector: str,
    ):
        super().__init__(graph.module, garbage_collect_values=False)
        self.specs, self.carried = graph.inputs, carried
        self.constants, self.alike, self.vector = constants, alike, vector
        self.held: dict[str, torch.Tensor] = {}
        self.scalars: list[torch.Tensor] = []
        self.updated: dict[str, torch.Tensor] = {}
        self.current: Any = "the graph"  # the operator that is run

    def traced(
        self, inputs: list[torch.Tensor], weights: list[torch.Tensor], scalars: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        self.held, self.scalars, self.updated = dict(zip(self.constants, weights, strict=True)), scalars, {}
        remaining = iter(inputs)
        args = [None if i in self.carried else next(remaining) for i in range(len(self.specs))]
        for i, positions in self.carried.items():
            sizes = {name: args[j].shape[d] for name, (j, d) in positions.items()}  # type: ignore[union-attr]
            args[i] = torch.empty([evaluate(self.specs[i].shape[0], sizes), 0])
        results = super().run(*args, enable_io_processing=False)
        return [*results, *self.updated.values()]

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is not torch.ops.higher_order.scan:
            return super().call_function(target, args, kwargs)
        body, carry, rows, others = args
        if isinstance(rows[0].shape[0], torch.SymInt):
            raise ExportError.of(
                target, f"{target} over a dynamic length has no ONNX translation. Make the length static"
            )
        step_results: list[Any] = []
        for step in range(rows[0].shape[0]):
            results = torch.fx.Interpreter(body).run(*carry, *(row[step] for row in rows), *others)
            carry = results[: len(carry)]
            step_results.append(results[len(carry) :])
        return *carry, *(torch.stack(values) for values in zip(*step_results, strict=True))

    def run_node(self, n: Node) -> Any:
        self.current = n.target
        attribute = self.alike.get(str(n.target), "") if n.op == "get_attr" else ""
        if attribute and attribute == self.vector:
            return torch.stack(self.scalars)
        if attribute:
            return self.held[attribute]
        if (
            n.op == "call_function"
            and n.target is aten.select.int
            and self._is_vector(n.args[0])
            and n.args[1:]
            and n.args[1] == 0
        ):
            return self.scalars[n.args[2]]  # type: ignore[index]
        if n.op == "call_function" and n.target is aten.view.default:  # strides are not kept, and may not allow a view
            return aten.reshape.default(*self.fetch_args_kwargs_from_env(n)[0])
        if n.op == "call_function" and "as_strided" in str(n.target) and not n.args[0].meta["val"].is_contiguous():  # type: ignore[union-attr]
            raise ExportError.of(
                n.target,
                f"{n.target} of a tensor that is not row-major has no ONNX translation: call .contiguous() first",
            )
        if n.op == "call_function" and n.target is aten.copy_.default:
            target = n.args[0]
            if not isinstance(target, Node) or target.op != "get_attr" or target.target not in self.alike:
                raise ExportError.of(
                    n.target,
                    f"the graph writes in place into {target}, which is not a parameter or buffer: report this as a bug",
                )
            old, new = self.env[target], self.env[n.args[1]]  # type: ignore[index]
            value = (
                torch.ops.aten.expand.default(new.to(old.dtype), old.shape)
                if new.shape != old.shape
                else new.to(old.dtype)
            )
            self.updated[self.alike[str(target.target)]] = self.env[target] = value
            return value
        out = super().run_node(n)
        if n.op == "call_function" and isinstance(
            out, (tuple, list)
        ):  # eager's kernels return empty tensors for results that their backward does not read (embedding bags)
            empty = [
                isinstance(v, torch.Tensor) and any(isinstance(size, int) and size == 0 for size in v.shape)
                for v in n.meta["val"]
            ]
            return type(out)(
                v[:0] if is_empty and v.shape[0] != 0 else v for v, is_empty in zip(out, empty, strict=True)
            )
        return out

    def _is_vector(self, node: Any) -> bool:
        return bool(self.vector) and isinstance(node, Node) and node.op == "get_attr" and node.target == self.vector


def _decompositions(has_translation: Callable[[Any], bool]) -> dict[Any, Callable[..., Any]]:
    table = {
        operator: function
        for operator, function in torch_api.decomposition_table.items()
        if isinstance(operator, torch_api.OpOverload) and not has_translation(operator)
    }
    return table | ours()


def _refuse(graph: Graph) -> None:
    """Raise :class:`ExportError` for unsupported features: control flow, random numbers, complex numbers, other
    devices."""
    for node in graph.module.graph.nodes:
        if node.op == "get_attr" and isinstance(getattr(graph.module, str(node.target), None), torch.nn.Module):
            user = next(iter(node.users))
            if user.target is torch.ops.higher_order.scan:
                continue
            raise ExportError.of(
                user.target,
                f"{user.target} has no ONNX translation: control flow that depends on data stays with eager; use torch.where instead of it",
            )
        if _draws(node):
            raise ExportError.of(
                node.target,
                f"{node.target} draws random numbers, and ONNX cannot draw eager's: export the module in eval mode, leave dropout out, or pass the "
                "numbers as an input",
            )
        values = node.meta.get("val")
        for value in values if isinstance(values, (tuple, list)) else (values,):
            if isinstance(value, torch.Tensor) and value.dtype in _NO_TYPE:
                subject = node.target if node.op == "call_function" else "an input or parameter"
                raise ExportError.of(
                    subject,
                    f"{subject} is {str(value.dtype).removeprefix('torch.')}, and ONNX has no complex numbers: compute with real and imaginary parts",
                )
            if isinstance(value, torch.Tensor) and value.device.type != "cpu":
                raise ExportError(
                    f"{graph.name}: ONNX graphs are made from programs on the CPU, and this one is on {value.device}; move it there first"
                )


def _draws(node: Node) -> bool:
    """Return whether the node draws random numbers. Attention has its own check for nonzero dropout."""
    is_random = isinstance(node.target, torch_api.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags
    return is_random and "scaled_dot_product" not in str(node.target)


def _refuse_unknown(module: GraphModule, graph: Graph, has_translation: Callable[[Any], bool]) -> None:
    originals = {n.name: n for n in graph.module.graph.nodes if n.op == "call_function"}
    for node in module.graph.nodes:
        if node.op == "call_function" and not has_translation(node.target):
            source = next((originals[h.name] for h in node.meta.get("from_node") or [] if h.name in originals), node)
            detail = f" ({node.target})" if source.target is not node.target else ""
            raise ExportError.of(
                source.target,
                f"{source.target} has no ONNX translation{detail}: leave this part to eager, or write it with other operators",
            )


def _drop_checks(module: GraphModule) -> None:
    for node in reversed(module.graph.nodes):
        if node.op == "call_function" and node.target in _CHECKS:
            module.graph.erase_node(node)


def _without_unused(module: GraphModule, first: int, length: int) -> tuple[int, ...]:
    """Erase the placeholders of unread numbers. Return the positions of the others."""
    placeholders: Iterable[Node] = list(module.graph.find_nodes(op="placeholder"))[first:]
    positions = []
    for i, node in zip(range(length), placeholders, strict=True):
        if node.users:
            positions.append(i)
        else:
            module.graph.erase_node(node)
    module.recompile()
    return tuple(positions)
