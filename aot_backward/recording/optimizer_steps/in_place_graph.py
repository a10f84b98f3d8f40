"""Shared parts of the graphs of optimizer steps and clippings: they write to their inputs, and are timed against
eager."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from aot_backward_exporters.graph import Graph
from aot_backward_runtime.compatibility import processor_name
from aot_backward_runtime.format.manifest import Speed, TensorSpec, Timing
from aot_backward_runtime.passes.recorded_times import SLOWER

from ...capture import fx_graph
from ...capture.fx_graph import call
from ...checks import stopwatch
from ...packaging.tuning import SECONDS

log = logging.getLogger("aot_backward")


def in_place_graph(
    name: str,
    module: torch.fx.GraphModule,
    targets: Sequence[torch.fx.Node],
    values: Sequence[torch.fx.Node],
    result: torch.fx.Node,
    operands: Sequence[str],
    result_name: str,
    mode: Any,
) -> Graph:
    """Return ``module`` as a graph that writes ``values`` to the placeholders ``targets``, and returns ``result``.
    ``operands``: the placeholders' names in messages."""
    output = fx_graph.output_of(module.graph)
    with module.graph.inserting_before(result), mode:
        for target, new in zip(targets, values, strict=True):
            if new is not target:
                call(module.graph, torch.ops.aten.copy_.default, target, new)
    output.args, output.meta = ((result,),), {}
    module.graph.lint()
    module.recompile()
    placeholders = list(module.graph.find_nodes(op="placeholder"))
    inputs = tuple(_spec(operand, node.meta["val"]) for operand, node in zip(operands, placeholders, strict=True))
    count = sum(1 for n in module.graph.nodes if n.op == "call_function")
    return Graph(name, module, inputs, (_spec(result_name, result.meta["val"]),), {}, count)


def _spec(name: str, value: torch.Tensor) -> TensorSpec:
    shape, stride = tuple(map(int, value.shape)), tuple(map(int, value.stride()))
    return TensorSpec(name, str(value.dtype).removeprefix("torch."), value.device.type, shape, stride)


def timed(name: str, ways: Mapping[str, Callable[[], object]], tune: str, target: str) -> Speed | None:
    """Time ``ways``, "eager" and "compiled", each a whole call as a script makes it. Return None if they cannot be
    timed."""
    try:
        with stopwatch.on_free_processors() as (threads, other_threads):
            times = stopwatch.microseconds(ways, SECONDS)
    except RuntimeError as error:  # a failed timing does not make the code wrong
        log.info("%s could not be timed: %s", name, error)
        return None
    return Speed(
        chosen="compiled" if SLOWER * times["compiled"] < times["eager"] else "eager",
        timings=tuple(Timing(way, (round(microseconds, 1),)) for way, microseconds in times.items()),
        sizes=("",),
        threads=threads,
        processor=processor_name(),
        tune=tune,
        target=target,
        torch=torch.__version__,
        others=other_threads,
    )
