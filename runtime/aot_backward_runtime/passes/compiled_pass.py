"""Runs recorded passes: which compiled variant serves this one, and its segments in eager's order."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from .. import torch_api
from ..errors import InputError
from ..format.expressions import evaluate
from ..format.manifest import PassSpec, Segment, StructureSpec, SymbolSpec, TensorSpec
from ..native.guards import Contract, Fast, check_ambient, check_kind, with_strides
from ..native.library import Library
from ..native.memory import meet
from ..operators import unregistered
from ..package.recorded_pass_checks import check_against
from .interpreter import Run
from .tape import CALLS_OUT, Op, Slot, Tape

_ADVICE = re.compile(r"(: (export|pass|call it so)\b|; export\b).*")
"""What the guards advise the caller of an exported entry, who passes the tensors; nobody passes those of a backward pass."""
_REMEMBERED = 1024  # lists of shapes with a fast check, per structure

Outside = Callable[[], AbstractContextManager[None]]
"""Entered while a hook or a custom function of the pass is called."""
Missed = Callable[[str], None]


@dataclass(frozen=True)
class Operands:
    """What the engine hands over for one pass. ``inputs``: the tape's, in its order."""

    inputs: list[torch.Tensor]
    sizes: list[int]
    scalars: list[int | float]
    hooks: tuple[Any, ...]
    packed: tuple[Any, ...]


@dataclass(frozen=True)
class Admitted:
    """A pass that a variant serves: its tensors as native code may have them, and the symbols' values."""

    variant: CompiledPass
    fitting: Sequence[torch.Tensor]
    values: Mapping[str, int]


class PassContract(Contract):
    """What the tensors and sizes of a pass must be. Strides must be the recorded ones: a gradient takes them over."""

    def __init__(self, spec: PassSpec, device: torch.device | None = None, tape: Tape | None = None):
        """``tape``: for the words of errors."""
        super().__init__(spec.inputs, spec.symbols, spec.guards, device)
        self.spec, self.tape = spec, tape
        self._sizes: Sequence[int] = ()

    def admit_pass(self, operands: Operands) -> tuple[Sequence[torch.Tensor], dict[str, int], bool]:
        """The tensors, the symbols' values, and whether all tensors went in as they were; :class:`InputError` says what does not fit."""
        spec = self.spec
        if len(operands.inputs) != len(spec.inputs) or len(operands.sizes) != len(spec.sizes) or len(operands.scalars) != len(spec.scalars):
            raise InputError("the pass has another number of tensors or sizes than the recorded one")
        for tensor, expected, dtype in zip(operands.inputs, self.specs, self.dtypes, strict=True):
            check_kind(tensor, expected, dtype, self.device)
        self._sizes = operands.sizes
        values = self.solve(operands.inputs)
        for i, (size, wanted) in enumerate(zip(operands.sizes, spec.sizes, strict=True)):
            if size != evaluate(wanted, values):
                raise InputError(f"{self._size_words(i)} is {size}; expected {self.words(str(wanted))}")
        for i, (scalar, wanted_scalar) in enumerate(zip(operands.scalars, spec.scalars, strict=True)):
            if repr(scalar) != repr(wanted_scalar):
                raise InputError(f"scalar {i} of the pass is {scalar}; expected {wanted_scalar}")
        fitting, untouched = [], True
        for tensor, expected in zip(operands.inputs, self.specs, strict=True):
            wanted_strides = tuple(evaluate(s, values) for s in expected.stride)
            if any(n > 1 and s != w for n, s, w in zip(tensor.shape, tensor.stride(), wanted_strides, strict=True)):
                raise InputError(f"{expected.name} has strides {tensor.stride()}; expected {wanted_strides}")
            fitting.append(with_strides(tensor, expected, values, self.device))
            untouched = untouched and fitting[-1] is tensor
        return fitting, values, untouched

    def symbol_values(self, shapes: Sequence[Sequence[int]], sizes: Sequence[int]) -> dict[str, int]:
        """The symbols' values in a pass of these shapes and sizes, unchecked."""
        return {s.name: sizes[s.dim] if s.input < 0 else shapes[s.input][s.dim] for s in self.symbols}

    def _size(self, symbol: SymbolSpec, tensors: Sequence[torch.Tensor]) -> int:
        return self._sizes[symbol.dim] if symbol.input < 0 else super()._size(symbol, tensors)

    def _place(self, symbol: SymbolSpec) -> str:
        return self._size_words(symbol.dim) if symbol.input < 0 else super()._place(symbol)

    def _size_words(self, number: int) -> str:
        return f"size {number} of the pass" + (f" (of {self.tape.user_of(Slot('size', number))})" if self.tape else "")


