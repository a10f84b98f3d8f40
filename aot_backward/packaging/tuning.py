"""Which of several ways to compile a variant is shipped: each candidate is compiled, compared with eager and timed beside it, and the fastest stays.

Candidates of a ``module`` are torch's partitioners. On a CPU ``default`` is nearly always the faster one: what ``min_cut`` computes again in the
backward costs more than reading it back. So ``quick`` tries both only where ``default`` keeps much more memory for the backward.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from aot_backward_exporters.graph import Graph
from aot_backward_runtime.compatibility import processor_name
from aot_backward_runtime.errors import ExportError
from aot_backward_runtime.format.expressions import evaluate
from aot_backward_runtime.format.manifest import EntrySpec, Speed, Timing, VariantSpec
from aot_backward_runtime.loader import Package
from aot_backward_runtime.native.guards import Contract, dtype_of

from ..checks import eager_check, speed
from ..checks.example_sizes import Example, cotangents_at, sizes_to_time
from ..checks.named_results import Wrt, results_of_eager, results_of_entry
from ..checks.tolerance import Reference
from .contents import Contents

TUNES = ("none", "quick", "full")
"""How much is tried: nothing, not even beside eager; the candidates that the graph gives reason for; every candidate."""

VARIABLE = "AOT_BACKWARD_TUNE"
"""The environment variable that says what is tried where the caller does not."""

SECONDS = {"quick": 0.3, "full": 3.0}
"""What timing one variant may take at each of its sizes."""

TIE = 0.97
"""A candidate that needs more than this of another's time is as fast as that one: then the one that keeps less memory is shipped."""

_MUCH = 4 << 20  # bytes kept for the backward: less stays in a processor's caches
_MORE = 1.5  # times what the other candidate keeps


def tune_of(asked: str | None) -> str:
    """One of :data:`TUNES`. :class:`ExportError` where it is another word."""
    source, tune = ("tune", asked) if asked is not None else (VARIABLE, os.environ.get(VARIABLE) or "quick")
    if tune not in TUNES:
        raise ExportError(f"{source} is {tune!r}; expected one of {', '.join(map(repr, TUNES))}")
    return tune


@dataclass(frozen=True)
class Candidate:
    """A variant compiled in one way. ``spec``: what the manifest says of it; compiling may add guards, so it is asked again afterwards."""

    name: str
    graphs: Sequence[Graph]
    spec: Callable[[], VariantSpec]


@dataclass(frozen=True)
class Case:
    """What is compiled. ``entry_of``: what the manifest says of the entry with such a variant. ``wrt``: of a ``grad`` entry."""

    name: str
    entry_of: Callable[[VariantSpec], EntrySpec]
    program: nn.Module
    wrt: Wrt | None
    example: Example


@dataclass(frozen=True)
class Chosen:
    spec: VariantSpec
    graphs: Sequence[Graph]


def partitioned(candidate: Callable[[str], Candidate], example: Example, device: str, tune: str) -> list[Candidate]:
    """Which partitioners are tried, the usual one first. ``candidate``: the variant as a partitioner divides it."""
    usual, other = ("default", "min_cut") if device == "cpu" else ("min_cut", "default")
    out = [candidate(usual)]
    if tune == "none" or out[0].spec().backward is None:
        return out
    saved = _saved_bytes(out[0], example)
    if tune == "full":
        out.append(candidate(other))
    elif device == "cpu" and saved > _MUCH:
        further = candidate(other)
        if saved > _MORE * _saved_bytes(further, example):
            out.append(further)
    return out


