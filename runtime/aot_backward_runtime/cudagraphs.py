"""CUDA graphs of compiled code: ``load(path, cudagraphs=True)``.

A CUDA graph is a list of launches at fixed addresses, which one call replays. Parameters, buffers and the optimizer's state stay where they are; of
each other input there is a copy at a fixed place, which a call fills; results lie at fixed places too, and the caller gets copies of them, since the
next replay overwrites them. A forward whose backward is to come *lends* its saved tensors as they lie, without a copy, and is not replayed until they
are given back. All graphs of a package share one pool of memory, which is sound because none runs beside another.

The first call at a list of shapes runs as without graphs (kernels are loaded, workspaces made), the second is captured. What cannot be captured, or
not now, runs as without graphs; :class:`GraphReport` counts it with the reason.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch

from . import torch_api
from .cuda import capturing
from .plan import Binding, Lease, Library

SHAPES = 64  # lists of shapes of one library that have graphs
WAITING = 4  # forwards of one list of shapes that may wait for their backward
TRIES = 2  # after so many captures that failed a library is left alone

WARM_UP = "the first call at its shapes"


@dataclass
class GraphReport:
    """What became of the calls of a package's compiled graphs: ``captured`` and ``replayed`` as CUDA graphs; ``plain``, without, by reason."""

    captured: int = 0
    replayed: int = 0
    plain: Counter[str] = field(default_factory=Counter)

    def to_json(self) -> dict[str, Any]:
        return {"captured": self.captured, "replayed": self.replayed, "plain": dict(self.plain)}

    def __str__(self) -> str:
        lines = [f"{self.captured} captured, {self.replayed} replayed, {sum(self.plain.values())} without a CUDA graph"]
        return "\n".join([*lines, *(f"  x{count}: {reason}" for reason, count in self.plain.most_common())])


class Recorder(Protocol):
    """What captures: a GPU, or what stands for one in a test."""

    def hindrance(self) -> str:
        """Why nothing may be captured or replayed now; "" where nothing stands against it."""

    def in_order(self) -> None:
        """Has what comes next wait for what was replayed last."""

    def capture(self, call: Callable[[], list[torch.Tensor]]) -> tuple[Callable[[], None], list[torch.Tensor]]:
        """What replays ``call``, and the results that each replay overwrites. Nothing has run yet."""


class Gpu:
    """Captures on a stream of its own, into a pool that all its graphs share."""

    def __init__(self, device: torch.device):
        self._device = device
        self._last: torch.cuda.Stream | None = None
        self._kept: list[Any] = []
        self._begin()

    def _begin(self) -> None:
        """A new pool and stream. A graph of nothing much stays as long as this: a pool ends with its last graph, whatever else lies in it."""
        with torch.cuda.device(self._device):
            self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(self._device)
        self._kept.append(self._captured(lambda: [torch.zeros(1, device=self._device)]))

    def hindrance(self) -> str:
        return "the caller captures a CUDA graph of its own" if capturing() else ""

    def in_order(self) -> None:
        current = torch.cuda.current_stream(self._device)
        if self._last is not None and self._last != current:
            current.wait_stream(self._last)
        self._last = current

    def capture(self, call: Callable[[], list[torch.Tensor]]) -> tuple[Callable[[], None], list[torch.Tensor]]:
        before, pool = torch.cuda.current_stream(self._device), self._pool
        try:
            return self._captured(call)
        except RuntimeError as error:
            # torch.cuda.graph is left half-way: its stream is the current one, the allocator goes on filling the pool, and the generator of random
            # numbers believes that it is captured, until a capture comes to its end
            torch.cuda.set_stream(before)
            torch_api.end_allocating_to_pool(self._device, pool)
            self._begin()
            raise RuntimeError(str(error.__context__ or error)) from error

    def _captured(self, call: Callable[[], list[torch.Tensor]]) -> tuple[Callable[[], None], list[torch.Tensor]]:
        graph = torch.cuda.CUDAGraph()
        capture = torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local")
        with torch.cuda.device(self._device):
            with torch.cuda.stream(self._stream):
                torch.cuda.current_blas_handle()  # its workspace outlives the graph, and may not lie in the pool
            with capture:
                results = call()
        return graph.replay, results


class Graphs:
    """What the libraries of one loaded package share."""

    def __init__(self, recorder: Recorder):
        self.recorder, self.report, self.lock = recorder, GraphReport(), threading.RLock()

    def plain(self, reason: str) -> None:
        self.report.plain[reason] += 1


