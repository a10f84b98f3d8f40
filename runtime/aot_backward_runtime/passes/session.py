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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import torch_api
from ..errors import InputError, MissError
from ..format.manifest import OperatorSpec, StructureSpec
from ..loader import Package, load
from ..native.library import Library
from ..operators import told, unregistered
from ..package.signature_policy import Key, Policy
from . import origin
from .compiled_pass import Admitted, Operands, Structure
from .custom_function import PlainContext, digest_of
from .engine_hook import Session
from .fallback_reasons import Reasons
from .interpreter import Run
from .node_order import eager_order
from .recorder import Recorded, Recorder, Refused
from .tape import Tape

log = logging.getLogger("aot_backward.replay")
_CALM = 8  # passes in a row that the package served, after which the engine is no longer asked for its reasons (they cost it time)

_NUMBERS = 4  # different numbers in a custom function's context that each make a structure of their own
MAX_STRUCTURES = 128
"""Structures that no package holds, in one context. Each has its tape kept: 1 to 4 kB a node."""
_WORDS = 64  # new structures for which the engine says what was new: it copies all that it knows of the siblings, at each node
_SAID = 64  # lines in the log
_WINDOW = 64  # unknown passes that are recorded, to find those that the package holds, after the engine's cache was emptied
_EVERY = 128  # one of as many is recorded at least, later on


@dataclass
class Report:
    """What became of the backward passes of a context.

    ``bindings``: passes that met a structure for the first time; ``hits``: further ones that the package served; ``misses``: those that were
    interpreted, by reason; ``eager``: those that the engine would not have, by reason. ``saved``: seconds by which the hits were faster than
    running the same tapes uncompiled, as measured when they were recorded.
    """

    bindings: int = 0
    hits: int = 0
    misses: Reasons = field(default_factory=Reasons)
    eager: Reasons = field(default_factory=Reasons)
    engine: Reasons = field(default_factory=Reasons)  # what the engine said of the first passes that its cache did not have
    saved: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            "bindings": self.bindings,
            "hits": self.hits,
            "misses": self.misses.shown(),
            "eager": self.eager.shown(),
            "engine": self.engine.shown(),
            "seconds_saved": round(self.saved, 6),
        }

    def __str__(self) -> str:
        missed, eager = sum(self.misses.values()), sum(self.eager.values())
        lines = [f"{self.bindings} bound, {self.hits} hits, {missed} misses, {eager} left to eager; {self.saved:.3f} s saved"]
        for what, reasons in (("miss", self.misses), ("eager", self.eager), ("engine", self.engine)):
            lines += [f"  {what} x{count}: {reason}" for reason, count in reasons.shown().items()]
        return "\n".join(lines)


class Replaying(Session):
    """The context of :func:`replay`. ``report``: a :class:`Report`; ``tapes``: what was met, in order."""

    def __init__(self, package: Package | None, entry: str | None = None, *, strict: bool = False, max_structures: int = MAX_STRUCTURES):
        super().__init__()
        if type(max_structures) is not int or max_structures < 1:
            raise InputError(f"max_structures is {max_structures!r}; expected a positive int")
        self.strict, self.max_structures = strict, max_structures
        self.report = Report()
        self.tapes: list[Tape] = []
        self._specs: dict[str, StructureSpec] = {}
        self._libraries: Mapping[str, Library] = {}
        self._constants: Mapping[str, torch.Tensor] = {}
        self._operators: Mapping[str, OperatorSpec] = {}
        if package is not None:
            self._specs, self._libraries, self._constants = package.recorded(entry)
            self._operators = package.manifest.operators
        self.layers = origin.Layers()
        self._met: dict[str, Structure] = {}
        self._numbers: dict[str, set[str]] = {}  # by the structure in which custom functions are called: those with other numbers
        self._said: set[str] = set()
        self._calm = 0
        self._words = _WORDS
        self._unknown = 0  # structures that were met and the package does not hold
        self._live: list[_Bound] = []  # what the engine's cache holds
        self._wanted = 0  # ... held, and served passes, when it was last emptied
        self._attempts = 0  # passes to record until all of those are bound again
        self._skip = 0  # passes until the next attempt after those
        self._chance = random.Random(0)  # noqa: S311 # a fixed step would miss what the script does every second pass

    def __enter__(self) -> Replaying:
        super().__enter__()
        self._curious(True)
        return self

    def __exit__(self, *error: object) -> None:
        torch_api.set_verbose_logger(None)
        super().__exit__(*error)

    def clear_cache(self) -> None:
        """Forgets what was bound; the next pass of each structure is a binding pass again."""
        self._wanted = sum(bound.served for bound in self._live)
        self._attempts = _WINDOW + 2 * self._wanted if self._wanted else 0
        self._live.clear()
        super().clear_cache()

    def is_cache_empty(self) -> bool:
        """Whether nothing is bound."""
        return torch_api.is_cache_empty()

    # -- what the engine calls

    def recorder(self) -> Recorder:
        if self.full and not self.strict and not self._attempt():
            raise Refused(self._full_words())
        return Recorder(lambda names: eager_order(self.roots, self.targets, names), self._bind)

    def left_to_eager(self, reason: str) -> None:
        self.report.eager.note(reason)
        self._say(f"a backward pass was left to eager: {reason}")

    def _bind(self, recorded: Recorded, reasons: Sequence[str]) -> Callable[..., Any]:
        for reason in reasons:
            self.report.engine.note(reason)
            self._words -= 1
        bound = _Bound(self, recorded)
        self.largest = max(self.largest, len(bound.tape.nodes))
        if not self.keeps(bound.structure):
            raise MissError(f"{self._full_words()} (replay was told to be strict)") if self.strict else Refused(self._full_words())
        self.report.bindings += 1
        self._curious(True)
        self._live.append(bound)
        self._wanted -= 1
        return bound

    # -- where structures keep changing

    @property
    def full(self) -> bool:
        """Whether ``max_structures`` were met that the package does not hold: further ones are left to eager."""
        return self._unknown >= self.max_structures

    def _attempt(self) -> bool:
        """Whether a pass that the engine does not know is recorded all the same: the package, or an earlier pass, may know its structure.

        Recording costs some ten times what eager does. So where the engine's cache was emptied, it is done until all that had served passes
        have come again, and now and then besides.
        """
        if self._attempts > 0 and self._wanted > 0:
            self._attempts -= 1
            return True
        self._skip -= 1
        if self._skip > 0:
            return False
        self._skip = self._chance.randrange(1, _EVERY)
        return True

    def _full_words(self) -> str:
        return (
            f"the structure keeps changing: {self.max_structures} structures that no package holds were met, and further ones are not looked at "
            "(max_structures)"
        )

    def keeps(self, structure: Structure) -> bool:
        """Whether ``structure`` is one of those that this context knows."""
        return structure.tape.fingerprint() in self._met

    def structure(self, tape: Tape) -> Structure:
        """What the package has for ``tape``. Where the numbers in a custom function's context keep changing, that function is called."""
        fingerprint = tape.fingerprint()
        if tape.plain_customs and fingerprint not in self._specs:
            called = tape.redigested(dict.fromkeys(tape.plain_customs, ""))
            seen = self._numbers.get(called.fingerprint(), set())
            if fingerprint not in seen and (called.fingerprint() in self._specs or len(seen) >= _NUMBERS):
                tape, fingerprint = called, called.fingerprint()
            elif not self.full:
                seen.add(fingerprint)
                self._numbers[called.fingerprint()] = seen
        known = self._met.get(fingerprint)
        if known is None:
            known = Structure(tape, self._specs.get(fingerprint), self._libraries, self._constants)
            if known.spec is None and self.full:
                return known
            self._met[fingerprint] = known
            self.tapes.append(tape)
            if known.spec is None:
                self._unknown += 1
                if self.full:
                    self._words = 0
                    self._curious(False)
        return known

    def compute(self, structure: Structure, operands: Operands, binding: bool) -> list[torch.Tensor | None]:
        """One pass whose structure is known. ``binding``: the first of it."""
        start = time.perf_counter()
        try:
            if torch.is_anomaly_enabled():
                raise InputError("anomaly mode looks at every node: the tape is interpreted")
            if structure.spec is None:
                raise InputError(self._difference(structure.tape) if self.keeps(structure) else self._full_words())
            if structure.missing:
                structure.missing = unregistered(structure.missing)  # the script may have imported what registers them by now
                if structure.missing:
                    raise InputError(f"the package {told(structure.missing, self._operators)}")
            admitted = structure.admit(operands)
            admitted.variant.check_leaves(operands)
        except InputError as error:
            miss = str(error)
        else:
            return self._served(structure, operands, admitted, binding, start)
        miss = f"{miss}; {self.place(structure.tape, operands, _node_in(miss))}: {_ADVICE}"
        if self.strict:
            raise MissError(f"{miss} (replay was told to be strict)")
        self._missed(miss)
        return self.interpret(structure, operands)  # outside of the handler: what a hook raises has no context of ours

    def _served(self, structure: Structure, operands: Operands, admitted: Admitted, binding: bool, start: float) -> list[torch.Tensor | None]:
        assert structure.spec is not None
        results = admitted.variant.run(operands, admitted, self.calling_out, self._missed)
        if not binding:
            self.report.hits += 1
            self.report.saved += structure.spec.seconds - (time.perf_counter() - start)
            self._calm += 1
            if self._calm == _CALM:
                self._curious(False)
        return results

    def place(self, tape: Tape, operands: Operands, node: int | None) -> str:
        """Where in the script this pass was called, and the layer that ``node`` belongs to or follows."""
        leaf = tape.leaf_after(node) if node is not None else None
        layer = self.layers.name(operands.inputs[leaf]) if leaf is not None else ""
        return f"{f'at or after {layer}, ' if layer else ''}backward called at {origin.line()}"

    def interpret(self, structure: Structure, operands: Operands) -> list[torch.Tensor | None]:
        run = Run(operands.inputs, operands.sizes, operands.scalars, operands.hooks, operands.packed, self.calling_out)
        return run.execute(structure.tape.ops, structure.tape.outputs)

    def _missed(self, reason: str) -> None:
        self.report.misses.note(reason)
        self._curious(True)
        self._say(f"a backward pass was interpreted: {reason}")

    def _say(self, message: str) -> None:
        if message not in self._said and len(self._said) < _SAID:
            self._said.add(message)
            log.warning("%s%s", message, "; further reasons are in the report alone" if len(self._said) == _SAID else "")

    def _curious(self, on: bool) -> None:
        """Whether the engine words what its cache did not have; that costs it time on every pass."""
        self._calm = 0 if on else self._calm
        torch_api.set_verbose_logger(_EAR if on and self._words > 0 else None)  # type: ignore[arg-type] # its stub says a function; it calls .debug

    def _difference(self, tape: Tape) -> str:
        """How ``tape`` differs from the nearest recorded structure."""
        nodes = tape.nodes
        best, alike = None, -1
        for spec in self._specs.values():
            same = next((i for i, (a, b) in enumerate(zip(nodes, spec.nodes, strict=False)) if a != b), min(len(nodes), len(spec.nodes)))
            if same > alike:
                best, alike = spec, same
        if best is None:
            return f"no structure was recorded; this one has {len(nodes)} nodes, {tape.fingerprint()[:12]}"
        if alike < min(len(nodes), len(best.nodes)):
            what = f"node {alike} is {_short(nodes[alike])}, in the nearest recorded structure it is {_short(best.nodes[alike])}"
        elif len(nodes) != len(best.nodes):
            what = f"it has {len(nodes)} nodes, the nearest recorded structure {len(best.nodes)}"
        else:
            what = "it has the nodes of a recorded structure, but constants of theirs, hooks, or what needs a gradient differ"
        return f"the structure {tape.fingerprint()[:12]} was not recorded: {what}"


class _Bound:
    """What the engine's cache holds for a structure."""

    def __init__(self, session: Replaying, recorded: Recorded):
        self.session, self.recorded = session, recorded
        self.binding = True
        self.served = False
        self.order = recorded.order
        self.tape = recorded.arranged(recorded.order)
        self.structure = session.structure(self.tape)
        self.customs: dict[int, PlainContext | None] = dict.fromkeys(self.tape.ops[n].operands[0].index for n in self.tape.plain_customs)

    def _follow_order(self) -> None:
        """The engine's cache does not know in which order eager would run the nodes, which is that of the forward. Where it shows, ask."""
        order = eager_order(self.session.roots, self.session.targets, self.tape.nodes)
        if order is not None and order != self.order:
            self.order, self.tape = order, self.recorded.arranged(order)
            self.customs = dict.fromkeys(self.customs)
            self.structure = self.session.structure(self.tape)

    def _follow_contexts(self, hooks: Sequence[Any]) -> None:
        """The engine's cache does not look into contexts; where one holds other numbers than last time, the pass is another structure."""
        if all(plain is not None and plain.fits(hooks[index]) for index, plain in self.customs.items()):
            return
        digests = {n: digest_of(hooks[self.tape.ops[n].operands[0].index]) for n in self.tape.plain_customs}
        self.structure = self.session.structure(self.tape.redigested(digests))
        self.customs = {index: PlainContext(hooks[index]) for index in self.customs}

    def __call__(
        self, inputs: list[torch.Tensor], sizes: list[int], scalars: list[Any], hooks: tuple[Any, ...], packed: tuple[Any, ...] = ()
    ) -> list[torch.Tensor | None]:
        session = self.session
        session.running = True
        binding, self.binding = self.binding, False
        self.served = not binding
        if not binding and (self.tape.order_matters or (self.structure.spec is None and self.tape.order_rounds)):
            self._follow_order()
        if self.customs:
            self._follow_contexts(hooks)
        if len(self.recorded.picked) != len(inputs):
            inputs = [inputs[i] for i in self.recorded.picked]
        results = session.compute(self.structure, Operands(inputs, sizes, scalars, hooks, packed), binding)
        if session.callbacks:
            session.final_callbacks()
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
) -> Replaying:
    """A context in which backward passes run from the package at ``path``. Its :attr:`~Replaying.report` says what became of them.

    Passes that the package does not hold are interpreted, with eager's gradients (``strict=True``: :class:`MissError`); those that the engine
    refuses run in eager. After ``max_structures`` structures that the package does not hold, further ones are left to eager, so that a script
    whose structure keeps changing costs neither time nor memory without bound; what is bound goes on being served.

    The engine's setting is process-wide: enter once, around everything that trains. ``imports``, ``signature`` and ``key`` are those of
    :func:`load`; a pass that calls operators which nobody has registered when it runs is interpreted. Raises what that raises, and
    :class:`AotBackwardError` where the package has no ``replay`` entry, or several and ``entry`` names none.
    """
    return Replaying(load(path, imports=imports, signature=signature, key=key), entry, strict=strict, max_structures=max_structures)


class _Ear:
    """What the engine takes for a logger. Its reasons come to the recorder as a list; the lines that it also logs are not needed."""

    def debug(self, message: str, *args: Any) -> None:
        pass


_EAR = _Ear()


_ADVICE = "record such a pass too, onto the same file"


def _node_in(reason: str) -> int | None:
    """The node that a reason names."""
    found = re.search(r"\bnode (\d+)", reason)
    return int(found[1]) if found else None


def _short(name: str) -> str:
    return name.rpartition("::")[2]
