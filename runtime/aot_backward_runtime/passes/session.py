"""``replay(path)``: run the backward passes of an unmodified script from a package. ``docs/replay.md`` explains it.

A pass is *bound* when the engine first meets its structure in this process: its tape is recorded, the fingerprint
looked up, and the package's code put in the engine's cache. Later passes are found in that cache (a *hit*). If the
package has no code for a pass (a *miss*), its tape is interpreted, which gives eager's gradients. Misses are counted,
and logged once per reason.
"""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from .. import torch_api
from ..errors import AotBackwardError, InputError, MissError
from ..loader import Package, load
from ..operators import describe_missing_operators, unregistered
from ..optimizer_steps import interception
from ..package.signatures import Key
from ..tapes.interpreter import Run
from ..tapes.node_order import eager_order
from ..tapes.recorder import Recorded, Recorder, Refused
from ..tapes.tape import Slot, Tape
from . import origin
from .call_sites import CallSites
from .compiled_pass import Match
from .engine import MIXED_PRECISION, UNSERVED, Engine
from .pass_contract import Operands, why_unsupported
from .replay_report import Report
from .served_steps import ServedSteps, StepObserver
from .structure import Structure
from .structure_table import MAX_STRUCTURES, StructureTable

log = logging.getLogger("aot_backward.replay")
_LOGGED = 64  # different warnings in one context: bounds the log; further reasons are only in the report. A guess
# Passes of unknown structure that are recorded after the engine's cache was emptied, to bind the package's structures
# again
_ATTEMPTS = 64
# Afterwards, record about one pass of unknown structure in 64, because recording takes ten times as long as eager
_LARGEST_SKIP = 128


class PassObserver(Protocol):
    """An observer of the passes of a script that is recorded."""

    def before(
        self, replaying: Replaying, roots: Sequence[Any], inputs: Sequence[Any]
    ) -> Callable[[float], None] | None:
        """See :meth:`.engine.Handler.before`."""

    def interpret(self, replaying: Replaying, structure: Structure, operands: Operands) -> list[torch.Tensor | None]:
        """Run a pass that the package does not serve."""

    def ended(self, seconds: float) -> None:
        """Handle the end of a pass that the engine walked. ``seconds``: its time outside of the pass itself."""


