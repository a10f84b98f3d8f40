"""Capture the inputs and results of the exporter's compiler: graphs, host code, and sources of kernels. A package has
none of these."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from aot_backward_exporters.graph import Graph
from aot_backward_exporters.inductor import compile

from .jobs import Source


@dataclass
class Compiled:
    """One library. ``graph``: the captured graph, on the CPU. ``wrapper``: the host code."""

    graph: Graph
    wrapper: str
    kernels: dict[str, Source] = field(default_factory=dict)


@contextlib.contextmanager
def watching() -> Iterator[dict[tuple[str, str], Compiled]]:
    """Yield a dict that collects every library compiled for GPUs within the context, by target ("cuda:sm_90") and name.

    The compile cache must be empty."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    seen: dict[tuple[str, str], Compiled] = {}
    kernels: dict[str, Source] = {}
    compile_graphs, lower, save = compile.compile_graphs, compile.lower, CachingAutotuner.save_gpu_kernel

    def watched_graphs(graphs: Any, *, target: str = "cpu", **rest: Any) -> Any:
        given = {graph.name: graph for graph in graphs}

        def watched_lower(graph: Graph, *args: Any) -> Any:
            kernels.clear()
            lowered = lower(graph, *args)
            seen[target, graph.name] = Compiled(given[graph.name], lowered.wrapper, dict(kernels))
            return lowered

        with mock.patch.object(compile, "lower", watched_lower):
            return compile_graphs(graphs, target=target, **rest)

    def watched_save(self: Any, stream: Any, launcher: Any) -> Any:
        meta, binary = self.triton_meta, launcher.bin
        constants = {**meta["constants"], **launcher.config.kwargs}
        names = list(meta["signature"])
        kernels[binary.metadata.name] = Source(
            text=self.fn.src,
            signature={name: kind for name, kind in meta["signature"].items() if kind != "constexpr"},
            constants={name: value for name, value in constants.items() if name in self.fn.arg_names},
            multiples=tuple(
                names[at]
                for config in meta["configs"]
                for (at,), said in config.items()
                if ["tt.divisibility", 16] in said
            ),
            shared=binary.metadata.shared,
            cubin=binary.asm["cubin"],
        )
        return save(self, stream, launcher)

    with (
        mock.patch.object(compile, "compile_graphs", watched_graphs),
        mock.patch.object(CachingAutotuner, "save_gpu_kernel", watched_save),
    ):
        yield seen
