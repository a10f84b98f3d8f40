"""Which of several ways to compile a variant is shipped: each candidate is compiled, compared with eager and timed beside it, and the fastest stays.

Candidates of a ``module`` are torch's partitioners. On a CPU ``default`` is nearly always the faster one: what ``min_cut`` computes again in the
backward costs more than reading it back. So both are tried only where ``default`` keeps much more memory for the backward. What is all one
graph, of a ``grad`` or ``step`` entry, has no partition: it is timed beside eager.
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

from ..capture.joint_graph import Joint
from ..capture.partition import partitioners
from ..checks import kernel_profile, speed, stopwatch
from ..checks.example_sizes import Example, Sized, sizes_to_time
from .contents import Contents

log = logging.getLogger("aot_backward")

TUNES = ("none", "quick")
"""How much is tried: nothing, not even beside eager; the candidates that the graph gives reason for."""

VARIABLE = "AOT_BACKWARD_TUNE"
"""The environment variable that says what is tried where the caller does not."""

SECONDS = 0.3
"""For timing one variant at each of its sizes."""

TIE = 0.97
"""A candidate that needs more than this of another's time is as fast as that one: then the one that keeps less memory is shipped. What needs less
than eager's time over this is not called slower."""

_TIMES_LARGER = 40  # a larger size is timed where the smaller one's slowest call took less than this part of the time there is
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
class Subject:
    """What is timed: variant ``number`` of ``entry``. ``label``: what it is called in messages."""

    entry: str
    number: int
    label: str
    timed: speed.Timed
    example: Example


@dataclass(frozen=True)
class Case:
    """What is compiled. ``entry_of``: what the manifest says of the entry with such a variant alone. ``is_right``: whether the loaded entry gives on
    the example what eager gives, as far as eager itself tells; what is shipped is compared thoroughly later."""

    subject: Subject
    entry_of: Callable[[VariantSpec], EntrySpec]
    is_right: Callable[[Package, VariantSpec], bool]
    joint: Joint


def partitioned(candidate: Callable[[str], Candidate], example: Example, device: str, tune: str) -> list[Candidate]:
    """Which partitioners are tried, the usual one first. ``candidate``: the variant as a partitioner divides it."""
    usual, other = partitioners(device)
    out = [candidate(usual)]
    if tune == "none" or out[0].spec().backward is None:
        return out
    if device == "cpu" and (saved := _saved_bytes(out[0], example)) > _MUCH:
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


def choose(contents: Contents, case: Case, candidates: Sequence[Candidate], compile: Callable[[Sequence[Graph]], None]) -> Candidate:
    """The candidate that is shipped, compiled for every target of ``contents``, with what was measured, if anything, in its ``speed``.

    ``compile``: puts graphs and their libraries into ``contents``, in the place of those of the same names."""
    before, compiled, packages = contents.mark(), {}, dict[str, Package]()
    subject = dataclasses.replace(case.subject, number=0)
    for number, candidate in enumerate(candidates):
        if len(candidates) > 1:
            contents.progress(f"tune {subject.label}", number, len(candidates))
        contents.back_to(before)
        usual = candidates[0].spec() if number else None
        try:
            compile(candidate.graphs)
        except ExportError as error:
            if usual is None or candidates[0].spec() != usual:  # a size is narrower now, for all of them
                raise
            log.info("%s, partitioned by %s, is no candidate: %s", subject.label, candidate.name, error)
            continue
        compiled[candidate.name] = contents.mark()
        package = contents.package_of(subject.entry, case.entry_of(candidate.spec())) if contents.tune != "none" else None
        if package is not None and (len(candidates) == 1 or case.is_right(package, candidate.spec())):
            packages[candidate.name] = package
    by_name = {c.name: c for c in candidates}

    def profiled(name: str) -> tuple[Package | None, Sequence[Graph]]:
        graphs = by_name[name].graphs
        return contents.profiled(subject.entry, case.entry_of(by_name[name].spec()), graphs, case.joint), graphs

    saved = {name: _saved_bytes(by_name[name], subject.example) for name in packages}
    measured = measure(contents, subject, packages, saved, profiled) if packages else None
    chosen = by_name[measured.chosen] if measured else by_name[next(iter(packages), candidates[0].name)]
    contents.back_to(compiled[chosen.name])
    if len(candidates) > 1:
        contents.progress(f"tune {subject.label}", len(candidates), len(candidates))
    return dataclasses.replace(chosen, spec=lambda: dataclasses.replace(chosen.spec(), speed=measured))


