"""Compare compiled graphs with eager's operators, on the same input tensors.

This checks a rebuilt package without the model's source. For each result of a graph, with a from the compiled code and
e from the operators: ‖a − e‖ ≤ r·max(‖e‖, 1e-2·G). G is the largest norm among the graph's results and r the
:data:`.tolerance.RELATIVE` of e; in a graph with 16-bit values, r is at least twice theirs.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule, Node

from aot_backward_exporters.graph import Graph
from aot_backward_exporters.process_state import patched
from aot_backward_runtime.errors import AotBackwardError, ExportError, InputError
from aot_backward_runtime.format.expressions import evaluate, symbols_of
from aot_backward_runtime.format.manifest import (
    ClippingSpec,
    LibrarySpec,
    Manifest,
    PassSpec,
    TensorSpec,
    UpdateSpec,
    Verdict,
)
from aot_backward_runtime.loader import Package, device_of
from aot_backward_runtime.native.cuda_library import library_on
from aot_backward_runtime.native.guards import dtype_of
from aot_backward_runtime.native.library import Library

from .example_sizes import cotangents_at, sizes_to_check
from .named_results import results_of_entry
from .tolerance import RELATIVE, Comparison, compare_graph_result, distance, is_inexact, norm
from .verify import stored_example, verify_variant


@dataclass
class _Findings:
    """The result nearest to its tolerance so far. For each library, only the first call at each set of sizes is
    compared, because operators run one by one are slow. ``trains``: compare written state only with the stored results,
    because an optimizer divides a gradient that is zero up to rounding by its own size."""

    worst: str = ""
    ratio: float = 0.0
    seen: set[Any] = field(default_factory=set)
    trains: bool = False

    def add(self, name: str, ratio: float) -> None:
        if not ratio <= self.ratio or not self.worst:
            self.worst, self.ratio = name, ratio

    def verdict(self, labels: Sequence[str]) -> Verdict:
        """Return the verdict. ``labels``: the sizes of the runs, as text."""
        return Verdict("verified", self.worst, round(self.ratio, 6), tuple(dict.fromkeys(filter(None, labels))))


def check_variant(
    package: Package, entry: str, number: int, examples: Mapping[str, torch.Tensor], graphs: Mapping[str, Graph]
) -> Verdict:
    """Run variant ``number`` of ``entry`` on its stored example, and compare it with the stored results and the
    operators. If a size is dynamic, also compare with the operators at other sizes. Raise :class:`ExportError` naming
    the wrong result."""
    spec = package.manifest.entries[entry].variants[number]
    findings = _Findings(trains=package.entries[entry] == "step")
    labels = list[str]()
    with _watched(package, graphs, findings, f"{entry} variant {number}"):
        try:
            report = verify_variant(package, entry, number, examples)
        except _Refused as error:
            raise ExportError(
                f"{entry} variant {number}: PyTorch's own operators fail on the stored example: {error}; nothing was written"
            ) from error
        if report.wrong:
            raise ExportError(
                f"{entry} variant {number}: the code compiled by torch {torch.__version__} does not give the results stored in the package: "
                f"{report.wrong[0]}; nothing was written"
            )
        findings.add(report.worst, report.ratio)
        if package.entries[entry] != "step":
            for sized in sizes_to_check(spec, stored_example(spec, entry, number, examples)):
                try:
                    results_of_entry(package, entry, spec, sized.example, cotangents_at(spec, sized.values))
                except (_Refused, InputError):
                    # Eager refuses this size, too: an index out of range, or a number of rows that does not fit the
                    # program
                    continue
                labels.append(sized.label)
    return findings.verdict(labels)


def check_pass(
    manifest: Manifest,
    variant: PassSpec,
    paths: Mapping[str, Path],
    weights: Mapping[str, torch.Tensor],
    graphs: Mapping[str, Graph],
) -> Verdict:
    """Compare every graph of a recorded pass on made-up numbers: recorded ones are not kept. Raise :class:`ExportError`
    naming the wrong result."""
    findings = _Findings()
    labels = list[str]()
    for name in [s.library for s in variant.segments if s.library]:
        spec = manifest.libraries[name]
        device = device_of(manifest)
        library = library_on(device, partial(paths.__getitem__, name), spec)
        constants = {c.weight: weights[c.weight].to(device) for c in spec.constants}
        library.bind((constants, ()))
        for values in _sizes(variant, spec, graphs[name]):
            # Integers may be indices into few elements; then the operators, which run first, raise
            for maximum in (3, 1, 0):
                try:
                    inputs = [_random_input(described, values, i, maximum) for i, described in enumerate(spec.inputs)]
                    _compare_call(name, spec, graphs[name], inputs, constants, library.run, findings, "a recorded pass")
                    break
                except _Refused as error:
                    if maximum == 0 and not labels:
                        raise ExportError(
                            f"a recorded pass: PyTorch's own operators fail on made-up numbers: {error}; nothing was written"
                        ) from error
            labels.append(", ".join(f"{s.label}={values[s.name]}" for s in variant.symbols if s.name in values))
    if not findings.worst:
        return Verdict("not run: it draws random numbers, and a GPU draws different ones than the CPU")
    return findings.verdict(labels)


def check_update(
    manifest: Manifest, update: UpdateSpec, paths: Mapping[str, Path], graphs: Mapping[str, Graph]
) -> Verdict:
    """Compare an optimizer step with its operators, on made-up parameters, gradients and state and the recorded
    numbers; as :func:`check_pass`."""
    spec, count = manifest.libraries[update.library], len(update.trained)
    inputs = [_random_input(described, {}, i, 1) for i, described in enumerate(spec.inputs)]
    for state in inputs[2 * count : -1]:
        state.abs_().add_(1.0)  # squares and counts of steps are positive
    inputs[-1].copy_(torch.tensor([0.0, 0.0, *(n.value for n in update.numbers)], dtype=torch.float64))
    return _check_written(
        "an optimizer step", manifest, update.library, paths, graphs, inputs, range(count, len(inputs) - 1)
    )


def check_clipping(
    manifest: Manifest, clipping: ClippingSpec, paths: Mapping[str, Path], graphs: Mapping[str, Graph]
) -> Verdict:
    """Compare a clipping of made-up gradients with its operators, by the changed gradients; as :func:`check_pass`."""
    spec = manifest.libraries[clipping.library]
    inputs = [_random_input(described, {}, i, 1) for i, described in enumerate(spec.inputs)]
    inputs[-1].copy_(torch.tensor([0.5, 0.0], dtype=torch.float64))
    return _check_written(clipping.function, manifest, clipping.library, paths, graphs, inputs, range(len(inputs) - 1))


def _check_written(
    subject: str,
    manifest: Manifest,
    name: str,
    paths: Mapping[str, Path],
    graphs: Mapping[str, Graph],
    inputs: list[torch.Tensor],
    places: range,
) -> Verdict:
    """Compare the values that library ``name`` and the graph's operators write to the ``inputs`` at ``places``."""
    spec, findings = manifest.libraries[name], _Findings()
    library = library_on(device_of(manifest), partial(paths.__getitem__, name), spec)
    library.bind(({}, ()))
    expected, actual = [_copy(t) for t in inputs], [_copy(t) for t in inputs]
    run_graph(graphs[name].module, expected, {})
    library.run(actual)
    coarsest = 2 * max((RELATIVE[d] for d in _dtypes(graphs[name].module)), default=0.0)
    comparisons = list(zip(spec.inputs, actual, expected, strict=True))[places.start : places.stop]
    largest = max((norm(e) for _, _, e in comparisons if e.is_floating_point()), default=0.0)
    for described, a, e in comparisons:
        ratio = _compare(described.name, a, e, largest, coarsest).ratio
        if not ratio <= 1:
            raise ExportError(
                f"{subject}: {described.name} is wrong: the code compiled from the portable graph {name} differs from PyTorch's own operators by "
                f"{ratio:.3g} times the tolerance; nothing was written"
            )
        findings.add(described.name, ratio)
    return findings.verdict([])