class _Graph:
    """One capture: the places that a call fills, and those that it overwrites."""

    def __init__(self, inputs: Sequence[torch.Tensor], fixed: frozenset[int], replay: Callable[[], None], outputs: list[torch.Tensor]):
        self.inputs, self.outputs, self._replay = inputs, outputs, replay
        self._fixed = [i for i, t in enumerate(inputs) if t.data_ptr() in fixed]
        self._filled = [(i, _once(t)) for i, t in enumerate(inputs) if t.numel() and i not in self._fixed]
        self._narrow = [i for i, _ in self._filled if 0 in inputs[i].stride()]
        self._holder: Callable[[], Any] = _nobody
        self.after: dict[Library, _At] = {}  # graphs of the backward, which read what this one lends
        shared = Counter(t.untyped_storage().data_ptr() for t in outputs if t.numel())
        self._plain = [shared[t.untyped_storage().data_ptr()] < 2 and torch.empty_like(t).stride() == t.stride() for t in outputs]

    @property
    def lent(self) -> bool:
        """Whether a backward that reads its results is still to come."""
        return self._holder() is not None

    def lend(self, holder: Any) -> None:
        self._holder = weakref.ref(holder)

    def give_back(self) -> None:
        self._holder = _nobody

    def takes(self, given: Sequence[torch.Tensor]) -> bool:
        """Whether the tensors that are read where they lie are the ones that lay there at the capture."""
        return all(given[i].data_ptr() == self.inputs[i].data_ptr() for i in self._fixed)

    def replay(self, given: Sequence[torch.Tensor]) -> None:
        if self._filled:
            sources = [_once(given[i]) if i in self._narrow else given[i] for i, _ in self._filled]
            torch_api.foreach_copy_([place for _, place in self._filled], sources)
        self._replay()

    def copied(self, which: Iterable[int] | None = None) -> list[torch.Tensor]:
        """The results, all of them or those of the numbers ``which`` in memory of their own. Where results share memory, so do the copies."""
        out = list(self.outputs)
        places, sources = [], []
        storages: dict[int, torch.UntypedStorage] = {}
        for i in range(len(out)) if which is None else which:
            t = self.outputs[i]
            if self._plain[i]:
                out[i] = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
                places.append(out[i])
                sources.append(t)
            else:
                storage = t.untyped_storage()
                if (known := storages.get(storage.data_ptr())) is None:
                    known = storages[storage.data_ptr()] = storage.clone()
                out[i] = torch.empty(0, dtype=t.dtype, device=t.device).set_(known, t.storage_offset(), t.shape, t.stride())
        if places:
            with torch.no_grad():
                torch_api.foreach_copy_(places, sources)
        return out


class _At:
    """The graphs of one library at one list of shapes."""

    def __init__(self) -> None:
        self.warm = False
        self.graphs: list[_Graph] = []
        self.generation = 0


class Lent(Lease):
    """Saved tensors that lie in a graph of the forward."""

    def __init__(self, graph: _Graph, operands: Iterable[tuple[str, Any]]):
        self._graph = graph
        self._inputs = {where: graph.inputs[i] for i, (kind, where) in enumerate(operands) if kind == "input"}

    def input(self, number: int, given: torch.Tensor) -> torch.Tensor:
        return self._inputs.get(number, given)

    def shown(self, to_caller: Iterable[int]) -> list[torch.Tensor]:
        return self._graph.copied(to_caller)

    def run(self, library: Library, operands: list[torch.Tensor]) -> list[torch.Tensor]:
        if isinstance(library, GraphedLibrary):
            return library.run_after(self._graph, operands)
        return library.run(operands)

    def end(self) -> None:
        self._graph.give_back()


class Apart(Lease):
    """A forward that ran without a graph: its backward does, too, since a graph would have to copy all that was saved."""

    def __init__(self, results: list[torch.Tensor]):
        self._results = results

    def input(self, number: int, given: torch.Tensor) -> torch.Tensor:
        return given

    def shown(self, to_caller: Iterable[int]) -> list[torch.Tensor]:
        results, self._results = self._results, []  # not to keep them for the backward, which has what it needs
        return results

    def run(self, library: Library, operands: list[torch.Tensor]) -> list[torch.Tensor]:
        if isinstance(library, GraphedLibrary):
            return library.run_apart(operands)
        return library.run(operands)

    def end(self) -> None:
        pass