def measure(
    contents: Contents,
    subject: Subject,
    packages: Mapping[str, Package],
    saved: Mapping[str, int],
    profiled: Callable[[str], tuple[Package | None, Sequence[Graph]]],
) -> Speed | None:
    """Times the subject in each of ``packages``, by candidate, beside eager. None where one of them fails: that is for the self-check to say.

    ``saved``: bytes, by candidate. ``profiled``: a candidate's code that reports its kernels, and its graphs."""
    stage = f"time {subject.label} beside eager, about {SECONDS:g} s at each size"
    contents.progress(stage, 0, 1)
    package = next(iter(packages.values()))
    spec = package.manifest.entries[subject.entry].variants[subject.number]
    times: dict[str, list[float]] = {}
    sizes: list[Sized] = []
    with stopwatch.on_free_processors() as (threads, others):
        for sized in sizes_to_time(spec, subject.example):
            if sizes and _TIMES_LARGER * max(t for one in times.values() for t in one) > SECONDS * 1e6:
                break
            with contextlib.suppress(Exception):
                for name, microseconds in speed.measure(packages, subject.timed, spec, sized, SECONDS).items():
                    times.setdefault(name, []).append(round(microseconds, 1))
                sizes.append(sized)
    if not sizes:
        contents.progress(stage, 1, 1)
        return None
    total = {n: math.prod(times[n]) ** (1 / len(sizes)) for n in packages}
    tied = [n for n in packages if min(total.values()) > TIE * total[n]]
    measured = Speed(
        chosen=min(tied, key=lambda n: (saved[n], total[n])),
        timings=(Timing(speed.EAGER, tuple(times[speed.EAGER])), *(Timing(n, tuple(times[n]), saved[n]) for n in packages)),
        sizes=tuple(sized.label for sized in sizes),
        threads=threads,
        processor=processor_name(),
        tune=contents.tune,
        target=package.manifest.target.name,
        torch=torch.__version__,
        others=others,
    )
    worst = max(range(len(sizes)), key=lambda i: measured.ratios[i])
    if TIE * measured.ratios[worst] > 1 and package.device.type == "cpu":
        with contextlib.suppress(Exception), stopwatch.on_free_processors():  # the package is none the worse for it
            reporting, graphs = profiled(measured.chosen)
            assert reporting is not None
            slow = kernel_profile.slowest(reporting, subject.timed, spec, sizes[worst], times[measured.chosen][worst], graphs)
            measured = dataclasses.replace(measured, slow=tuple(slow))
    contents.progress(stage, 1, 1)
    return measured


def say_slower(manifest: Manifest) -> None:
    """Logs which variants are slower than eager, by how much, and what is slow in them."""
    for name, entry in manifest.entries.items():
        for number, variant in enumerate(entry.variants):
            if variant.speed is not None and (said := "; ".join(_slower(variant.speed))):
                where = f"{name}{f' variant {number}' if len(entry.variants) > 1 else ''}"
                busy = f" (on a busy machine: {variant.speed.others} threads of others ran)" if variant.speed.others else ""
                log.warning("%s is slower than eager%s: %s%s", where, busy, said, "".join(f"; {line}" for line in variant.speed.slow))


def _slower(measured: Speed) -> Iterator[str]:
    """The sizes at which eager is faster, with both times."""
    times = {t.name: t.microseconds for t in measured.timings}
    for i, (label, ratio) in enumerate(zip(measured.sizes, measured.ratios, strict=True)):
        if ratio * TIE > 1:
            ours, eager = times[measured.chosen][i], times[speed.EAGER][i]
            yield f"{f'at {label} ' if label else ''}{ours:,.1f} µs, eager {eager:,.1f} µs ({ratio:.2f} times)"
