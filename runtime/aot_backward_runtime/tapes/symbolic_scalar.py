"""A size or scalar of a pass that is being recorded: the methods of a SymNode that the autograd engine calls.

Arithmetic on it stays an expression (:class:`~.tape.Derived`). ``torch.fx``'s own SymNode needs a ShapeEnv, and with it
sympy."""

from __future__ import annotations

from typing import Any

from .tape import Derived


class SymbolicScalar:
    """The ``node`` of a SymInt or SymFloat that the engine holds."""

    def __init__(self, operand: Any, value: Any, decided: list[SymbolicScalar]):
        """``decided``: collects every scalar that the engine reads the value of."""
        self.operand, self.value, self.decided = operand, value, decided

    def is_int(self) -> bool:
        return type(self.value) is int

    def is_float(self) -> bool:
        return type(self.value) is float

    def is_bool(self) -> bool:
        return type(self.value) is bool

    def is_symbolic(self) -> bool:
        return True

    def is_constant(self) -> bool:
        return False

    def is_nested_int(self) -> bool:
        return False

    def has_hint(self) -> bool:
        return True

    def maybe_as_int(self) -> None:
        return None

    constant_int = constant_bool = maybe_as_float = nested_int = maybe_as_int

    def clone(self) -> SymbolicScalar:
        return self

    def wrap_int(self, value: int) -> SymbolicScalar:
        return SymbolicScalar(value, value, self.decided)

    wrap_float = wrap_bool = wrap_int

    def guard_int(self, file: str, line: int) -> Any:
        self.decided.append(self)
        return self.value

    guard_float = guard_bool = guard_int

    def int_(self) -> Any:
        return self.guard_int("", 0)

    def sym_float(self) -> SymbolicScalar:
        return self._derive("float", float(self.value))

    def neg(self) -> SymbolicScalar:
        return self._derive("neg", -self.value)

    def _derive(self, name: str, value: Any, *others: SymbolicScalar) -> SymbolicScalar:
        return SymbolicScalar(Derived(name, (self.operand, *(o.operand for o in others))), value, self.decided)

    def add(self, other: SymbolicScalar) -> SymbolicScalar:
        return self._derive("add", self.value + other.value, other)

    def sub(self, other: SymbolicScalar) -> SymbolicScalar:
        return self._derive("sub", self.value - other.value, other)

    def mul(self, other: SymbolicScalar) -> SymbolicScalar:
        return self._derive("mul", self.value * other.value, other)

    def mod(self, other: SymbolicScalar) -> SymbolicScalar:
        return self._derive("mod", self.value % other.value, other)

    def floordiv(self, other: SymbolicScalar) -> SymbolicScalar:
        return self._derive("floordiv", self.value // other.value, other)

    int_floordiv = floordiv

    def truediv(self, other: SymbolicScalar) -> SymbolicScalar:
        return self._derive("truediv", self.value / other.value, other)

    float_truediv = int_truediv = truediv

    def sym_min(self, other: SymbolicScalar) -> SymbolicScalar:
        return self._derive("min", min(self.value, other.value), other)

    def sym_max(self, other: SymbolicScalar) -> SymbolicScalar:
        return self._derive("max", max(self.value, other.value), other)

    # comparisons: the engine can only use one by reading its value, and then the tape would hold only for these sizes

    def eq(self, other: SymbolicScalar) -> SymbolicScalar:
        return self._derive("eq", self.value == other.value, other)

    def ne(self, other: SymbolicScalar) -> SymbolicScalar:
        return self._derive("ne", self.value != other.value, other)

    def lt(self, other: SymbolicScalar) -> SymbolicScalar:
        return self._derive("lt", self.value < other.value, other)

    def le(self, other: SymbolicScalar) -> SymbolicScalar:
        return self._derive("le", self.value <= other.value, other)

    def gt(self, other: SymbolicScalar) -> SymbolicScalar:
        return self._derive("gt", self.value > other.value, other)

    def ge(self, other: SymbolicScalar) -> SymbolicScalar:
        return self._derive("ge", self.value >= other.value, other)

    def str(self) -> str:
        return str(self.operand)

    _graph_repr = __str__ = __repr__ = str
