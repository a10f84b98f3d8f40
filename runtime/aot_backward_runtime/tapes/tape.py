"""The tape: the operations that the autograd engine would run for one backward pass, in order.

A tape is a list of operations over slots. ``recorder.py`` writes it, :mod:`.interpreter` runs it,
``aot_backward.recording.pass_graphs`` traces it. In its canonical JSON form every size, scalar and tensor is a slot, so
two passes with one :meth:`Tape.fingerprint` differ only in those. A tape that was read back can be compared and printed
but not run: its functional backwards are C++ callables that the engine provides when it first meets a node type.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import torch

VERSION = 1
"""The version of the canonical form, part of every fingerprint.

1   2026-11-21  first version
"""


@dataclass(frozen=True)
class Slot:
    """An operand that differs between passes.

    ``kind``: "input" (a lifted tensor), "size", "scalar", "hook" (a Python callable or a custom function's context),
    "packed" (data that a saved-tensor hook packed), each numbered in the engine's order; or "value", the result of an
    earlier operation.
    """

    kind: str
    index: int

    def __str__(self) -> str:
        return f"%{_LETTER[self.kind]}{self.index}"


_LETTER = {"input": "t", "size": "s", "scalar": "c", "hook": "h", "packed": "p", "value": "v"}


@dataclass(frozen=True)
class Derived:
    """A size computed from others: ``operator`` is a name of :mod:`operator` ("add", "mul", "floordiv", …) or "min" or
    "max"."""

    operator: str
    operands: tuple[Any, ...]

    def __str__(self) -> str:
        return f"{self.operator}({', '.join(map(_show, self.operands))})"


KINDS = {
    "apply": "a node's functional backward: (gradients, arguments…) -> gradients",
    "validate": "(gradients, what each must look like) -> gradients: cast, summed to size, or an error",
    "add": "fan-in: (sum so far, one more) -> sum",
    "accumulate": "AccumulateGrad: (leaf, gradient) into the leaf's .grad",
    "custom": "a Python autograd.Function: (context, saved tensors, gradients, their metadata, '') -> gradients",
    "copy_slices_prologue": "of an in-place update of a view",
    "copy_slices_epilogue": "of an in-place update of a view",
    "zeros": "(sizes, dtype, device) -> zeros that a custom function gets for an undefined gradient",
    "unpack_hook": "saved-tensor hook: (hook, packed data) -> tensor",
    "tensor_pre_hook": "of a tensor: (hook, gradients, which) -> gradient",
    "cpp_tensor_pre_hook": "retain_grad and C++ hooks: (number, gradient) -> gradient",
    "pre_hook": "of a node: (hook, gradients) -> gradients",
    "post_hook": "of a node: (hook, its results, its gradients) -> results",
    "post_accumulate_hook": "of a leaf: (hook, leaf)",
}
HOOKS = frozenset(k for k in KINDS if k.endswith("_hook"))
CALLS_OUT = HOOKS | {"custom"}
"""Operations that call user code in Python."""


@dataclass(frozen=True)
class Op:
    """One operation. ``name``: the node type for "apply", the function for "custom", else "".

    ``operands``: slots, derived sizes and constants (None, bool, int, float, complex, str, device, dtype, layout),
    nested in lists and tuples. ``results``: numbers of the "value" slots that it fills, -1 for a dropped result.
    ``node``: the number of its autograd node.
    """

    kind: str
    name: str
    operands: tuple[Any, ...]
    results: tuple[int, ...]
    node: int = -1

    def __str__(self) -> str:
        results = ", ".join(f"%v{r}" if r >= 0 else "_" for r in self.results)
        return f"{results + ' = ' if results else ''}{self.name or self.kind}({', '.join(map(_show, self.operands))})"


@dataclass(frozen=True)
class Tape:
    """One backward pass. ``outputs``: the results of :func:`torch.autograd.grad`, value slots or None; empty for
    ``backward()``.

    ``inputs``, ``sizes``, ``hooks``, ``packed``: the number of slots of each kind. ``scalars``: their types. ``nodes``:
    the autograd nodes' names.
    """

    ops: tuple[Op, ...]
    outputs: tuple[Any, ...]
    inputs: int
    sizes: int
    scalars: tuple[str, ...]  # "int" or "float"
    hooks: int
    packed: int
    nodes: tuple[str, ...] = field(default=(), metadata={"derived": True})

    def __str__(self) -> str:
        counts = {
            "tensors": self.inputs,
            "sizes": self.sizes,
            "scalars": len(self.scalars),
            "hooks": self.hooks,
            "packed": self.packed,
        }
        head = f"tape of {len(self.nodes)} nodes, {len(self.ops)} operations; " + ", ".join(
            f"{n} {k}" for k, n in counts.items() if n
        )
        lines, last = [head], -1
        for op in self.ops:
            if op.node != last and 0 <= op.node < len(self.nodes):
                lines.append(f"# {self.nodes[op.node].rpartition('::')[2]} (node {op.node})")
            last = op.node
            lines.append(f"  {op}")
        lines.append(f"  return [{', '.join(map(_show, self.outputs))}]")
        return "\n".join(lines)

    @property
    def canonical(self) -> str:
        """The canonical JSON form: keys sorted, no spaces, without the nodes' names and numbers, which do not affect
        the result."""
        form: dict[str, Any] = {"version": VERSION, "torch": ".".join(torch.__version__.split(".")[:2])}
        for f in fields(self):
            if not f.metadata.get("derived"):
                value = getattr(self, f.name)
                form[f.name] = [_op_json(op) for op in value] if f.name == "ops" else encode(value)
        return json.dumps(form, sort_keys=True, separators=(",", ":"))

    @cached_property
    def _fingerprint(self) -> str:
        return hashlib.sha256(self.canonical.encode()).hexdigest()

    def fingerprint(self) -> str:
        """Return the SHA-256 of the canonical form, in hexadecimal."""
        return self._fingerprint

    @cached_property
    def order_matters(self) -> bool:
        """True if Python code can observe eager's order of nodes."""
        return any(op.kind in CALLS_OUT and op.kind != "unpack_hook" for op in self.ops)

    @cached_property
    def order_rounds(self) -> bool:
        """True if that order changes how a sum of three or more gradients is rounded."""
        sums = {op.results[0] for op in self.ops if op.kind == "add"}
        return any(s.index in sums for op in self.ops if op.kind == "add" for s in slots(op.operands))

    @cached_property
    def leaves(self) -> tuple[int, ...]:
        """The inputs that accumulate into ``.grad``, in that order, even if their gradient turns out undefined."""
        return tuple(op.operands[0].index for op in self.ops if op.kind == "accumulate")

    @cached_property
    def positions(self) -> frozenset[int]:
        """The size slots that are only positions in a view. Zero and one are not special there, unlike in a size."""
        places = [s.index for op in self.ops for s in slots(_positions(op)) if s.kind == "size"]
        read = Counter(s.index for op in self.ops for s in slots(op.operands) if s.kind == "size")
        return frozenset(n for n, count in Counter(places).items() if read[n] == count)

    def user_of(self, slot: Slot) -> str:
        """Return the first node that uses ``slot``, as text."""
        for op in self.ops:
            if any(s == slot for s in slots(op.operands)):
                return self.name_of(op)
        return "no node"

    def name_of(self, op: Op) -> str:
        """Return the node of ``op``, as text."""
        return (
            f"{self.nodes[op.node].rpartition('::')[2] if 0 <= op.node < len(self.nodes) else op.name}, node {op.node}"
        )


_POSITIONS = {"SliceBackward0": (3, 5), "SelectBackward0": (3,), "AsStridedBackward0": (2, 4)}
"""The operands that are positions, by node type. The first one of ``AsStridedBackward0`` is a geometry: only its last
part is a position."""


def _positions(op: Op) -> Sequence[Any]:
    if op.kind == "copy_slices_prologue":
        return op.operands[3], op.operands[6]
    operands = [op.operands[n] for n in _POSITIONS.get(op.name, ())] if op.kind == "apply" else []
    return [x[-1] if isinstance(x, tuple) else x for x in operands]


def slots(operand: Any) -> Iterator[Slot]:
    """Yield every slot in an operand, also inside derived sizes."""
    if isinstance(operand, Slot):
        yield operand
    elif isinstance(operand, Derived):
        for part in operand.operands:
            yield from slots(part)
    elif isinstance(operand, (list, tuple)):
        for part in operand:
            yield from slots(part)


def encode(value: Any) -> Any:
    """Return an operand as JSON. Lists stay lists; values that JSON does not have become an object with one key."""
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, Slot):
        return {value.kind: value.index}
    if isinstance(value, Derived):
        return {"op": [value.operator, *map(encode, value.operands)]}
    if type(value) is list:
        return [encode(v) for v in value]
    if isinstance(value, tuple):
        return {"tuple": [encode(v) for v in value]}
    if type(value) is float:
        return {"float": value.hex()}
    if type(value) is complex:
        return {"complex": [value.real.hex(), value.imag.hex()]}
    if isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format)):
        return {type(value).__name__: str(value).removeprefix("torch.")}
    raise TypeError(f"a tape cannot hold a {type(value).__module__}.{type(value).__qualname__}")


def _op_json(op: Op) -> dict[str, Any]:
    return {"kind": op.kind, "name": op.name, "operands": [encode(o) for o in op.operands], "results": list(op.results)}


def _show(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_show, value))}]"
    if isinstance(value, tuple):
        return f"({', '.join(map(_show, value))}{',' if len(value) == 1 else ''})"
    return str(value) if isinstance(value, (Slot, Derived, torch.dtype, torch.device)) else repr(value)