class CompiledPass:
    """A variant made ready."""

    def __init__(self, spec: PassSpec, tape: Tape, libraries: Mapping[str, Library], constants: Mapping[str, torch.Tensor]):
        self.spec, self.tape = spec, tape
        self.contract = PassContract(spec, next((library.device for library in libraries.values()), None), tape)
        self.device = next((s.device for s in spec.inputs), "cpu")
        self._binding = (constants, ())
        self._libraries = libraries
        self._calls_out = any(op.kind in CALLS_OUT for op in tape.ops)
        self._leaves = [op.operands[0].index for op in tape.ops if op.kind == "accumulate"]

    def check_leaves(self, operands: Operands) -> None:
        """:class:`InputError` where a leaf's present gradient is memory that the pass reads: eager would add to it in between."""
        held = [g for i in self._leaves if (g := operands.inputs[i].grad) is not None and type(g) is torch.Tensor and g.layout is torch.strided]
        if held and meet(held, operands.inputs):
            raise InputError("the .grad of a leaf is a tensor that the pass reads")

    @cached_property
    def steps(self) -> list[_Call | _Accumulate | _Single]:
        """Made by the first pass that runs them, not before: what is wrong with a package is then its caller's error, where the engine takes one
        while it captures as a reason to leave the pass to eager."""
        return list(self._steps(self._libraries))

    def _steps(self, libraries: Mapping[str, Library]) -> Iterator[_Call | _Accumulate | _Single]:
        ops = self.tape.ops
        check_against(self.spec, self.tape)
        compiled: set[int] = set()  # values that come out of native code, whose looks are known
        python = False
        leaves: _Accumulate | None = None
        for segment in self.spec.segments:
            covered = [ops[n] for n in segment.ops]
            if segment.library:
                library = libraries[segment.library]
                yield _Call(library, segment, covered, compiled, self._binding, python)
                compiled.update(segment.results)
                leaves = None
            elif covered[0].kind == "accumulate" and isinstance(covered[0].operands[1], Slot):
                leaf, grad = covered[0].operands
                if leaves is None:
                    leaves = _Accumulate()
                    yield leaves
                leaves.add(covered[0], leaf.index, grad.index, segment.operands == ("fresh",))
            else:
                yield _Single(covered[0])
                python = python or covered[0].kind in CALLS_OUT
                leaves = None

    def run(self, operands: Operands, admitted: Admitted, outside: Outside, missed: Missed) -> list[torch.Tensor | None]:
        """The pass. Errors are those of hooks, of custom functions and of native code; ``.grad`` is then as far as eager would have come."""
        run = Run(operands.inputs, operands.sizes, operands.scalars, operands.hooks, operands.packed, outside)
        if self._calls_out:
            run.marks = list(map(_mark, operands.inputs))
        for step in self.steps:
            step(run, admitted, missed)
        return [run.get(o) for o in self.tape.outputs]


class _Call:
    """A compiled graph between two places where Python runs."""

    def __init__(self, library: Library, segment: Segment, ops: Sequence[Op], known: set[int], binding: Any, after_python: bool):
        """``after_python``: whether a hook or custom function of the pass runs before."""
        self.after_python = after_python
        self.library, self.segment, self.ops, self.binding = library, segment, ops, binding
        self.operands = [_parse(o) for o in segment.operands]
        self.checked = [(p, i, library.spec.inputs[p]) for p, (kind, i) in enumerate(self.operands) if kind == "value" and i not in known]
        self.simple = all(kind == "input" for kind, _ in self.operands)
        self.places = [i for _, i in self.operands]

    def __call__(self, run: Run, admitted: Admitted, missed: Missed) -> None:
        try:
            given = self._given(run, admitted)
        except InputError as error:
            missed(f"after Python code of the pass ran: {error}")
            for op in self.ops:
                run.step(op)
            return
        library = self.library
        with library.lock:
            library.bind(self.binding)
            results = library.run(given)
        for number, result in zip(self.segment.results, results, strict=True):
            run.values[number] = result
        for number in self.segment.undefined:
            run.values[number] = None

    def _given(self, run: Run, admitted: Admitted) -> list[torch.Tensor]:
        """What goes in; what Python code gave or may have changed since the pass was admitted is looked at again."""
        if self.after_python:
            for kind, where in self.operands:
                if kind == "input" and _mark(run.operands["input"][where]) != run.marks[where]:
                    raise InputError(f"{self.library.spec.member}: tensor {where} was laid out anew, or given other memory")
        for number in self.segment.absent:
            if run.values[number] is not None:
                raise InputError(f"the gradient %v{number} is defined; it was not when this was recorded")
        if self.simple:
            return [admitted.fitting[i] for i in self.places]
        given = []
        for kind, where in self.operands:
            if kind == "input":
                given.append(admitted.fitting[where])
            elif kind == "value":
                given.append(run.values[where])
            else:
                given.append(torch.empty((evaluate(where, admitted.values), 0)))
        for place, number, spec in self.checked:
            given[place] = _admit_value(run.values[number], spec, admitted.values, self.library.device)
        return given