class Replaying:
    """The context of :func:`replay`. It handles the passes that the engine sees.

    With an ``observer`` the engine walks every pass, and the observer runs the misses.

    Attributes:
        report: The counts of the passes inside, a :class:`Report`.
        tapes: The tapes of the passes met, in order.
    """

    def __init__(
        self,
        package: Package | None,
        entry: str | None = None,
        *,
        strict: bool = False,
        max_structures: int = MAX_STRUCTURES,
        optimizer: bool = True,
        observer: PassObserver | None = None,
        step_observer: StepObserver | None = None,
    ):
        self.report = Report()
        self.strict, self._observer = strict, observer
        self.looks_at_all = strict or observer is not None or package is None
        self.engine = Engine(self, may_leave=not self.looks_at_all)
        self.steps = ServedSteps(package if optimizer else None, entry, self.report, step_observer)
        self.sites = CallSites()
        self.table = StructureTable(package, entry, max_structures, by_nodes=observer is None, slower=self.looks_at_all)
        self.tapes = self.table.tapes
        self._logged: set[str] = set()
        self._random = random.Random(0)  # noqa: S311
        self._bound: list[_BoundPass] = []  # the contents of the engine's cache
        # Structures with hits that the cache held when it was last emptied, minus structures bound since
        self._to_rebind = 0
        self._attempts_left = 0  # passes to record at most to bind all of them again
        self._skip = 0  # passes until the next attempt afterwards

    def __enter__(self) -> Replaying:
        self.engine.__enter__()
        if self.engine.may_leave and not self.table.serves:
            self.engine.take_out()
        if self.steps:
            interception.enter(self.steps)
        return self

    def __exit__(self, *error: object) -> None:
        self.engine.__exit__()
        self.report.passes += self.engine.not_looked_at
        self.report.eager.note(
            _LEFT if self.table.serves else "the package has no backward pass that is faster than eager's",
            self.engine.not_looked_at,
        )
        self.engine.not_looked_at = 0
        if self.steps:
            interception.leave(self.steps)

    def clear_cache(self) -> None:
        """Unbind all structures; the next pass of each is a binding pass again."""
        self.engine.clear_cache()

    def is_cache_empty(self) -> bool:
        """Return whether nothing is bound."""
        return torch_api.is_cache_empty()

    # -- called by the engine

    def recorder(self) -> Recorder:
        if self.table.full and not self.strict and not self._is_worth_recording():
            self._note_site(served=False)
            raise Refused(self.table.why_full())
        return Recorder(lambda names: eager_order(self.engine.roots, self.engine.targets, names), self._bind)

    def before(self, roots: Sequence[Any], inputs: Sequence[Any]) -> Callable[[float], None] | None:
        if self._observer is not None:
            return self._observer.before(self, roots, inputs)
        if self.looks_at_all or not self.sites.is_unserved(roots):
            return None
        self.report.passes += 1  # before it runs: it may raise
        self.report.eager.note(_NOT_SERVED)
        return _nothing

    def left_to_eager(self, reason: str) -> None:
        self.report.passes += 1
        self.report.eager.note(reason)
        self._log_once(f"a backward pass ran in eager: {reason}")

    def ended(self) -> None:
        if self._observer is not None:
            self._observer.ended(self.engine.reached - self.engine.began + time.perf_counter() - self.engine.left)

    def forgot(self) -> None:
        self._to_rebind = sum(bound.served for bound in self._bound)
        self._attempts_left = _ATTEMPTS + 2 * self._to_rebind if self._to_rebind else 0
        self._bound.clear()

    def _bind(self, recorded: Recorded) -> Callable[..., Any]:
        bound = _BoundPass(self, recorded)
        self.engine.largest = max(self.engine.largest, len(bound.tape.nodes))
        if not self.table.knows(bound.structure):
            why = self.table.why_full()
            raise MissError(f"{why} (replay is strict)") if self.strict else Refused(why)
        self.report.bindings += 1
        self._bound.append(bound)
        self._to_rebind -= 1
        return bound

    def _is_worth_recording(self) -> bool:
        """Return whether to record a pass that the engine does not know although the table is full: the table may have
        its structure.

        Recording takes about ten times as long as eager. So after the engine's cache was emptied, record until every
        structure that had a hit is bound again, and then about one pass in 64.
        """
        if self._attempts_left > 0 and self._to_rebind > 0:
            self._attempts_left -= 1
            return True
        self._skip -= 1
        if self._skip > 0:
            return False
        self._skip = self._random.randrange(1, _LARGEST_SKIP)
        return True

    def compute(self, structure: Structure, operands: Operands, binding: bool) -> list[torch.Tensor | None]:
        """Run one pass: by compiled code if a variant fits, else interpreted (a miss). ``binding``: the first of its
        structure."""
        self.report.passes += 1
        try:
            if torch.is_anomaly_enabled():
                raise InputError("anomaly mode looks at every node: the tape is interpreted")
            if structure.spec is None:
                raise InputError(
                    self.table.difference(structure.tape) if self.table.knows(structure) else self.table.why_full()
                )
            if structure.missing:
                structure.missing = unregistered(structure.missing)  # the script may have registered them by now
                if structure.missing:
                    raise InputError(
                        f"the package {describe_missing_operators(structure.missing, self.table.operators)}"
                    )
            match = structure.match(operands)
            match.variant.check_leaves(operands)
        except InputError as error:
            miss = str(error)
        else:
            self._note_site(served=True)
            return self._run_compiled(structure, operands, match, binding)
        self._note_site(served=False)
        miss = f"{miss}; backward called at {origin.line()}: {_advice(structure.tape, operands)}"
        if self.strict:
            raise MissError(f"{miss} (replay is strict)")
        if self._observer is not None:
            # Not in the except block: a hook's error must not get our __context__
            return self._observer.interpret(self, structure, operands)
        self._missed(miss)
        return self.interpret(structure, operands)

    def _note_site(self, *, served: bool) -> None:
        if not self.looks_at_all:
            self.sites.note(self.engine.roots, served=served)

    def _run_compiled(
        self, structure: Structure, operands: Operands, match: Match, binding: bool
    ) -> list[torch.Tensor | None]:
        results = match.variant.run(operands, match, self.engine.calling_out, self._missed)
        self.engine.unserved = 0
        self.report.compiled += 1
        if not binding:
            self.report.hits += 1
        return results

    def interpret(self, structure: Structure, operands: Operands) -> list[torch.Tensor | None]:
        """Run the tape of the pass, operation by operation."""
        return self.interpreter(operands).execute(structure.tape.ops, structure.tape.outputs)

    def interpreter(self, operands: Operands) -> Run:
        return Run(
            operands.inputs, operands.sizes, operands.scalars, operands.hooks, operands.packed, self.engine.calling_out
        )

    def _missed(self, reason: str) -> None:
        if self._observer is not None:
            return
        self.report.misses.note(reason)
        self._log_once(f"a backward pass was interpreted: {reason}")

    def _log_once(self, message: str) -> None:
        if message not in self._logged and len(self._logged) < _LOGGED:
            self._logged.add(message)
            log.warning(
                "%s%s", message, "; further reasons are only in the report" if len(self._logged) == _LOGGED else ""
            )


