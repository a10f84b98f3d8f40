"""Whether a recorded pass of a package computes what the tape of this process does: checked when a structure is bound, before native code runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set
from typing import Any

from ..errors import PackageError
from ..format.manifest import PassSpec, Segment
from ..package.recorded_pass_checks import parse_operand
from .tape import CALLS_OUT, Op, Slot, Tape, slots


def check_against_tape(spec: PassSpec, tape: Tape) -> None:
    """:class:`PackageError` where the steps of ``spec`` do not compute what ``tape`` does: each operation once, each value before it is read,
    none that calls Python or writes a leaf hidden in a compiled graph."""
    if sorted(n for s in spec.segments for n in s.ops) != list(range(len(tape.ops))):
        raise PackageError("a recorded pass does not run each operation of its tape once")
    walk = _Walk()
    for number, segment in enumerate(spec.segments):
        try:
            walk.step(segment, [tape.ops[n] for n in segment.ops])
        except PackageError as error:
            raise PackageError(f"a recorded pass, step {number}: {error}") from error
    walk.read(tape.outputs)
    for op, grad in walk.fresh:
        if walk.reads[grad] != 1:
            raise PackageError(f"a recorded pass: operation {op} cannot hand over its gradient: {walk.reads[grad] - 1} others read it")


class _Walk:
    """Along the steps of a pass: which values are known, which came out of compiled graphs, how often each is read, and which become the memory
    of a leaf's gradient."""

    def __init__(self) -> None:
        self.known: set[int] = set()
        self.native: set[int] = set()
        self.reads: Counter[int] = Counter()
        self.fresh: list[tuple[Op, int]] = []

    def step(self, segment: Segment, ops: Sequence[Op]) -> None:
        inside = set[int]()
        for op in ops:
            plain = op.kind == "custom" and op.operands[4]  # its code is in the fingerprint (custom_function.py)
            if segment.library and ((op.kind in CALLS_OUT and not plain) or op.kind == "accumulate"):
                raise PackageError(f"{segment.library} stands for operation {op}, which no graph can hold")
            self.read(op.operands, inside)
            inside.update(r for r in op.results if r >= 0)
        if not segment.library:
            if segment.operands:
                self._hand_over(ops[0])
            self.known |= inside
            return
        for kind, where in map(parse_operand, segment.operands):
            if kind == "value" and where not in self.known:
                raise PackageError(f"value:{where} is passed to {segment.library}, and no earlier step gives it")
        given = {*segment.results, *segment.undefined}
        if not given <= inside:
            raise PackageError(f"{segment.library} gives %v{min(given - inside)}, which is no result of its operations")
        self.native.update(segment.results)
        self.known |= given

    def read(self, operands: Any, inside: Set[int] = frozenset()) -> None:
        for slot in slots(operands):
            if slot.kind == "value":
                if slot.index not in self.known and slot.index not in inside:
                    raise PackageError(f"%v{slot.index} is read, and no earlier step gives it")
                self.reads[slot.index] += 1

    def _hand_over(self, op: Op) -> None:
        grad = op.operands[1] if op.kind == "accumulate" else None
        if not isinstance(grad, Slot) or grad.kind != "value" or grad.index not in self.native:
            raise PackageError(f"operation {op} cannot hand over its gradient: no compiled graph made it")
        self.fresh.append((op, grad.index))
