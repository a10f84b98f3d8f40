"""``record(path)``: the backward passes of an unmodified script, compiled into a package when the context closes."""

from __future__ import annotations

import os
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from aot_backward_runtime.errors import ExportError
from aot_backward_runtime.loader import Package, load
from aot_backward_runtime.package.archive import open_package
from aot_backward_runtime.package.targets import targets_of
from aot_backward_runtime.passes import origin
from aot_backward_runtime.passes.compiled_pass import Operands, Structure
from aot_backward_runtime.passes.custom_function import PlainContext
from aot_backward_runtime.passes.interpreter import Run
from aot_backward_runtime.passes.session import MAX_STRUCTURES, Replaying
from aot_backward_runtime.passes.tape import Tape, slots

from ..capture.ambient import current_ambient
from ..packaging.package_writer import check_destination
from ..progress import Progress
from .observation import Looks, Observation

ENTRY = "backward"
_KINDS = 8  # programs of one structure
_OBSERVATIONS = 1024  # different passes of one structure: what none of them showed to change stays as it is


@dataclass
class Example:
    """The numbers of one pass, to check the compiled one against: its tensors, and what each operation gave that somebody reads later."""

    inputs: dict[int, torch.Tensor]
    shapes: tuple[tuple[int, ...], ...]  # of all its tensors
    sizes: tuple[int, ...]
    values: dict[int, torch.Tensor | None] = field(default_factory=dict)


@dataclass
class Met:
    """What a context saw of one structure that its package does not serve."""

    tape: Tape
    observations: dict[Observation, int] = field(default_factory=dict)  # and how often
    examples: dict[Any, list[tuple[Observation, Example]]] = field(default_factory=dict)  # by Observation.kind()
    seconds: float = float("inf")
    contexts: dict[int, PlainContext] = field(default_factory=dict)  # of custom functions that may be traced, by the number of the hook
    line: str = ""  # of the script, where the first such pass was called
    layers: dict[int, str] = field(default_factory=dict)  # names of the parameters among the inputs

    def place(self, node: int | None = None) -> str:
        """Where such a pass, or a node of it, is in the script."""
        words = []
        if node is not None:
            words.append(next((self.tape.name_of(op) for op in self.tape.ops if op.node == node), f"node {node}"))
            leaf = self.tape.leaf_after(node)
            if leaf in self.layers:
                words.append(f"at or after {self.layers[leaf]}")
        if self.line:
            words.append(f"backward called at {self.line}")
        return ", ".join(words)


class Collecting(Replaying):
    """A replay that watches the passes which it has to interpret. ``met``: by fingerprint."""

    def __init__(self, package: Package | None, entry: str | None, *, strict: bool = False, max_structures: int = MAX_STRUCTURES):
        super().__init__(package, entry, strict=strict, max_structures=max_structures)
        self.met: dict[str, Met] = {}
        self.skipped: Counter[str] = Counter()

    @property
    def watched_some(self) -> bool:
        """Whether a pass was watched to its end."""
        return any(m.observations for m in self.met.values())

    def interpret(self, structure: Structure, operands: Operands) -> list[torch.Tensor | None]:
        if not self.keeps(structure):
            return super().interpret(structure, operands)
        tape = structure.tape
        fingerprint = tape.fingerprint()
        if fingerprint not in self.met:
            hooks = [tape.ops[n].operands[0].index for n in tape.plain_customs]
            self.met[fingerprint] = Met(tape, contexts={h: PlainContext(operands.hooks[h]) for h in hooks}, line=origin.line())
            leaves = {op.operands[0].index for op in tape.ops if op.kind == "accumulate"}
            self.met[fingerprint].layers = {i: name for i in leaves if (name := self.layers.name(operands.inputs[i]))}
        met = self.met[fingerprint]
        observation = observe(operands, tape)
        known = met.examples.setdefault(observation.kind(), []) if len(met.examples) < _KINDS or observation.kind() in met.examples else None
        if known is not None and observation not in met.observations and _tells_more(observation, [o for o, _ in known]):
            example = Example(_kept(tape, operands.inputs), tuple(t.shape for t in observation.inputs), observation.sizes)
            results = self._watched(structure, operands, example)
            known[1:] = [(observation, example)] if known else []
            known[:1] = known[:1] or [(observation, example)]
        else:
            start = time.perf_counter()
            results = super().interpret(structure, operands)
            met.seconds = min(met.seconds, time.perf_counter() - start)
        if observation in met.observations or len(met.observations) < _OBSERVATIONS:
            met.observations[observation] = met.observations.get(observation, 0) + 1  # not of a pass that raised
        return results

    def worth_compiling(self) -> dict[str, Met]:
        """What was met, by fingerprint; where structures kept changing, those that came more than once. The others go to ``skipped``."""
        if not self.full:
            return self.met
        often = {f: m for f, m in self.met.items() if sum(m.observations.values()) > 1}
        once = len(self.met) - len(often)
        self.skipped[
            f"the structure kept changing: after {self.max_structures} structures (max_structures), further ones were left to eager, and {once} of "
            f"those that were recorded came once and are not compiled. {_CONSTANTS}"
        ] += 1
        return often

    def _watched(self, structure: Structure, operands: Operands, example: Example) -> list[torch.Tensor | None]:
        tape = structure.tape
        run = Run(operands.inputs, operands.sizes, operands.scalars, operands.hooks, operands.packed, self.calling_out)
        for op in tape.ops:
            run.step(op)
            for number in op.results:
                if number >= 0:  # now: a hook may change it in place later
                    example.values[number] = copied(run.values[number])
        return [run.get(o) for o in tape.outputs]