def _sizes(variant: PassSpec, spec: LibrarySpec, graph: Graph) -> Iterator[dict[str, int]]:
    """Yield the sizes of the example, then others if the variant allows any."""
    first: dict[str, int] = {}
    for node, described in zip(graph.module.graph.find_nodes(op="placeholder"), spec.inputs, strict=True):
        for size, dim in zip(node.meta["val"].shape, described.shape, strict=True):
            if isinstance(dim, str) and dim.isidentifier():
                first[dim] = int(size.node.hint) if isinstance(size, torch.SymInt) else size
    names = {s for described in spec.inputs for size in (*described.shape, *described.stride) for s in symbols_of(size)}
    if names - first.keys():
        raise ExportError(
            f"{spec.member}: the sizes {', '.join(sorted(names - first.keys()))} cannot be computed from its inputs; report this as a bug"
        )
    yield first
    symbols = [s for s in variant.symbols if s.name in first]
    for factor in (1, 2, 3, 4, 8):
        sizes = {s.name: first[s.name] + factor * (i + 1) for i, s in enumerate(symbols)}
        inside = all(s.minimum <= sizes[s.name] and (s.maximum is None or sizes[s.name] <= s.maximum) for s in symbols)
        if symbols and inside and all(evaluate(g, sizes) for g in variant.guards if symbols_of(g) <= sizes.keys()):
            yield sizes
            return