class GraphedLibrary(Library):
    """``inner``, replayed as CUDA graphs where that can be done."""

    def __init__(self, inner: Library, graphs: Graphs):
        super().__init__(inner.path, inner.spec, inner.device)
        self.inner, self._graphs = inner, graphs
        self._at: dict[tuple[torch.Size, ...], _At] = {}
        self._ran: set[tuple[torch.Size, ...]] = set()  # shapes of backwards that have run without
        self._generation = 0  # counts where the constants have lain
        self._failed = 0
        self._unfit = ""

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphedLibrary:
        return GraphedLibrary(copy.deepcopy(self.inner, memo), self._graphs)

    def bind(self, binding: Binding) -> bool:
        moved = self.inner.bind(binding)
        if moved:
            with self._graphs.lock:
                self._at.clear()
                self._generation += 1
        return moved

    def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        with self._graphs.lock:
            graph = self._graph(inputs)
            if graph is None:
                return self.inner.run(inputs)
            self._replay(graph, inputs)
            return graph.copied()

    @property
    def raw_run(self) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
        return self.run

    def lend(
        self, operands: Sequence[tuple[str, Any]], inputs: list[torch.Tensor], holder: Any, hooked: bool
    ) -> tuple[list[torch.Tensor], Lease | None]:
        with self._graphs.lock:
            if hooked:
                self._graphs.plain("saved-tensor hooks are at work, which may keep what they get")
            graph = None if hooked else self._graph(inputs)
            if graph is None:
                results = self.inner.run(inputs)
                return results, Apart(results)
            self._replay(graph, inputs)
            graph.lend(holder)
            return list(graph.outputs), Lent(graph, operands)

    def run_after(self, forward: _Graph, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """The backward of what ``forward`` has lent."""
        with self._graphs.lock:
            at = forward.after.get(self)
            if at is None or at.generation != self._generation:
                at = forward.after[self] = _At()
                at.generation, at.warm = self._generation, _shapes(inputs) in self._ran
            fixed = frozenset(t.data_ptr() for t in (*forward.inputs, *forward.outputs) if t.numel())
            graph = self._at_hand(at, inputs, fixed)
            if graph is not None and not graph.takes(inputs):
                self._graphs.plain("retain_graph=True, where the backward overwrites what it reads")
                graph = None
            if graph is None:
                return self.inner.run(inputs)
            self._replay(graph, inputs)
            return graph.copied()

    def run_apart(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """The backward of a forward that ran without a graph."""
        with self._graphs.lock:
            self._graphs.plain("the backward of a forward that ran without")
            self._ran.add(_shapes(inputs))
            return self.inner.run(inputs)

    def _graph(self, inputs: Sequence[torch.Tensor]) -> _Graph | None:
        key = _shapes(inputs)
        at = self._at.get(key)
        if at is None:
            if len(self._at) >= SHAPES:
                self._graphs.plain(f"more than {SHAPES} lists of shapes")
                return None
            at = self._at[key] = _At()
        return self._at_hand(at, inputs, frozenset())

    def _at_hand(self, at: _At, inputs: Sequence[torch.Tensor], fixed: frozenset[int]) -> _Graph | None:
        """A graph that may be replayed now, captured if need be; None, and counted, where there is none."""
        if reason := self._unfit or self._graphs.recorder.hindrance():
            self._graphs.plain(reason)
            return None
        if not at.warm:
            at.warm = True
            self._graphs.plain(WARM_UP)
            return None
        graph = next((g for g in at.graphs if not g.lent), None)
        if graph is None and len(at.graphs) >= WAITING:
            self._graphs.plain(f"{WAITING} forwards of these shapes wait for their backward")
            return None
        return graph or self._captured(at, inputs, fixed)

    def _captured(self, at: _At, inputs: Sequence[torch.Tensor], fixed: frozenset[int]) -> _Graph | None:
        if any(t.device != self.device and t.numel() for t in inputs):
            self._unfit = f"{self.spec.member} reads a tensor on the CPU"
            self._graphs.plain(self._unfit)
            return None
        with torch.inference_mode(False), torch.no_grad():  # what an inference creates could not be written to outside of one
            static = [t if t.data_ptr() in fixed or not t.numel() else _place(t) for t in inputs]
            try:
                replay, outputs = self._graphs.recorder.capture(partial(self.inner.run, static))
            except RuntimeError as error:
                self._failed += 1
                reason = f"{self.spec.member} cannot be captured: {str(error).partition(chr(10))[0]}"
                self._unfit = reason if self._failed >= TRIES else ""
                self._graphs.plain(reason)
                return None
            graph = _Graph(static, fixed, replay, outputs)
        self._graphs.report.captured += 1
        at.graphs.append(graph)
        return graph

    def _replay(self, graph: _Graph, inputs: Sequence[torch.Tensor]) -> None:
        self._graphs.recorder.in_order()
        with torch.no_grad():
            graph.replay(inputs)
        self._graphs.report.replayed += 1


def _shapes(tensors: Sequence[torch.Tensor]) -> tuple[torch.Size, ...]:
    return tuple([t.shape for t in tensors])


def _nobody() -> None:
    return None


def _place(tensor: torch.Tensor) -> torch.Tensor:
    """Memory that lies as ``tensor`` does, filled with it: capturing may look at sizes that come from values."""
    place = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    _once(place).copy_(_once(tensor))
    return place


def _once(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` with each expanded dimension, every index of which is the same place, at its first index alone."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor
