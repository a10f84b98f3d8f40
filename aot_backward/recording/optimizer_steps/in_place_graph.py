"""What the graphs of optimizer steps and of clippings share: they write to what they were given, and are timed beside eager."""

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
    written: Sequence[torch.fx.Node],
    values: Sequence[torch.fx.Node],
    result: torch.fx.Node,
    operands: Sequence[str],
    result_name: str,
    mode: Any,
) -> Graph:
    """``module`` as a graph that writes ``values`` to the placeholders ``written``, and returns ``result``. ``operands``: what each placeholder is
    called in messages."""
    output = fx_graph.output_of(module.graph)
    with module.graph.inserting_before(result), mode:
        for target, new in zip(written, values, strict=True):
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
    """``ways``: "eager" and "compiled", each a whole call as a script makes it. None where they could not be timed."""
    try:
        with stopwatch.on_free_processors() as (threads, others):
            times = stopwatch.microseconds(ways, SECONDS)
    except RuntimeError as error:  # no reason to lose code that is right
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
        others=others,
    )