class _Accumulate:
    """Leaves whose gradients are known, one after another."""

    def __init__(self) -> None:
        self.leaves: list[tuple[Op, int, int, bool]] = []

    def add(self, op: Op, leaf: int, grad: int, fresh: bool) -> None:
        self.leaves.append((op, leaf, grad, fresh))

    def __call__(self, run: Run, admitted: Admitted, missed: Missed) -> None:
        inputs, values = run.operands["input"], run.values
        sums: list[torch.Tensor] = []
        terms: list[torch.Tensor] = []
        for op, leaf, grad, fresh in self.leaves:
            tensor, new = inputs[leaf], values[grad]
            old = tensor.grad
            if new is None:
                continue
            if old is None and fresh:
                tensor.grad = new
            elif old is not None and old.layout is torch.strided and new.layout is torch.strided and type(old) is torch.Tensor:
                sums.append(old)
                terms.append(new)
            else:
                run.step(op)
        if sums:
            torch_api.foreach_add_(sums, terms)


class _Single:
    """One operation of the tape as it stands."""

    def __init__(self, op: Op):
        self.op = op

    def __call__(self, run: Run, admitted: Admitted, missed: Missed) -> None:
        run.step(self.op)


class Structure:
    """Passes of one fingerprint: the tape of this process, and what the package has for it."""

    def __init__(self, tape: Tape, spec: StructureSpec | None, libraries: Mapping[str, Library], constants: Mapping[str, torch.Tensor]):
        self.tape, self.spec = tape, spec
        self.variants = [CompiledPass(v, tape, libraries, constants) for v in (spec.variants if spec else ())]
        called = [s.library for v in self.variants for s in v.spec.segments if s.library]
        self.missing = unregistered(o for name in called for o in libraries[name].spec.operators)  # operators that nobody has registered yet
        self._telling = _telling([v.spec for v in self.variants])
        self._fast: dict[tuple[int, ...], _Remembered] = {}  # by the sizes that tell passes apart

    def admit(self, operands: Operands) -> Admitted:
        """The variant that serves a pass; :class:`InputError` says why none does.

        What was accepted before is found by the few sizes that differ between passes, so a hundred batch sizes cost what one does.
        """
        inputs, sizes = operands.inputs, operands.sizes
        try:
            key = tuple([sizes[d] if i < 0 else inputs[i].shape[d] for i, d in self._telling])
        except IndexError:  # a tensor of lower rank, which no variant serves
            key = ()
        known = self._fast.get(key)
        if known is not None and known.holds(operands):
            with contextlib.suppress(InputError):  # else another variant may be for this ambient state
                check_ambient(known.variant.spec.ambient, known.variant.device)
                return Admitted(known.variant, inputs, known.values)
        failures = []
        for variant in self.variants:
            try:
                check_ambient(variant.spec.ambient, variant.device)
                fitting, values, untouched = variant.contract.admit_pass(operands)
            except InputError as error:
                failures.append(_ADVICE.sub("", str(error)))
                continue
            if untouched:
                if len(self._fast) >= _REMEMBERED:
                    del self._fast[next(iter(self._fast))]
                self._fast[key] = _Remembered(variant, list(sizes), list(operands.scalars), Fast(inputs), values)
            return Admitted(variant, fitting, values)
        raise InputError("; ".join(dict.fromkeys(failures)))


@dataclass(frozen=True)
class _Remembered:
    """A list of shapes that a variant serves, as one check in C."""

    variant: CompiledPass
    sizes: list[int]
    scalars: list[int | float]
    fast: Fast
    values: Mapping[str, int]

    def holds(self, operands: Operands) -> bool:
        same = self.sizes == operands.sizes and repr(self.scalars) == repr(operands.scalars)  # -0.0 is not 0.0
        return same and self.fast.holds(operands.inputs)


def _telling(variants: Sequence[PassSpec]) -> list[tuple[int, int]]:
    """Where passes differ in size: (input, dimension), or (-1, number of the size)."""
    found = [(s.input, s.dim) for v in variants for s in v.symbols]
    if len(variants) > 1:
        first = variants[0]
        others = variants[1:]
        found += [(-1, k) for k, n in enumerate(first.sizes) if any(v.sizes[k : k + 1] != (n,) for v in others)][:8]
        for i, spec in enumerate(first.inputs):
            found += (
                [(i, d) for d, n in enumerate(spec.shape) if any(v.inputs[i].shape[d : d + 1] != (n,) for v in others)][:2] if len(found) < 16 else []
            )
    return list(dict.fromkeys(found))


def _admit_value(value: Any, spec: TensorSpec, values: Mapping[str, int], device: torch.device) -> torch.Tensor:
    if value is None:
        raise InputError(f"{spec.name} is undefined; a tensor was recorded")
    check_kind(value, spec, device=device)
    wanted = tuple(evaluate(s, values) for s in spec.shape)
    if value.shape != wanted:
        raise InputError(f"{spec.name} has shape {tuple(value.shape)}; expected {wanted}")
    return with_strides(value, spec, values, device)


def _mark(tensor: torch.Tensor) -> tuple[int, torch.Size, tuple[int, ...], torch.dtype]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _parse(operand: str) -> tuple[str, Any]:
    kind, _, rest = operand.partition(":")
    return kind, rest if kind == "size" else int(rest)
