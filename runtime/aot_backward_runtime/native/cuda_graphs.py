"""CUDA graphs of compiled code: ``load(path, cudagraphs=True)``.

A CUDA graph is a list of launches at fixed addresses that one call replays. Parameters, buffers and optimizer state are
read in place. Each other input has a static copy, which a call fills. Outputs are static too: the caller gets copies,
because the next replay overwrites them. A forward that awaits its backward leaves its saved tensors in its graph's
memory pool, without a copy, and is not replayed until the backward has read them. Its graph shares that pool only with
its backward, because graphs of one pool overwrite each other's outputs. All other graphs of a package share one pool.
This is sound because no two run at once, and their outputs are copied before the next replay.

The first call at a list of shapes runs without a graph (it loads kernels and makes workspaces); the second is captured.
Calls that cannot be captured run without a graph; :class:`GraphReport` counts them by reason.
"""

from __future__ import annotations

import copy
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Protocol

import torch

from .. import torch_api
from .captured_graph import CapturedGraph, PooledOutputs, static_input
from .cuda_library import capturing
from .library import Binding, Library

# Lists of shapes of one library that have graphs: bounds GPU memory, because each graph keeps its inputs and outputs; a
# guess
SHAPES = 64
WAITING = 4  # forwards of one list of shapes that may wait for their backward: each has its own memory pool; a guess
TRIES = 2  # failed captures of a library before it is no longer captured; a guess

WARM_UP = "the first call at its shapes"
_CAPTURE = threading.RLock()  # torch.cuda.graph allows one capture at a time per process


@dataclass
class GraphReport:
    """Counts of the calls of a package that was loaded with ``cudagraphs=True``. ``str(report)`` is for people.

    Attributes:
        captured: The number of calls that were captured as a CUDA graph.
        replayed: The number of calls that replayed one.
        plain: The numbers of calls without a CUDA graph, by reason.
    """

    captured: int = 0
    replayed: int = 0
    plain: Counter[str] = field(default_factory=Counter)

    def to_json(self) -> dict[str, Any]:
        """Return the counts as a dict that ``json.dumps`` accepts."""
        return {"captured": self.captured, "replayed": self.replayed, "plain": dict(self.plain)}

    def __str__(self) -> str:
        lines = [f"{self.captured} captured, {self.replayed} replayed, {sum(self.plain.values())} without a CUDA graph"]
        return "\n".join([*lines, *(f"  x{count}: {reason}" for reason, count in self.plain.most_common())])


class Recorder(Protocol):
    """Interface of the object that captures: a GPU, or its stand-in in a test."""

    def why_not_capturable(self) -> str:
        """Return why nothing may be captured or replayed now, or ""."""

    def in_order(self) -> None:
        """Make later work wait for the last replay."""

    def pool(self) -> Any:
        """Return a memory pool for graphs that may overwrite each other's results."""

    def capture(
        self, call: Callable[[], list[torch.Tensor]], pool: Any
    ) -> tuple[Callable[[], None], list[torch.Tensor]]:
        """Return the function that replays ``call``, and the results in ``pool`` that each replay overwrites. None is
        the shared pool, for results that are copied at once. Capturing runs nothing."""