def _saved_bytes(candidate: Candidate, example: Example) -> int:
    """Bytes of what the forward computes and keeps for the backward; 0 where it is all one graph."""
    spec = candidate.spec()
    if spec.forward is None or spec.forward.call is None:
        return 0
    values = Contract(spec.inputs, spec.symbols, spec.guards).solve(example.tensors)
    outputs = next(g for g in candidate.graphs if g.name == spec.forward.call.library).outputs
    places = {int(where) for kind, _, where in (s.partition(":") for s in spec.forward.saved) if kind == "result"}
    return sum(math.prod(evaluate(n, values) for n in outputs[i].shape) * dtype_of(outputs[i].dtype).itemsize for i in places)


def choose(contents: Contents, case: Case, candidates: Sequence[Candidate], compile: Callable[[Sequence[Graph]], None]) -> Chosen:
    """The candidate that is shipped, compiled for every target of ``contents``, with what was measured, if anything, in its ``speed``.

    ``compile``: puts graphs and their libraries into ``contents``, in the place of those of the same names."""
    loaded: dict[str, Package] = {}
    for number, candidate in enumerate(candidates):
        if len(candidates) > 1:
            contents.progress(f"tune {case.name}", number, len(candidates))
        compile(candidate.graphs)
        if contents.tune != "none":
            package = contents.package_of(case.name, case.entry_of(candidate.spec()), [graph.name for graph in candidate.graphs])
            if isinstance(package, Package):
                loaded[candidate.name] = package
    right = {n: p for n, p in loaded.items() if len(loaded) == 1 or _is_right(case, p)}
    by_name = {c.name: c for c in candidates}
    measured = _measured(contents, case, by_name, right) if right else None
    chosen = by_name[measured.chosen] if measured else by_name[next(iter(right), candidates[0].name)]
    if chosen is not candidates[-1]:
        compile(chosen.graphs)  # from the compile cache, in the place of the last one's
    return Chosen(dataclasses.replace(chosen.spec(), speed=measured), chosen.graphs)


def _measured(contents: Contents, case: Case, candidates: Mapping[str, Candidate], packages: Mapping[str, Package]) -> Speed | None:
    """None where nothing could be timed: eager refuses what it is given, or the entry is one that the self-check will refuse."""
    spec = candidates[next(iter(packages))].spec()
    times: dict[str, list[float]] = {}
    labels = []
    for sized in sizes_to_time(spec, case.example):
        cotangents = [] if case.wrt is not None else cotangents_at(spec, sized.values)
        with contextlib.suppress(Exception):
            found = speed.measure(packages, case.name, 0, case.program, case.wrt, sized, cotangents, SECONDS[contents.tune])
            labels.append(sized.label)
            for name, microseconds in found.items():
                times.setdefault(name, []).append(round(microseconds, 1))
    if not labels:
        return None
    saved = {n: _saved_bytes(candidates[n], case.example) for n in packages}
    total = {n: math.exp(sum(map(math.log, times[n])) / len(labels)) for n in packages}
    tied = [n for n in packages if min(total.values()) > TIE * total[n]]
    timings = (Timing(speed.EAGER, tuple(times[speed.EAGER])), *(Timing(n, tuple(times[n]), saved[n]) for n in packages))
    chosen = min(tied, key=lambda n: (saved[n], total[n]))
    return Speed(chosen, timings, tuple(labels), torch.get_num_threads(), processor_name(), contents.tune)


def _is_right(case: Case, package: Package) -> bool:
    """Whether a candidate gives what eager gives, as far as eager itself tells; the one that is shipped is compared thoroughly later."""
    spec = package.manifest.entries[case.name].variants[0]
    sized = next(iter(sizes_to_time(spec, case.example)))
    cotangents = [] if case.wrt is not None else cotangents_at(spec, sized.values)
    try:
        eager = results_of_eager(case.program, case.example, case.wrt, spec, cotangents)
        actual = results_of_entry(package, case.name, spec, case.example, cotangents)
        itself = Reference(eager, dict.fromkeys(eager, 0.0), float64=False)
        return not any(c.wrong for c in eager_check.compare_results(actual, eager, itself, reduced_precision=True))
    except (ExportError, RuntimeError):
        return False
