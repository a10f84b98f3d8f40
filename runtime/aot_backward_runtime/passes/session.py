"""``replay(path)``: the backward passes of an unmodified script, from a package. ``docs/replay.md`` explains it.

A pass is *bound* when the engine first meets its structure in this process: its tape is written, the fingerprint looked up, and what the
package has for it put in the engine's cache. From then on the engine's own cache answers (a *hit*). Where the package has nothing that
serves (a *miss*), the tape is interpreted: eager's gradients, counted, and logged once per reason.
"""

from __future__ import annotations

import logging
import os
import random
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from .. import torch_api
from ..errors import AotBackwardError, InputError, MissError
from ..loader import Package, load
from ..operators import describe_missing_operators, unregistered
from ..optimizer_steps import interception
from ..package.signature_policy import Key, Policy
from ..tapes.custom_function import PlainContext, digest_of
from ..tapes.interpreter import Run
from ..tapes.node_order import eager_order
from ..tapes.recorder import Recorded, Recorder, Refused
from ..tapes.tape import Slot, Tape
from . import origin
from .call_sites import CallSites
from .compiled_pass import Match
from .engine import MIXED_PRECISION, UNSERVED, Engine
from .pass_contract import Operands, why_unsupported
from .recorded_times import AROUND, SLOWER, eager_at
from .replay_report import NOT_TIMED, OTHER_SIZES, Report
from .served_steps import ServedSteps, StepObserver
from .structure import Structure
from .structure_table import MAX_STRUCTURES, StructureTable

log = logging.getLogger("aot_backward.replay")
_QUIET_AFTER_HITS = 8  # hits in a row after which the engine is no longer asked for its reasons, which cost it time
_EXPLANATIONS = 64  # new structures for which the engine says what was new: it copies all that it knows of the siblings, at each node
_LOGGED = 64  # messages
_ATTEMPTS = 64  # passes of unknown structure that are recorded after the engine's cache was emptied, to bind again what the package holds
_LARGEST_SKIP = 128  # passes of unknown structure between two that are recorded later on


class PassObserver(Protocol):
    """Sees the passes of a script that is recorded."""

    def before(self, replaying: Replaying, roots: Sequence[Any], inputs: Sequence[Any]) -> Callable[[float], None] | None:
        """:meth:`.engine.Handler.before`."""

    def interpret(self, replaying: Replaying, structure: Structure, operands: Operands) -> list[torch.Tensor | None]:
        """Run a pass that the package has nothing for."""

    def served(self, structure: Structure, seconds: float) -> None:
        """After a pass that ran compiled, in so many seconds."""

    def in_eager(self, seconds: float) -> None:
        """After a pass that was left to eager."""

    def ended(self, seconds: float) -> None:
        """After a pass that the engine had. ``seconds``: what it spent around the pass itself."""