class Gpu:
    """A recorder that captures on its own stream."""

    def __init__(self, device: torch.device):
        self._device = device
        self._last: torch.cuda.Stream | None = None
        self._kept: list[Any] = []
        with _CAPTURE:
            self._begin()

    def _begin(self) -> None:
        """Create a pool and a stream. A tiny graph is kept, because a pool is freed with its last graph even if other
        memory lies in it."""
        with torch.cuda.device(self._device):
            self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(self._device)
        self._kept.append(self._captured(lambda: [torch.zeros(1, device=self._device)], self._pool))

    def why_not_capturable(self) -> str:
        return "the caller is capturing a CUDA graph" if capturing() else ""

    def in_order(self) -> None:
        current = torch.cuda.current_stream(self._device)
        if self._last is not None and self._last != current:
            current.wait_stream(self._last)
        self._last = current

    def pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def capture(
        self, call: Callable[[], list[torch.Tensor]], pool: Any
    ) -> tuple[Callable[[], None], list[torch.Tensor]]:
        with _CAPTURE:
            return self._tried(call, pool or self._pool)

    def _tried(
        self, call: Callable[[], list[torch.Tensor]], pool: Any
    ) -> tuple[Callable[[], None], list[torch.Tensor]]:
        before = torch.cuda.current_stream(self._device)
        try:
            return self._captured(call, pool)
        except RuntimeError as error:
            # A failed torch.cuda.graph is not undone: its stream stays current, the allocator keeps filling the pool,
            # and the random number generator stays in capture mode until a capture ends.
            torch.cuda.set_stream(before)
            torch_api.end_allocating_to_pool(self._device, pool)
            self._begin()
            raise RuntimeError(str(error.__context__ or error)) from error

    def _captured(
        self, call: Callable[[], list[torch.Tensor]], pool: Any
    ) -> tuple[Callable[[], None], list[torch.Tensor]]:
        graph = torch.cuda.CUDAGraph()
        capture = torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local")
        with torch.cuda.device(self._device):
            with torch.cuda.stream(self._stream):
                torch.cuda.current_blas_handle()  # its workspace outlives the graph and must not lie in the pool
            with capture:
                results = call()
        return graph.replay, results


class Graphs:
    """State that the libraries of one loaded package share."""

    def __init__(self, recorder: Recorder):
        self.recorder, self.report, self.lock = recorder, GraphReport(), threading.RLock()

    def plain(self, reason: str) -> None:
        self.report.plain[reason] += 1


class _ShapeGraphs:
    """The graphs of one library at one list of shapes."""

    def __init__(self) -> None:
        self.warm = False
        self.graphs: list[CapturedGraph] = []
        self.generation = 0


