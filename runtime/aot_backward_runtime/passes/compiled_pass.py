"""Run recorded passes by their compiled graphs: the steps of a variant in eager's order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from .. import torch_api
from ..errors import InputError, PackageError
from ..format.expressions import evaluate
from ..format.manifest import PassSpec, Segment
from ..native.library import Library
from ..native.memory import meet
from ..package.references import parse_operand
from ..tapes.interpreter import Run
from ..tapes.tape import CALLS_OUT, Op, Slot, Tape
from .pass_contract import Operands, PassContract, check_value

Outside = Callable[[], AbstractContextManager[None]]
"""Entered while a hook or a custom function of the pass is called."""
Missed = Callable[[str], None]
"""Called with the reason if a step is interpreted instead."""


@dataclass(frozen=True)
class Match:
    """A pass that a variant serves: its tensors, fit for native code, and the symbols' values."""

    variant: CompiledPass
    fitting: Sequence[torch.Tensor]
    values: Mapping[str, int]


class CompiledPass:
    """A variant of a recorded pass with the libraries that it calls."""

    def __init__(
        self, spec: PassSpec, tape: Tape, libraries: Mapping[str, Library], constants: Mapping[str, torch.Tensor]
    ):
        self.spec, self.tape = spec, tape
        self.contract = PassContract(spec, next((library.device for library in libraries.values()), None), tape)
        self.device = next((s.device for s in spec.inputs), "cpu")
        self._binding = (constants, ())
        self._libraries = libraries
        self._calls_out = any(op.kind in CALLS_OUT for op in tape.ops)

    def check_leaves(self, operands: Operands) -> None:
        """Raise :class:`InputError` if the pass reads the memory of a leaf's present gradient: eager would add to it in
        between."""
        held = [
            g
            for i in self.tape.leaves
            if (g := operands.inputs[i].grad) is not None and type(g) is torch.Tensor and g.layout is torch.strided
        ]
        if held and meet(held, operands.inputs):
            raise InputError("the .grad of a leaf is a tensor that the pass reads")

    @cached_property
    def steps(self) -> list[_Call | _Accumulate | _Single]:
        """The steps, created by the first pass that runs them. An error in the package is then raised to its caller;
        during a capture, the engine would take it as a reason to run the pass in eager."""
        return list(self._steps(self._libraries))

    def _steps(self, libraries: Mapping[str, Library]) -> Iterator[_Call | _Accumulate | _Single]:
        ops = self.tape.ops
        if (count := sum(len(s.ops) for s in self.spec.segments)) != len(ops):
            raise PackageError(
                f"a recorded pass: expected the {len(ops)} operations of its tape, got {count}. Record it again."
            )
        compiled: set[int] = set()  # values from native code, with known metadata
        python = False
        leaves: _Accumulate | None = None
        for segment in self.spec.segments:
            segment_ops = [ops[n] for n in segment.ops]
            if segment.library:
                library = libraries[segment.library]
                yield _Call(library, segment, segment_ops, compiled, self._binding, python)
                compiled.update(segment.results)
                leaves = None
            elif segment_ops[0].kind == "accumulate" and isinstance(segment_ops[0].operands[1], Slot):
                leaf, grad = segment_ops[0].operands
                if leaves is None:
                    leaves = _Accumulate()
                    yield leaves
                leaves.add(segment_ops[0], leaf.index, grad.index, segment.operands == ("fresh",))
            else:
                yield _Single(segment_ops[0])
                python = python or segment_ops[0].kind in CALLS_OUT
                leaves = None

    def run(self, operands: Operands, match: Match, outside: Outside, missed: Missed) -> list[torch.Tensor | None]:
        """Run the pass. If a hook, a custom function or native code raises, ``.grad`` is as far as eager would have
        come."""
        return self.execute(
            Run(operands.inputs, operands.sizes, operands.scalars, operands.hooks, operands.packed, outside),
            match,
            missed,
        )

    def execute(self, run: Run, match: Match, missed: Missed) -> list[torch.Tensor | None]:
        if self._calls_out:
            run.marks = list(map(_mark, run.operands["input"]))
        for step in self.steps:
            step(run, match, missed)
        return [run.get(o) for o in self.tape.outputs]


class _Call:
    """A compiled graph between two places where Python runs."""

    def __init__(
        self,
        library: Library,
        segment: Segment,
        ops: Sequence[Op],
        compiled: set[int],
        binding: Any,
        after_python: bool,
    ):
        """``after_python``: True if a hook or custom function of the pass runs before."""
        self.after_python = after_python
        self.library, self.segment, self.ops, self.binding = library, segment, ops, binding
        self.operands = [parse_operand(o) for o in segment.operands]
        self.checked = [
            (p, i, library.spec.inputs[p])
            for p, (kind, i) in enumerate(self.operands)
            if kind == "value" and i not in compiled
        ]
        self.simple = all(kind == "input" for kind, _ in self.operands)
        self.places = [i for _, i in self.operands]

    def __call__(self, run: Run, match: Match, missed: Missed) -> None:
        try:
            inputs = self._inputs(run, match)
        except InputError as error:
            missed(f"after Python code of the pass ran: {error}")
            for op in self.ops:
                run.step(op)
            return
        results = self.library.run_bound(self.binding, inputs)
        for number, result in zip(self.segment.results, results, strict=True):
            run.values[number] = result
        for number in self.segment.undefined:
            run.values[number] = None

    def _inputs(self, run: Run, match: Match) -> list[torch.Tensor]:
        """Return the inputs. Check tensors again if Python code returned them or may have changed them since the
        match."""
        if self.after_python:
            for kind, where in self.operands:
                if kind == "input" and _mark(run.operands["input"][where]) != run.marks[where]:
                    raise InputError(f"{self.library.spec.member}: tensor {where} has new strides or new memory")
        for number in self.segment.absent:
            if run.values[number] is not None:
                raise InputError(f"the gradient %v{number} is defined; it was not when this was recorded")
        if self.simple:
            return [match.fitting[i] for i in self.places]
        inputs = []
        for kind, where in self.operands:
            if kind == "input":
                inputs.append(match.fitting[where])
            elif kind == "value":
                inputs.append(run.values[where])
            else:
                inputs.append(torch.empty((evaluate(where, match.values), 0)))
        for place, number, spec in self.checked:
            inputs[place] = check_value(run.values[number], spec, match.values, self.library.device)
        return inputs


class _Accumulate:
    """Consecutive leaves with known gradients."""

    def __init__(self) -> None:
        self.leaves: list[tuple[Op, int, int, bool]] = []

    def add(self, op: Op, leaf: int, grad: int, fresh: bool) -> None:
        self.leaves.append((op, leaf, grad, fresh))

    def __call__(self, run: Run, match: Match, missed: Missed) -> None:
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
            elif (
                old is not None
                and old.layout is torch.strided
                and new.layout is torch.strided
                and type(old) is torch.Tensor
            ):
                sums.append(old)
                terms.append(new)
            else:
                run.step(op)
        if sums:
            torch_api.foreach_add_(sums, terms)


class _Single:
    """One interpreted operation of the tape."""

    def __init__(self, op: Op):
        self.op = op

    def __call__(self, run: Run, match: Match, missed: Missed) -> None:
        run.step(self.op)


def _mark(tensor: torch.Tensor) -> tuple[int, torch.Size, tuple[int, ...], torch.dtype]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