_CONSTANTS = (
    "A number that changes from pass to pass and is part of a node, such as the limit of a clamp, makes a structure of its own: "
    "as a 0-d tensor it would not. report.engine names the nodes that were new"
)


def _refuse_several(path: Path) -> None:
    there = [t.label for t in targets_of(open_package(path).manifest)]
    if len(there) > 1:
        raise ExportError(f"{path} is for several targets ({', '.join(there)}), and passes are added to a package for one: record into a new file")


class Recording(Collecting):
    """The context of :func:`record`. ``report`` and ``tapes`` as of a replay; ``skipped``: what could not be compiled, and why."""

    def __init__(self, path: Path | None, entry: str, target: str, progress: Progress | None, max_structures: int):
        if path is not None:
            check_destination(path)
        package = None
        if path is not None and path.exists():
            _refuse_several(path)  # now, and not when the script has run
            package = load(path)
        if package is not None and entry not in package.entries:
            package = None
        super().__init__(package, entry, max_structures=max_structures)
        self.path, self.entry, self.target, self.progress = path, entry, target, progress
        self.recorded = 0

    def _missed(self, reason: str) -> None:
        self.recorded += 1

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        kind = error[0]
        done = kind is None or (isinstance(kind, type) and issubclass(kind, SystemExit))  # a script that ends itself has ended well
        if done and self.path is not None and self.watched_some:
            from .compile import add_passes

            self.skipped += add_passes(self.path, self.entry, self.worth_compiling(), target=self.target, progress=self.progress)


class Saving(Collecting):
    """The context of ``replay(save_misses=FILE)``; ``skipped``: what could not be traced, and why."""

    def __init__(self, package: Package, entry: str | None, to: Path, *, strict: bool, max_structures: int):
        check_destination(to)
        super().__init__(package, entry, strict=strict, max_structures=max_structures)
        self.to = to

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        if self.watched_some:
            from .miss_file import save_misses

            self.skipped += save_misses(self.to, self.worth_compiling())


def record(
    path: str | os.PathLike[str] | None = None,
    *,
    entry: str = ENTRY,
    target: str = "cpu",
    progress: Progress | None = None,
    max_structures: int = MAX_STRUCTURES,
) -> Recording:
    """A context in which every backward pass is watched; when it closes, what is new is compiled and put into the package at ``path``.

    Inside, passes are interpreted with eager's gradients; those that an existing package serves run from it. Sizes that changed between
    passes become dynamic, so let the script see at least two batch sizes. Each compiled pass is compared with the recorded numbers, and left
    out, with the reason in ``skipped``, where it differs or cannot be traced. ``path=None``: nothing is compiled, only :attr:`tapes` are kept.
    Nothing is written where the block ends by an exception. Needs memory for two passes of each structure. After ``max_structures`` new
    structures, further ones are left to eager, and those that came only once are not compiled: ``skipped`` says so.
    """
    return Recording(Path(path) if path is not None else None, entry, target, progress, max_structures)


def observe(operands: Operands, tape: Tape) -> Observation:
    """A pass without its values."""
    numbers: dict[int, int] = {}
    groups = tuple(numbers.setdefault(id(h), len(numbers)) for h in operands.hooks)
    inputs = tuple(map(Looks.of, operands.inputs))
    device = inputs[0].device if inputs else "cpu"
    return Observation(inputs, tuple(operands.sizes), tuple(operands.scalars), current_ambient(device), groups, tape.positions)


def _tells_more(observation: Observation, kept: list[Observation]) -> bool:
    """Whether the numbers of this pass are worth keeping: those of the first are, and of the one that differs from it in most sizes."""
    if not kept:
        return True
    first = kept[0].every_size()
    return sum(a != b for a, b in zip(observation.every_size(), first, strict=True)) > sum(
        a != b for a, b in zip(kept[-1].every_size(), first, strict=True)
    )


def _kept(tape: Tape, inputs: list[torch.Tensor]) -> dict[int, torch.Tensor]:
    """Copies of the tensors that computing operations read."""
    read = {s.index for op in tape.ops if op.kind != "accumulate" for s in slots(op.operands) if s.kind == "input"}
    out = {}
    for i in sorted(read):
        kept = copied(inputs[i])
        assert kept is not None
        out[i] = kept
    return out


def copied(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """A copy that lies as the original does, expanded dimensions included."""
    if tensor is None:
        return None
    plain = tensor.detach()
    if plain.layout is not torch.strided:
        return plain.clone()
    small = (
        plain[tuple(slice(0, 1) if s == 0 and n > 1 else slice(None) for n, s in zip(plain.shape, plain.stride(), strict=True))]
        if plain.dim()
        else plain
    )
    return torch.empty_strided(small.shape, small.stride(), dtype=plain.dtype, device=plain.device).copy_(small).expand(plain.shape)