def _random_input(described: TensorSpec, values: Mapping[str, int], seed: int, maximum: int) -> torch.Tensor:
    """Return a random tensor. ``maximum``: the largest integer."""
    shape, stride = [evaluate(s, values) for s in described.shape], [evaluate(s, values) for s in described.stride]
    dtype, generator = dtype_of(described.dtype), torch.Generator().manual_seed(seed)
    if dtype.is_floating_point or dtype.is_complex:
        sample = torch.randn(
            shape, generator=generator, dtype=torch.complex64 if dtype.is_complex else torch.float32
        ).to(dtype)
    else:
        sample = torch.randint(0, 2 if dtype == torch.bool else maximum + 1, shape, generator=generator).to(dtype)
    sample = sample.to(described.device)
    if any(s == 0 and n > 1 for n, s in zip(shape, stride, strict=True)):
        return sample[tuple(slice(0, 1) if s == 0 else slice(None) for s in stride)].expand(shape)
    return torch.empty_strided(shape, stride, dtype=dtype, device=sample.device).copy_(sample)


class _Refused(Exception):
    """Eager's operators cannot run a graph on these tensors."""


@contextlib.contextmanager
def _watched(package: Package, graphs: Mapping[str, Graph], findings: _Findings, subject: str) -> Iterator[None]:
    """Compare every graph that ``package`` opens, each time it is called inside."""
    load = Library._load

    def load_watched(library: Library) -> Any:
        name = next((n for n, spec in package.manifest.libraries.items() if spec is library.spec), None)
        if name is None:  # another thread is loading another package
            return load(library)
        return _Watched(load(library), name, library.spec, graphs[name], findings, subject)

    with patched(Library, _load=load_watched):
        yield


class _Watched:
    """Runner of a library that compares each call."""

    def __init__(self, runner: Any, name: str, spec: LibrarySpec, graph: Graph, findings: _Findings, subject: str):
        self._runner = runner
        self._name = name
        self._spec = spec
        self._graph = graph
        self._findings = findings
        self._what = subject
        self._constants: dict[str, torch.Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def bind(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._constants = {c.weight: tensors[c.name] for c in self._spec.constants}
        self._runner.bind(tensors)

    def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        key = (self._name, tuple(tuple(t.shape) for t in inputs))
        if key in self._findings.seen:
            return self._runner.run(inputs)
        self._findings.seen.add(key)
        return _compare_call(
            self._name, self._spec, self._graph, inputs, self._constants, self._runner.run, self._findings, self._what
        )


def _compare_call(
    name: str, spec: LibrarySpec, graph: Graph, inputs: Sequence[torch.Tensor], constants: Mapping[str, torch.Tensor], run: Any, findings: _Findings,
    subject: str,
) -> list[torch.Tensor]:  # fmt: skip
    """Compare a call of ``run`` and return its results. The operators run on the CPU, where the graph was captured. A
    graph that draws random numbers is not compared on a GPU, because the CPU draws others."""
    if consumes_rng(graph) and any(t.device.type != "cpu" for t in (*inputs, *constants.values())):
        return list(run(list(inputs)))
    copies, weights = [_copy(t).cpu() for t in inputs], {key: _copy(t).cpu() for key, t in constants.items()}
    with torch.random.fork_rng(devices=[]):
        try:
            expected = run_graph(
                graph.module, copies, {target: weights[key] for target, (key, _) in graph.constants.items()}
            )
        # An index out of range is an IndexError; an operator written in Python may raise any exception
        except Exception as error:
            raise _Refused(f"{type(error).__name__}: {str(error).partition(chr(10))[0]}") from error
    actual = run(list(inputs))
    pairs = [(described.name, a.cpu(), e) for described, a, e in zip(spec.outputs, actual, expected, strict=True)]
    if not findings.trains:
        pairs += [(f"the value written to {key}", constants[key].cpu(), weights[key]) for key in constants]
    largest = max((norm(e) for _, _, e in pairs[: len(actual)] if e.is_floating_point()), default=0.0)
    # Both are rounded, each in its own order
    coarsest = 2 * max((RELATIVE[d] for d in _dtypes(graph.module)), default=0.0)
    for label, a, e in pairs:
        ratio = _compare(label, a, e, largest, coarsest).ratio
        if not ratio <= 1:
            raise ExportError(
                f"{subject}: {label} is wrong: the code compiled from the portable graph {name} differs from PyTorch's own operators by "
                f"{ratio:.3g} times the tolerance; nothing was written"
            )
        findings.add(f"{label} of {name}", ratio)
    return actual


def consumes_rng(graph: Graph) -> bool:
    """Return whether the graph draws random numbers."""
    return any(
        torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) and _has_dropout(node)
        for node in graph.module.graph.nodes
    )


def _has_dropout(node: Node) -> bool:
    """Return False for attention without dropout, which has the tag of random operators all the same."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    arguments = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    return "dropout_p" not in names or bool(arguments.get("dropout_p"))


def run_graph(
    module: GraphModule, inputs: Sequence[torch.Tensor], constants: Mapping[str, torch.Tensor]
) -> list[torch.Tensor]:
    """Run ``module`` (from :func:`portable.graph_json.graph_of`) operator by operator and return its outputs.
    ``constants``: its attributes' values; the graph may write to them."""
    values: dict[Node, Any] = {}
    rest = iter(inputs)
    with torch.no_grad():
        for node in module.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(rest)
            elif node.op == "get_attr":
                values[node] = constants[node.target] if node.target in constants else getattr(module, str(node.target))
            elif node.op == "output":
                return list(torch.fx.map_arg(node.args[0], values.__getitem__))
            else:
                args, kwargs = torch.fx.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = node.target(*args, **kwargs)
    raise AotBackwardError("the graph has no output")


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    if any(s == 0 and n > 1 for n, s in zip(tensor.shape, tensor.stride(), strict=True)):
        return tensor.detach().clone()
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(
        tensor.detach()
    )


def _dtypes(module: GraphModule) -> set[torch.dtype]:
    values = [n.meta.get("val") for n in module.graph.nodes]
    return {
        t.dtype
        for t in values
        if isinstance(t, torch.Tensor) and t.dtype in (torch.float16, torch.bfloat16, torch.complex32)
    }


def _compare(label: str, a: torch.Tensor, e: torch.Tensor, largest: float, coarsest: float) -> Comparison:
    if a.shape != e.shape or a.dtype != e.dtype:
        return Comparison(label, math.inf, 0.0)
    if not is_inexact(e):  # a mask, or the index of a maximum: rounding decides values at the limit
        return Comparison(label, distance(a, e), max(coarsest, 1e-6) * e.numel())
    return compare_graph_result(label, a, e, largest, coarsest)
