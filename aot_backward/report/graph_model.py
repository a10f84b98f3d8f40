"""Model of a portable graph (``docs/format.md``, section 6) for display. The graph is untrusted: each part is checked,
and no operator is looked up or called."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from aot_backward_exporters.graph import Line
from aot_backward_exporters.portable.graph_json import form_of
from aot_backward_runtime.errors import InputError, PackageError
from aot_backward_runtime.format.expressions import evaluate
from aot_backward_runtime.format.manifest import Size
from aot_backward_runtime.native.guards import dtype_of
from aot_backward_runtime.package.archive import Archive

from .markup import clean

LARGEST = 1 << 53  # bytes, also the largest exact integer of JavaScript
_LONGEST_CALL, _LONGEST_NAME = 240, 60  # characters; one name may be in the calls of a hundred thousand nodes


@dataclass(frozen=True)
class TensorInfo:
    """A tensor's metadata. ``bytes``: at the example's sizes."""

    dtype: str
    shape: tuple[Size, ...]
    stride: tuple[Size, ...]
    bytes: int


@dataclass(frozen=True)
class Node:
    """``operator``: "placeholder", "weight", "constant", "graph", "output", or an operator's full name. ``inputs``: the
    nodes that it reads, each once. ``tensors``: one for each item of its value, None if the item is not a tensor;
    ``several``: the value is a list of items."""

    operator: str
    name: str
    inputs: tuple[int, ...]
    call: str  # a description of its arguments
    tensors: tuple[TensorInfo | None, ...]
    several: bool
    line: int  # in Drawing.lines, or -1
    index: int = -1  # of an item that is taken out of a list

    @property
    def computes(self) -> bool:
        """Return whether it computes a tensor from others; sizes, weights, inputs and the output do not."""
        return self.operator not in KINDS and any(self.tensors) and self.operator != "operator:getitem"

    @property
    def short(self) -> str:
        """Return the operator without its namespace and overload: "convolution"."""
        if ":" in self.operator:
            return self.operator.partition(":")[2]
        return self.operator.split(".")[1] if "." in self.operator else self.operator


KINDS = ("placeholder", "weight", "constant", "graph", "output")


@dataclass(frozen=True)
class Drawing:
    """``results``: the node behind each result of the library, or -1. ``sizes``: each symbol's value at the example."""

    library: str
    nodes: tuple[Node, ...]
    lines: tuple[Line, ...]
    results: tuple[int, ...]
    sizes: dict[str, int] = field(default_factory=dict)

    @cached_property
    def placeholders(self) -> tuple[int, ...]:
        return tuple(i for i, n in enumerate(self.nodes) if n.operator == "placeholder")


def drawings(archive: Archive) -> dict[str, Drawing]:
    """Return the drawing of every library with a portable graph. Raise :class:`PackageError` naming a damaged graph and
    the node in it."""
    return {
        name: _drawing(name, archive, spec.graph) for name, spec in archive.manifest.libraries.items() if spec.graph
    }


def _drawing(name: str, archive: Archive, member: str) -> Drawing:
    form = form_of(archive.read_member(member), name)
    try:
        lines = tuple(map(_line, form["lines"]))
        sizes = _sizes(form.get("sizes", {}))
        nodes: list[Node] = []
        for parts, node_name, metadata, place in zip(
            form["nodes"], form["names"], form["looks"], form["places"], strict=True
        ):
            try:
                nodes.append(_node(parts, node_name, metadata, place, nodes, len(lines), sizes))
            except _Malformed as error:
                raise _Malformed(f"node {len(nodes)}: {error}") from error
        outputs = [n for n in form["nodes"] if n[0] == "output"]
        if len(outputs) != 1 or nodes[-1].operator != "output" or not isinstance(outputs[0][1], list):
            raise _Malformed("expected one output, as the last node")
        results = tuple(r["node"] if isinstance(r, dict) and "node" in r else -1 for r in outputs[0][1])
    except (_Malformed, RecursionError) as error:
        raise PackageError(
            f"corrupt package {archive.path}: the portable graph {name} cannot be drawn: {clean(str(error))}"
        ) from error
    return Drawing(name, tuple(nodes), lines, results, sizes)


class _Malformed(Exception):
    """A part of a graph violates the format."""


def _line(form: Any) -> Line:
    kinds = (str, int, str, str, str)
    if not isinstance(form, list) or len(form) != 5 or not all(type(v) is k for v, k in zip(form, kinds, strict=True)):
        raise _Malformed("a line: expected file, number, function, text and submodule")
    return Line(*form)


def _sizes(form: Any) -> dict[str, int]:
    if not isinstance(form, dict) or not all(type(v) is int for v in form.values()):
        raise _Malformed("its sizes are not numbers")
    return form


def _node(
    parts: Any, name: Any, metadata: Any, place: Any, before: list[Node], lines: int, sizes: Mapping[str, int]
) -> Node:
    if not isinstance(parts, list) or not parts or not isinstance(parts[0], str):
        raise _Malformed("it has no operator")
    operator = parts[0]
    expected = {"placeholder": 1, "constant": 1, "weight": 2, "graph": 2, "output": 2}.get(operator, 3)
    if len(parts) != expected or not isinstance(name, str) or type(place) is not int or not -1 <= place < lines:
        raise _Malformed("its parts, name or place do not match the format")
    inputs: dict[int, None] = {}
    call = ""
    if operator == "weight":
        name = parts[1] if isinstance(parts[1], str) else name
    elif operator == "graph":
        call = (
            f"a body of {len(parts[1]['nodes'])} nodes"
            if isinstance(parts[1], dict) and isinstance(parts[1].get("nodes"), list)
            else ""
        )
    elif expected > 1:
        _reads(parts[1:], len(before), inputs)
        call = ", ".join(_arguments(parts, before))
    index = -1
    if (
        operator == "operator:getitem"
        and isinstance(parts[1], list)
        and len(parts[1]) == 2
        and type(parts[1][1]) is int
    ):
        index = parts[1][1]
    several = isinstance(metadata, list) and not (len(metadata) == 3 and isinstance(metadata[0], str))
    tensors = tuple(_tensor(v, sizes) for v in (metadata if several else [metadata]))
    shortened = call if len(call) <= _LONGEST_CALL else f"{call[: _LONGEST_CALL - 1]}…"
    return Node(operator, clean(name), tuple(inputs), shortened, tensors, several, place, index)


def _tensor(form: Any, sizes: Mapping[str, int]) -> TensorInfo | None:
    if form is None or form == []:
        return None
    if (
        not isinstance(form, list)
        or len(form) != 3
        or not isinstance(form[0], str)
        or not all(isinstance(s, list) for s in form[1:])
    ):
        raise _Malformed("its looks: expected dtype, sizes and strides")
    dtype, shape, stride = form
    if not all(type(s) in (int, str) for s in (*shape, *stride)):
        raise _Malformed("a size of its value is neither a number nor an expression")
    try:
        count = dtype_of(dtype).itemsize
        for size in shape:
            count *= evaluate(size, sizes)
    except (InputError, PackageError) as error:
        raise _Malformed(str(error)) from error
    if not 0 <= count < LARGEST:
        raise _Malformed(f"its value has {count} bytes; expected 0 to {LARGEST - 1}")
    return TensorInfo(dtype, tuple(shape), tuple(stride), count)


def _reads(form: Any, before: int, out: dict[int, None]) -> None:
    """Add to ``out`` the nodes that occur anywhere in ``form``, in their order."""
    if isinstance(form, list):
        for value in form:
            _reads(value, before, out)
    elif isinstance(form, dict):
        if len(form) != 1:
            raise _Malformed(f"an argument: expected an object with one key, got {len(form)} keys")
        ((kind, value),) = form.items()
        if kind == "node":
            if type(value) is not int or not 0 <= value < before:
                raise _Malformed(f"it reads node {value}, which does not come before it")
            out[value] = None
        elif kind == "map":
            if not isinstance(value, dict):
                raise _Malformed("a map is not an object")
            for inner in value.values():
                _reads(inner, before, out)


def _arguments(parts: list[Any], before: list[Node]) -> list[str]:
    positional = [_worded(v, before) for v in parts[1]] if isinstance(parts[1], list) else [_worded(parts[1], before)]
    keywords = parts[2]["map"] if len(parts) > 2 and isinstance(parts[2], dict) and "map" in parts[2] else {}
    return positional + [f"{k}={_worded(v, before)}" for k, v in keywords.items()]


def _worded(form: Any, before: list[Node]) -> str:
    if isinstance(form, list):
        return f"[{', '.join(_worded(v, before) for v in form)}]"
    if not isinstance(form, dict):
        return repr(form) if not isinstance(form, str) else f"'{form}'"
    ((kind, value),) = form.items()
    if kind == "node":
        return before[value].name[:_LONGEST_NAME]
    if kind == "map":
        return "{" + ", ".join(f"{k}: {_worded(v, before)}" for k, v in value.items()) + "}"
    if kind == "float" and isinstance(value, str):
        try:
            return f"{float.fromhex(value):g}"
        except (ValueError, OverflowError) as error:
            raise _Malformed(f"{value!r} is not a hexadecimal number") from error
    return str(value)
