"""Profile a compiled entry: its kernels, which the code reports to ``torch.profiler``, and the source lines that they
come from."""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Iterator, Sequence

from torch.profiler import ProfilerActivity, profile

from aot_backward_exporters.graph import LINE, Graph
from aot_backward_runtime.format.manifest import VariantSpec
from aot_backward_runtime.loader import Package

from .example_sizes import Sized
from .speed import Timed
from .stopwatch import Call

_LOG_LEVEL = "KINETO_LOG_LEVEL"
_CALLS_PROFILED = 10  # of which the fastest is reported: noise only adds time; a guess
_KERNELS_SHOWN = 3  # keeps the message short; a guess
_FUSED = re.compile(r"^(?:graph_\d+_)?(?:cpp|triton)_[a-z]*?_?fused_(.*?)(?:_\d+)?$")
_CALLED = re.compile(r"^aoti_torch_[a-z]+_(?:_?mkl_|_?mkldnn_)?(.*?)(?:_out)?$")


def slowest(
    package: Package, timed: Timed, spec: VariantSpec, sized: Sized, microseconds: float, graphs: Sequence[Graph]
) -> Iterator[str]:
    """Describe how much of ``microseconds``, the time of a call, is spent in kernels, and name the slowest.
    ``package``: code that reports its kernels; ``graphs``: the graphs that it was compiled from."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        call = stack.enter_context(timed.compiled(package, spec, sized))
        stack.enter_context(_silent_profiler())
        call()
        times = min((_kernels(call) for _ in range(_CALLS_PROFILED)), key=lambda kernels: sum(kernels.values()))
    total = sum(times.values())
    if total < microseconds / 2:
        yield f"its kernels take {total:,.0f} of {microseconds:,.0f} µs: the rest is the fixed overhead of a call"
    for name in sorted(times, key=lambda n: -times[n])[:_KERNELS_SHOWN]:
        if times[name] > total / 10:
            lines = ", ".join(list(dict.fromkeys(_lines(name, graphs)))[:2])
            yield f"{_words(name)} {times[name]:,.1f} µs{f' ({lines})' if lines else ''}"


def _kernels(call: Call) -> dict[str, float]:
    """Return microseconds of one call by kernel."""
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        call()
    return {e.key: e.cpu_time_total for e in profiler.key_averages() if _FUSED.match(e.key) or _CALLED.match(e.key)}


@contextlib.contextmanager
def _silent_profiler() -> Iterator[None]:
    """Silence the profiler's messages on stderr about start and stop. It reads the variable once, when it is first
    used."""
    before = os.environ.get(_LOG_LEVEL)
    os.environ.setdefault(_LOG_LEVEL, "99")
    try:
        yield
    finally:
        if before is None:
            del os.environ[_LOG_LEVEL]


def _words(name: str) -> str:
    fused_match = _FUSED.match(name)
    call_match = _CALLED.match(name)
    return f"fused {fused_match[1]}" if fused_match else call_match[1] if call_match else name


def _lines(name: str, graphs: Sequence[Graph]) -> Iterator[str]:
    """Yield the model's lines that contain the operators in a kernel's name."""
    fused_match, call_match = _FUSED.match(name), _CALLED.match(name)
    text = fused_match[1] if fused_match else call_match[1] if call_match else ""
    for graph in graphs:
        for node in graph.module.graph.nodes:
            line = node.meta.get(LINE)
            namespace, _, rest = str(node.target).partition(".")  # aten.mm.default
            operator = rest.partition(".")[0].strip("_")
            if line is not None and namespace == "aten" and re.search(rf"(^|_){re.escape(operator)}(_|$)", text):
                yield (
                    f"{line.file}:{line.number}"
                    if line.file
                    else f"in {line.module}"
                    if line.module
                    else "in the model"
                )
