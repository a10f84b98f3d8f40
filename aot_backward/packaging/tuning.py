"""Choose how a variant is compiled: compile each candidate, compare it with eager, time it and ship the fastest.

Candidates of a ``module`` entry are torch's partitioners. On a CPU ``default`` is nearly always faster: the
recomputation of ``min_cut`` in the backward costs more than reading the tensors back. So both are tried only if
``default`` saves much more memory for the backward. A ``grad`` or ``step`` entry is one graph without a partition: it
is only timed against eager.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from aot_backward_exporters.graph import Graph
from aot_backward_runtime.compatibility import processor_name
from aot_backward_runtime.errors import ExportError
from aot_backward_runtime.format.expressions import evaluate
from aot_backward_runtime.format.manifest import EntrySpec, Manifest, Speed, Timing, VariantSpec
from aot_backward_runtime.loader import Package
from aot_backward_runtime.native.guards import Contract, dtype_of

from ..capture.partition import partitioners
from ..checks import speed, stopwatch
from ..checks.example_sizes import Example, Sized, sizes_to_time
from .contents import Contents

log = logging.getLogger("aot_backward")

TUNES = ("none", "quick")
"""``none`` times nothing, not even eager. ``quick`` tries the candidates that the graph gives reason for."""

VARIABLE = "AOT_BACKWARD_TUNE"
"""The environment variable that sets ``tune`` if the caller does not."""

SECONDS = 0.3
"""Seconds for timing one variant at each of its sizes: bounds what timing adds to an export. A guess."""

TIE = 0.97
"""A candidate that needs more than this fraction of another's time counts as equally fast. Among equally fast
candidates, the one that saves less memory is shipped. A variant is reported as slower only if its time exceeds eager's
divided by this. A guess."""

# A larger size is timed only if the slowest call at the smaller one took less than 1 / 40 of SECONDS; a guess
_TIMES_LARGER = 40
_MUCH = 4 << 20  # bytes saved for the backward; fewer stay in a processor's caches; a guess
# Ratio to the bytes that the other candidate saves; both candidates are tried only above these two limits; a guess
_MORE = 1.5


def tune_of(value: str | None) -> str:
    """Return one of :data:`TUNES`. Raise :class:`ExportError` for another word."""
    source, tune = ("tune", value) if value is not None else (VARIABLE, os.environ.get(VARIABLE) or "quick")
    if tune not in TUNES:
        raise ExportError(f"{source} is {tune!r}; expected one of {', '.join(map(repr, TUNES))}")
    return tune


@dataclass(frozen=True)
class Candidate:
    """A variant compiled in one way. ``spec`` returns its :class:`VariantSpec`; call it again after compiling, which
    may add guards."""

    name: str
    graphs: Sequence[Graph]
    spec: Callable[[], VariantSpec]


@dataclass(frozen=True)
class Subject:
    """The timed variant: variant ``number`` of ``entry``. ``label`` names it in messages."""

    entry: str
    number: int
    label: str
    timed: speed.Timed
    example: Example


@dataclass(frozen=True)
class Case:
    """A variant to compile. ``entry_of`` builds the manifest entry with this variant alone. ``is_right`` tells whether
    the loaded entry agrees with eager on the example, within eager's own error; the shipped variant is compared
    thoroughly later."""

    subject: Subject
    entry_of: Callable[[VariantSpec], EntrySpec]
    is_right: Callable[[Package, VariantSpec], bool]


def partitioned(candidate: Callable[[str], Candidate], example: Example, device: str, tune: str) -> list[Candidate]:
    """Return the candidates to try, the usual partitioner's first. ``candidate`` builds the variant for a
    partitioner."""
    usual, other = partitioners(device)
    out = [candidate(usual)]
    if tune == "none" or out[0].spec().backward is None:
        return out
    if device == "cpu" and (saved := _saved_bytes(out[0], example)) > _MUCH:
        alternative = candidate(other)
        if saved > _MORE * _saved_bytes(alternative, example):
            out.append(alternative)
    return out


def _saved_bytes(candidate: Candidate, example: Example) -> int:
    """Return the bytes that the forward computes and saves for the backward; 0 if the variant is one graph."""
    spec = candidate.spec()
    if spec.forward is None or spec.forward.call is None:
        return 0
    values = Contract(spec.inputs, spec.symbols, spec.guards).solve(example.tensors)
    outputs = next(g for g in candidate.graphs if g.name == spec.forward.call.library).outputs
    places = {int(index) for kind, _, index in (s.partition(":") for s in spec.forward.saved) if kind == "result"}
    return sum(
        math.prod(evaluate(n, values) for n in outputs[i].shape) * dtype_of(outputs[i].dtype).itemsize for i in places
    )


def choose(
    contents: Contents, case: Case, candidates: Sequence[Candidate], compile: Callable[[Sequence[Graph]], None]
) -> Candidate:
    """Return the candidate to ship, compiled for every target of ``contents``. Its ``speed`` holds the measurements, if
    there are any.

    ``compile`` puts graphs and their libraries into ``contents`` and replaces any of the same names."""
    before, marks, packages = contents.mark(), {}, dict[str, Package]()
    subject = dataclasses.replace(case.subject, number=0)
    for number, candidate in enumerate(candidates):
        if len(candidates) > 1:
            contents.progress(f"tune {subject.label}", number, len(candidates))
        contents.back_to(before)
        initial_spec = candidates[0].spec() if number else None
        try:
            compile(candidate.graphs)
        except ExportError as error:
            # A size is narrower now, for all candidates
            if initial_spec is None or candidates[0].spec() != initial_spec:
                raise
            log.info("%s, partitioned by %s, cannot be compiled: %s", subject.label, candidate.name, error)
            continue
        marks[candidate.name] = contents.mark()
        package = (
            contents.package_of(subject.entry, case.entry_of(candidate.spec())) if contents.tune != "none" else None
        )
        if package is not None and (len(candidates) == 1 or case.is_right(package, candidate.spec())):
            packages[candidate.name] = package
    by_name = {c.name: c for c in candidates}
    saved = {name: _saved_bytes(by_name[name], subject.example) for name in packages}
    measurement = measure(contents, subject, packages, saved) if packages else None
    choice = by_name[measurement.chosen] if measurement else by_name[next(iter(packages), candidates[0].name)]
    contents.back_to(marks[choice.name])
    if len(candidates) > 1:
        contents.progress(f"tune {subject.label}", len(candidates), len(candidates))
    return dataclasses.replace(choice, spec=lambda: dataclasses.replace(choice.spec(), speed=measurement))


def measure(
    contents: Contents,
    subject: Subject,
    packages: Mapping[str, Package],
    saved: Mapping[str, int],
) -> Speed | None:
    """Time the subject in each of ``packages`` (by candidate) and in eager. Return None if no size could be timed: the
    self-check reports why.

    ``saved``: bytes, by candidate."""
    stage = f"time {subject.label} beside eager, about {SECONDS:g} s at each size"
    contents.progress(stage, 0, 1)
    package = next(iter(packages.values()))
    spec = package.manifest.entries[subject.entry].variants[subject.number]
    times: dict[str, list[float]] = {}
    sizes: list[Sized] = []
    with stopwatch.on_free_processors() as (threads, other_threads):
        for sized in sizes_to_time(spec, subject.example):
            if sizes and _TIMES_LARGER * max(t for series in times.values() for t in series) > SECONDS * 1e6:
                break
            with contextlib.suppress(Exception):
                for name, microseconds in speed.measure(packages, subject.timed, spec, sized, SECONDS).items():
                    times.setdefault(name, []).append(round(microseconds, 1))
                sizes.append(sized)
    if not sizes:
        contents.progress(stage, 1, 1)
        return None
    total = {n: math.prod(times[n]) ** (1 / len(sizes)) for n in packages}
    ties = [n for n in packages if min(total.values()) > TIE * total[n]]
    measurement = Speed(
        chosen=min(ties, key=lambda n: (saved[n], total[n])),
        timings=(
            Timing(speed.EAGER, tuple(times[speed.EAGER])),
            *(Timing(n, tuple(times[n]), saved[n]) for n in packages),
        ),
        sizes=tuple(sized.label for sized in sizes),
        threads=threads,
        processor=processor_name(),
        tune=contents.tune,
        target=package.manifest.target.name,
        torch=torch.__version__,
        others=other_threads,
    )
    contents.progress(stage, 1, 1)
    return measurement


def say_slower(manifest: Manifest) -> None:
    """Log the variants that are slower than eager, and by how much."""
    for name, entry in manifest.entries.items():
        for number, variant in enumerate(entry.variants):
            if variant.speed is not None and (details := "; ".join(_slower(variant.speed))):
                label = f"{name}{f' variant {number}' if len(entry.variants) > 1 else ''}"
                busy = f" (on a busy machine: {variant.speed.others} other threads ran)" if variant.speed.others else ""
                log.warning("%s is slower than eager%s: %s", label, busy, details)


def _slower(measurement: Speed) -> Iterator[str]:
    """Yield each size at which eager is faster, with both times."""
    times = {t.name: t.microseconds for t in measurement.timings}
    for i, (label, ratio) in enumerate(zip(measurement.sizes, measurement.ratios, strict=True)):
        if ratio * TIE > 1:
            compiled, eager = times[measurement.chosen][i], times[speed.EAGER][i]
            yield f"{f'at {label} ' if label else ''}{compiled:,.1f} µs, eager {eager:,.1f} µs ({ratio:.2f} times)"