class _BoundPass:
    """The engine's cache entry for a structure, which it calls for each of its passes."""

    def __init__(self, session: Replaying, recorded: Recorded):
        self.session, self.recorded = session, recorded
        self.binding = True
        self.served = False
        self.order = recorded.order
        self.tape = recorded.arranged(recorded.order)
        self.structure = session.table.find(self.tape)

    def _follow_order(self) -> None:
        """Follow eager's order of nodes (that of the forward), which the engine's cache does not know."""
        order = eager_order(self.session.engine.roots, self.session.engine.targets, self.tape.nodes)
        if order is not None and order != self.order:
            self.order, self.tape = order, self.recorded.arranged(order)
            self.structure = self.session.table.find(self.tape)

    def __call__(
        self,
        inputs: list[torch.Tensor],
        sizes: list[int],
        scalars: list[Any],
        hooks: tuple[Any, ...],
        packed: tuple[Any, ...] = (),
    ) -> list[torch.Tensor | None]:
        engine = self.session.engine
        engine.running, engine.reached = True, time.perf_counter()
        # Too late for eager: the engine has released the graph's saved tensors
        if hooks and any(map(torch_api.fires_reducer, hooks)):
            raise AotBackwardError(MIXED_PRECISION)
        binding, self.binding = self.binding, False
        self.served = not binding
        if not binding and (self.tape.order_matters or (self.structure.spec is None and self.tape.order_rounds)):
            self._follow_order()
        if len(self.recorded.picked) != len(inputs):
            inputs = [inputs[i] for i in self.recorded.picked]
        results = self.session.compute(self.structure, Operands(inputs, sizes, scalars, hooks, packed), binding)
        if engine.callbacks:
            engine.final_callbacks()
        engine.left = time.perf_counter()
        return results


def replay(
    path: str | os.PathLike[str],
    *,
    entry: str | None = None,
    strict: bool = False,
    imports: Sequence[str] = (),
    key: Key | None = None,
    max_structures: int = MAX_STRUCTURES,
    optimizer: bool = True,
) -> Replaying:
    """Return a context that runs backward passes, optimizer steps and clippings of a script from a package.

    Passes that the package does not hold are interpreted, with eager's gradients. After three of them from one place in
    the script, further ones from there run in eager; so do passes that the engine refuses. After 1,000 unserved passes
    in a row, all further passes run in eager. A pass is interpreted if an operator that it calls is not registered when
    it runs.

    The engine's setting is process-wide: enter once, around everything that trains.

    Args:
        path: The package, as ``record`` writes it.
        entry: The name of the ``replay`` entry; a sole one needs none.
        strict: Whether a pass that the package does not hold raises :class:`MissError`. Every pass is checked then.
        imports: As for :func:`load`.
        key: As for :func:`load`.
        max_structures: The number of structures that the package does not hold after which new ones run in eager. It
            bounds time and memory for a script that keeps changing its structure. Bound structures are still served.
        optimizer: Whether steps of ``torch.optim`` optimizers, ``clip_grad_norm_`` and ``clip_grad_value_`` run
            compiled too, if the package has code for them, on the script's own parameters, gradients and state. Calls
            that do not fit (the first step, which makes the state; an absent gradient) run in eager.

    Returns:
        The context; its ``report`` counts hits, misses and fallbacks.

    Raises:
        AotBackwardError: The package has no ``replay`` entry, or several and ``entry`` names none; and the errors of
            :func:`load`.

    Examples:
        >>> with replay("passes.pt2") as replaying:
        ...     net(torch.randn(4, 8)).sum().backward()
        >>> replaying.report.passes
        1
    """
    package = load(path, imports=imports, key=key)
    return Replaying(package, entry, strict=strict, max_structures=max_structures, optimizer=optimizer)


def _nothing(seconds: float) -> None:
    pass


_ADVICE = "record such a pass too, into the same file (passes that are not faster than eager are left out; --tune none keeps them)"

_NOT_SERVED = "called from a place where the package had no code for the last passes"
_LEFT = f"after {UNSERVED} passes in a row without compiled code"


def _advice(tape: Tape, operands: Operands) -> str:
    """Return the advice for a miss."""
    for index, tensor in enumerate(operands.inputs):
        if why := why_unsupported(tensor):
            user = tape.user_of(Slot("input", index))
            return f"tensor {index} (of {user}) is {why}, and record cannot compile such a pass; use plain, dense tensors there in the forward"
    return _ADVICE