class GraphedLibrary(Library):
    """``inner``, replayed as CUDA graphs if possible."""

    pools_outputs = True

    def __init__(self, inner: Library, graphs: Graphs):
        super().__init__(inner.path, inner.spec, inner.device)
        self.inner, self._graphs = inner, graphs
        self._at: dict[tuple[torch.Size, ...], _ShapeGraphs] = {}
        self._ran: set[tuple[torch.Size, ...]] = set()  # shapes of backwards that have run without a graph
        self._generation = 0  # incremented when the constants move
        self._failed = 0
        self._unfit = ""

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphedLibrary:
        return GraphedLibrary(copy.deepcopy(self.inner, memo), self._graphs)

    def bind(self, binding: Binding) -> bool:
        moved = self.inner.bind(binding)
        if moved:
            with self._graphs.lock:
                self._at.clear()
                self._ran.clear()  # a library's one-time work on its constants must not be captured
                self._generation += 1
        return moved

    def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        with self._graphs.lock:
            graph = self._for_shapes(inputs)
            if graph is None:
                return self.inner.run(inputs)
            self._replay(graph, inputs)
            return graph.copies()

    @property
    def is_one_call(self) -> bool:
        return False

    @property
    def raw_run(self) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
        return self.run

    def run_forward(
        self, operands: Sequence[tuple[str, Any]], inputs: list[torch.Tensor], reader: Any, hooked: bool
    ) -> tuple[list[torch.Tensor], PooledOutputs | None]:
        with self._graphs.lock:
            if hooked:
                self._graphs.plain("saved-tensor hooks are active, and may keep the tensors that they get")
            graph = None if hooked else self._for_shapes(inputs, pooled=True)
            if graph is None:
                return self.inner.run(inputs), None
            self._replay(graph, inputs)
            graph.keep_for(reader)
            return list(graph.outputs), PooledOutputs(
                graph, operands, self._graphs.lock, self._graphs.recorder.in_order
            )

    def run_backward(self, inputs: list[torch.Tensor], pooled: PooledOutputs | None) -> list[torch.Tensor]:
        with self._graphs.lock:
            if pooled is None:  # a graph would have to copy all saved tensors
                self._graphs.plain("the backward of a forward that ran without a CUDA graph")
                self._ran.add(_shapes(inputs))
                return self.inner.run(inputs)
            forward = pooled.graph
            slot = forward.backward_graphs.get(self)
            if slot is None or slot.generation != self._generation:
                slot = forward.backward_graphs[self] = _ShapeGraphs()
                slot.generation, slot.warm = self._generation, _shapes(inputs) in self._ran
            graph = self._replayable(slot, inputs, forward=forward)
            if graph is not None and not graph.reads_from(inputs):
                self._graphs.plain("retain_graph=True, and the backward overwrites tensors that it reads")
                graph = None
            if graph is None:
                self._graphs.recorder.in_order()
                return self.inner.run(inputs)
            self._replay(graph, inputs)
            return graph.copies()

    def _for_shapes(self, inputs: Sequence[torch.Tensor], pooled: bool = False) -> CapturedGraph | None:
        """Return the graph for the shapes of ``inputs``. ``pooled``: its outputs stay in their own pool while other
        graphs are replayed."""
        key = _shapes(inputs)
        slot = self._at.get(key)
        if slot is None:
            if sum(bool(other.graphs) for other in self._at.values()) >= SHAPES:
                self._graphs.plain(f"more than {SHAPES} lists of shapes")
                return None
            if len(self._at) >= 16 * SHAPES:  # most came only once
                self._at = {k: other for k, other in self._at.items() if other.graphs}
            slot = self._at[key] = _ShapeGraphs()
        return self._replayable(slot, inputs, pooled)

    def _replayable(
        self,
        slot: _ShapeGraphs,
        inputs: Sequence[torch.Tensor],
        pooled: bool = False,
        forward: CapturedGraph | None = None,
    ) -> CapturedGraph | None:
        """Return a graph that may be replayed now, captured if necessary. If there is none, count the reason and return
        None. ``forward``: the graph that made the outputs that a backward reads."""
        if not self._unfit and (unsafe := [name for name in self.spec.operators if _unsafe(name)]):
            self._unfit = f"{unsafe[0]} is tagged torch.Tag.cudagraph_unsafe"
        if reason := self._unfit or self._graphs.recorder.why_not_capturable():
            self._graphs.plain(reason)
            return None
        if not slot.warm:
            slot.warm = True
            self._graphs.plain(WARM_UP)
            return None
        fitting = [g for g in slot.graphs if g.pool is not None or not pooled]
        graph = next((g for g in fitting if not g.awaits_backward), None)
        if graph is None and len(fitting) >= WAITING:
            self._graphs.plain(f"{WAITING} forwards of these shapes wait for their backward")
            return None
        return graph or self._captured(slot, inputs, pooled, forward)

    def _captured(
        self, slot: _ShapeGraphs, inputs: Sequence[torch.Tensor], pooled: bool, forward: CapturedGraph | None
    ) -> CapturedGraph | None:
        if any(t.device != self.device and t.numel() for t in inputs):
            self._unfit = f"{self.spec.member} reads a tensor on the CPU"
            self._graphs.plain(self._unfit)
            return None
        recorder, fixed = self._graphs.recorder, forward.addresses() if forward is not None else frozenset[int]()
        pool = forward.pool if forward is not None else recorder.pool() if pooled else None
        # Inference tensors cannot be written to outside of inference mode
        with torch.inference_mode(False), torch.no_grad():
            static = [t if t.data_ptr() in fixed or not t.numel() else static_input(t) for t in inputs]
            try:
                replay, outputs = recorder.capture(partial(self.inner.run, static), pool)
            except RuntimeError as error:
                self._failed += 1
                reason = f"{self.spec.member} cannot be captured: {str(error).partition(chr(10))[0]}"
                self._unfit = reason if self._failed >= TRIES else ""
                self._graphs.plain(reason)
                return None
            graph = CapturedGraph(static, fixed, replay, outputs, pool)
        self._graphs.report.captured += 1
        slot.graphs.append(graph)
        return graph

    def _replay(self, graph: CapturedGraph, inputs: Sequence[torch.Tensor]) -> None:
        self._graphs.recorder.in_order()
        with torch.no_grad():
            graph.replay(inputs)
        self._graphs.report.replayed += 1


@cache
def _unsafe(operator: str) -> bool:
    """Return whether ``operator`` is registered as unsafe to capture."""
    namespace, _, name = operator.partition("::")
    packet, _, overload = name.partition(".")
    return (
        torch.Tag.cudagraph_unsafe
        in getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default").tags
    )


def _shapes(tensors: Sequence[torch.Tensor]) -> tuple[torch.Size, ...]:
    return tuple([t.shape for t in tensors])