class Replaying:
    """The context of :func:`replay`, which handles the passes that the engine sees. ``report``: a :class:`Report`; ``tapes``: what was met, in order.

    With an ``observer`` every pass is looked at, and the observer runs what the package does not have."""

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
        self.table = StructureTable(package, entry, max_structures, self._stop_explaining, by_nodes=observer is None, slower=self.looks_at_all)
        self.tapes = self.table.tapes
        self.layers = origin.Layers()
        self._logged: set[str] = set()
        self._hits_in_a_row = 0
        self._random = random.Random(0)  # noqa: S311
        self._explanations_left = _EXPLANATIONS
        self._bound: list[_BoundPass] = []  # what the engine's cache holds
        self._to_rebind = 0  # structures that the cache held when it was last emptied, and had a hit, less those bound since
        self._attempts_left = 0  # passes to record until all of those are bound again
        self._skip = 0  # passes until the next attempt after those

    def __enter__(self) -> Replaying:
        self.engine.__enter__()
        if self.engine.may_leave and not self.table.serves:
            self.engine.take_out()
        self.explain(True)
        if self.steps:
            interception.enter(self.steps)
        return self

    def __exit__(self, *error: object) -> None:
        torch_api.set_verbose_logger(None)
        self.engine.__exit__()
        self.report.passes += self.engine.not_looked_at
        self.report.eager.note(
            _LEFT if self.table.serves else "the package has no backward pass that is faster than eager's", self.engine.not_looked_at
        )
        self.engine.not_looked_at = 0
        if self.steps:
            interception.leave(self.steps)

    def clear_cache(self) -> None:
        """Forget what is bound; the next pass of each structure is a binding pass again."""
        self.engine.clear_cache()

    def _stop_explaining(self) -> None:
        self._explanations_left = 0
        self.explain(False)

    def is_cache_empty(self) -> bool:
        """Whether nothing is bound."""
        return torch_api.is_cache_empty()

    # -- what the engine calls

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

    def left_to_eager(self, reason: str, walked: float) -> None:
        self.report.passes += 1
        self.report.eager.note(reason)
        self.report.saved_against_eager -= walked
        self._log_once(f"a backward pass was left to eager: {reason}")

    def ran_in_eager(self, seconds: float) -> None:
        if self._observer is not None:
            self._observer.in_eager(seconds)

    def ended(self) -> None:
        if self._observer is not None:
            self._observer.ended(self.engine.reached - self.engine.began + time.perf_counter() - self.engine.left)

    def forgot(self) -> None:
        self._to_rebind = sum(bound.served for bound in self._bound)
        self._attempts_left = _ATTEMPTS + 2 * self._to_rebind if self._to_rebind else 0
        self._bound.clear()

    def _bind(self, recorded: Recorded, reasons: Sequence[str]) -> Callable[..., Any]:
        for reason in reasons:
            self.report.engine.note(reason)
            self._explanations_left -= 1
        bound = _BoundPass(self, recorded)
        self.engine.largest = max(self.engine.largest, len(bound.tape.nodes))
        if not self.table.knows(bound.structure):
            why = self.table.why_full()
            raise MissError(f"{why} (replay was told to be strict)") if self.strict else Refused(why)
        self.report.bindings += 1
        self.explain(True)
        self._bound.append(bound)
        self._to_rebind -= 1
        return bound

    def _is_worth_recording(self) -> bool:
        """Whether a pass that the engine does not know is recorded although the table is full: its structure may be one that the table has.

        Recording costs some ten times what eager does. So after the engine's cache was emptied, it is done until every structure that had a hit is
        bound again, and for one pass in some 64 besides.
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
        """Runs one pass: by compiled code if a variant fits, else interpreted (a miss). ``binding``: the first of its structure."""
        start = time.perf_counter()
        overhead = start - self.engine.began  # the engine's walk and, of a new structure, the recorder's
        self.report.passes += 1
        try:
            if torch.is_anomaly_enabled():
                raise InputError("anomaly mode looks at every node: the tape is interpreted")
            if structure.spec is None:
                raise InputError(self.table.difference(structure.tape) if self.table.knows(structure) else self.table.why_full())
            if structure.missing:
                structure.missing = unregistered(structure.missing)  # the script may have imported what registers them by now
                if structure.missing:
                    raise InputError(f"the package {describe_missing_operators(structure.missing, self.table.operators)}")
            match = structure.match(operands)
            match.variant.check_leaves(operands)
        except InputError as error:
            miss = str(error)
        else:
            self._note_site(served=True)
            return self._run_compiled(structure, operands, match, binding)
        self._note_site(served=False)
        miss = f"{miss}; {self.place(structure.tape, operands, _node_in(miss))}: {_advice(structure.tape, operands)}"
        if self.strict:
            raise MissError(f"{miss} (replay was told to be strict)")
        if self._observer is not None:
            return self._observer.interpret(self, structure, operands)  # outside of the handler: what a hook raises has no context of ours
        self._missed(miss)
        start = time.perf_counter()
        results = self.interpret(structure, operands)
        self.report.saved_against_eager -= overhead
        self.report.interpreted += time.perf_counter() - start
        return results

    def _note_site(self, *, served: bool) -> None:
        if not self.looks_at_all:
            self.sites.note(self.engine.roots, served=served)

    def _run_compiled(self, structure: Structure, operands: Operands, match: Match, binding: bool) -> list[torch.Tensor | None]:
        start = time.perf_counter()
        results = match.variant.run(operands, match, self.engine.calling_out, self._missed)
        self.engine.unserved = 0
        self.report.compiled += 1
        self._compare_with_eager(match)
        if not binding:
            self.report.hits += 1
            self._hits_in_a_row += 1
            if self._hits_in_a_row == _QUIET_AFTER_HITS:
                self.explain(False)
        if self._observer is not None:
            self._observer.served(structure, time.perf_counter() - start)
        return results

    def _compare_with_eager(self, match: Match) -> None:
        """The pass under way has run: counts what it gained or lost, or that this is not known."""
        seconds, speed = time.perf_counter() - self.engine.began, match.variant.spec.speed
        eager = eager_at(speed, match.values)
        if eager is not None:
            self.report.saved_against_eager += eager - seconds
            self.report.margin += (SLOWER - 1) * seconds + AROUND * 1e-6
        else:
            self.report.untimed.note(NOT_TIMED if speed is None else OTHER_SIZES)
            self.report.untimed_seconds += seconds

    def place(self, tape: Tape, operands: Operands, node: int | None) -> str:
        """Where in the script this pass was called, and the layer that ``node`` belongs to or follows."""
        leaf = tape.leaf_after(node) if node is not None else None
        layer = self.layers.name(operands.inputs[leaf]) if leaf is not None else ""
        return f"{f'at or after {layer}, ' if layer else ''}backward called at {origin.line()}"

    def interpret(self, structure: Structure, operands: Operands) -> list[torch.Tensor | None]:
        """Run the tape of the pass, operation by operation."""
        return self.interpreter(operands).execute(structure.tape.ops, structure.tape.outputs)

    def interpreter(self, operands: Operands) -> Run:
        return Run(operands.inputs, operands.sizes, operands.scalars, operands.hooks, operands.packed, self.engine.calling_out)

    def _missed(self, reason: str) -> None:
        if self._observer is not None:
            return
        self.report.misses.note(reason)
        self.explain(True)
        self._log_once(f"a backward pass was interpreted: {reason}")

    def _log_once(self, message: str) -> None:
        if message not in self._logged and len(self._logged) < _LOGGED:
            self._logged.add(message)
            log.warning("%s%s", message, "; further reasons are in the report alone" if len(self._logged) == _LOGGED else "")

    def explain(self, on: bool) -> None:
        """Whether the engine says why its cache had no entry for a pass; that costs it time on every pass."""
        self._hits_in_a_row = 0 if on else self._hits_in_a_row
        torch_api.set_verbose_logger(_IGNORING_LOGGER if on and self._explanations_left > 0 else None)  # type: ignore[arg-type] # its stub says a function; it calls .debug


class _BoundPass:
    """What the engine's cache holds for a structure, and calls for each pass of it."""

    def __init__(self, session: Replaying, recorded: Recorded):
        self.session, self.recorded = session, recorded
        self.binding = True
        self.served = False
        self.order = recorded.order
        self.tape = recorded.arranged(recorded.order)
        self.structure = session.table.find(self.tape)
        self.customs: dict[int, PlainContext | None] = dict.fromkeys(self.tape.ops[n].operands[0].index for n in self.tape.plain_customs)

    def _follow_order(self) -> None:
        """The engine's cache does not know in which order eager would run the nodes, which is that of the forward. Where it shows, ask."""
        order = eager_order(self.session.engine.roots, self.session.engine.targets, self.tape.nodes)
        if order is not None and order != self.order:
            self.order, self.tape = order, self.recorded.arranged(order)
            self.customs = dict.fromkeys(self.customs)
            self.structure = self.session.table.find(self.tape)

    def _follow_contexts(self, hooks: Sequence[Any]) -> None:
        """The engine's cache does not look into contexts; where one holds other numbers than last time, the pass is another structure."""
        if all(plain is not None and plain.fits(hooks[index]) for index, plain in self.customs.items()):
            return
        digests = {n: digest_of(hooks[self.tape.ops[n].operands[0].index]) for n in self.tape.plain_customs}
        self.structure = self.session.table.find(self.tape.redigested(digests))
        self.customs = {index: PlainContext(hooks[index]) for index in self.customs}

    def __call__(
        self, inputs: list[torch.Tensor], sizes: list[int], scalars: list[Any], hooks: tuple[Any, ...], packed: tuple[Any, ...] = ()
    ) -> list[torch.Tensor | None]:
        engine = self.session.engine
        engine.running, engine.reached = True, time.perf_counter()
        if hooks and any(map(torch_api.fires_reducer, hooks)):  # too late for eager: the engine has let go of what the graph saved
            raise AotBackwardError(MIXED_PRECISION)
        binding, self.binding = self.binding, False
        self.served = not binding
        if not binding and (self.tape.order_matters or (self.structure.spec is None and self.tape.order_rounds)):
            self._follow_order()
        if self.customs:
            self._follow_contexts(hooks)
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
    signature: Policy | None = None,
    key: Key | None = None,
    max_structures: int = MAX_STRUCTURES,
    optimizer: bool = True,
) -> Replaying:
    """A context in which backward passes run from the package at ``path``. Its :attr:`~Replaying.report` says what became of them.

    Passes that the package does not hold are interpreted, with eager's gradients (``strict=True``: :class:`MissError`), and after three of them that
    were called from one place, others from there run in eager; so do those that the engine refuses. After 1,000 passes in a row that nothing
    served, all others run in eager. With ``strict``, every pass is looked at.

    After ``max_structures`` structures that the package does not hold, further ones are left to eager, so that a script
    whose structure keeps changing costs neither time nor memory without bound; what is bound goes on being served.

    Steps of ``torch.optim`` optimizers for which the package has code run from it, on the script's own parameters, gradients and state, and so do
    ``clip_grad_norm_`` and ``clip_grad_value_``, unless ``optimizer`` is False; what it does not fit (the first step, which makes the
    state; a gradient that is absent) runs in eager.

    The engine's setting is process-wide: enter once, around everything that trains. ``imports``, ``signature`` and ``key`` are those of
    :func:`load`; a pass that calls operators which nobody has registered when it runs is interpreted. Raises what that raises, and
    :class:`AotBackwardError` where the package has no ``replay`` entry, or several and ``entry`` names none.
    """
    package = load(path, imports=imports, signature=signature, key=key)
    return Replaying(package, entry, strict=strict, max_structures=max_structures, optimizer=optimizer)


def _nothing(seconds: float) -> None:
    pass


class _IgnoringLogger:
    """What the engine takes for a logger: with one, it hands its reasons to the recorder as a list. The lines that it also logs are not needed."""

    def debug(self, message: str, *args: Any) -> None:
        pass


_IGNORING_LOGGER = _IgnoringLogger()
_ADVICE = "record such a pass too, onto the same file (what is not faster than eager is left out; --tune none keeps it)"

_NOT_SERVED = "called from where the package served none of the last passes"
_LEFT = f"after {UNSERVED} in a row that nothing served"


def _node_in(reason: str) -> int | None:
    """The node that a reason names."""
    found = re.search(r"\bnode (\d+)", reason)
    return int(found[1]) if found else None


def _advice(tape: Tape, operands: Operands) -> str:
    """What to do about a miss."""
    for index, tensor in enumerate(operands.inputs):
        if why := why_unsupported(tensor):
            user = tape.user_of(Slot("input", index))
            return f"tensor {index} (of {user}) is {why}, and record compiles no such pass; let the forward compute on plain, dense tensors there"
    return _ADVICE
