"""Compare a compiled pass with the recorded values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from aot_backward_exporters.graph import Artifact, Graph
from aot_backward_runtime.errors import ExportError
from aot_backward_runtime.format.expressions import evaluate
from aot_backward_runtime.format.manifest import PassSpec, Segment, Verdict
from aot_backward_runtime.native.cuda_library import library_on
from aot_backward_runtime.native.guards import with_strides
from aot_backward_runtime.native.library import Library
from aot_backward_runtime.passes.pass_contract import PassContract
from aot_backward_runtime.tapes.tape import Slot

from ..checks.tolerance import RELATIVE, compare_graph_result, norm
from ..packaging.package_writer import library_spec
from .pass_graphs import gradient_strides
from .recorded_structure import ExamplePass
from .trace import TracedProgram


def libraries_of(program: TracedProgram, artifacts: Mapping[str, Artifact]) -> dict[str, Library]:
    """Return the program's graphs as loaded native code, by name."""
    return {g.name: _library(g, artifacts[g.name]) for g in program.graphs}


def checked(program: TracedProgram, spec: PassSpec, libraries: Mapping[str, Library]) -> PassSpec:
    """Return ``spec`` with its verdict, and mark the leaves that may take a gradient without a copy. Raise
    :class:`ExportError` if a result is wrong.

    Every graph runs on the recorded values. ‖a − e‖ may be at most r·max(‖e‖, 1e-2·G): e is the recorded result, G the
    largest norm in the pass, r the tolerance of the coarsest dtype in it (under autocast a float32 gradient is computed
    from bfloat16 ones).
    """
    tape = program.structure.tape
    gradients = {
        n: op.operands[1].index
        for n, op in enumerate(tape.ops)
        if op.kind == "accumulate" and isinstance(op.operands[1], Slot)
    }
    leaves = {v: tape.ops[n].operands[0].index for n, v in gradients.items()}
    uncopied = {v for t in program.traced for v in t.unaliased}
    worst, name = 0.0, ""
    sizes_run = []
    for example in program.examples:
        values = PassContract(spec).symbol_values(example.shapes, example.sizes)
        if not holds_for(spec, example, values):  # the trace specialized a size to that of another example
            continue
        sizes_run.append(", ".join(f"{k}={v}" for k, v in values.items()))
        largest, coarsest = _largest_norm(example), max((RELATIVE[d] for d in _dtypes(example)), default=0.0)
        for segment in spec.segments:
            if not segment.library:
                continue
            results = _run(segment, libraries[segment.library], example, values)
            for number, result in zip(segment.results, results, strict=True):
                expected = example.values[number]
                if expected is None or result.shape != expected.shape or result.dtype != expected.dtype:
                    raise ExportError(f"%v{number} has another shape or dtype than the recorded one")
                ratio = compare_graph_result(f"%v{number}", result, expected, largest, coarsest).ratio
                if not ratio <= 1:
                    raise ExportError(
                        f"%v{number} is wrong: it differs from the recorded numbers by {ratio:.3g} times the tolerance"
                    )
                if ratio >= worst:
                    worst, name = ratio, f"%v{number}"
                if number in leaves and not _has_gradient_strides(result, spec, leaves[number], values):
                    uncopied.discard(number)
            for number in segment.undefined:
                if example.values.get(number) is not None:
                    raise ExportError(f"%v{number} is defined in one pass and undefined in another")
    if not sizes_run:
        raise ExportError("no numbers were kept of this kind of pass, so it cannot be checked")
    return dataclasses.replace(
        spec,
        segments=tuple(
            dataclasses.replace(s, operands=("fresh",))
            if len(s.ops) == 1 and gradients.get(s.ops[0]) in uncopied
            else s
            for s in spec.segments
        ),
        verdict=Verdict("verified", name, round(worst, 6), tuple(filter(None, sizes_run))),
    )


def _run(segment: Segment, library: Library, example: ExamplePass, values: Mapping[str, int]) -> list[torch.Tensor]:
    operands = []
    for operand, spec in zip(segment.operands, library.spec.inputs, strict=True):
        kind, _, key = operand.partition(":")
        if kind == "size":
            operands.append(torch.empty((evaluate(key, values), 0)))
        else:
            tensor = example.inputs[int(key)] if kind == "input" else example.values[int(key)]
            assert tensor is not None
            operands.append(with_strides(tensor, spec, values))  # a hook's result may have any strides
    return library.run(operands)


def holds_for(spec: PassSpec, example: ExamplePass, values: Mapping[str, int]) -> bool:
    """Return whether the variant's shapes, sizes and guards hold for the example."""
    shapes = [(s.shape, shape) for s, shape in zip(spec.inputs, example.shapes, strict=True)]
    sizes = all(evaluate(size, values) == n for size, n in zip(spec.sizes, example.sizes, strict=True))
    return (
        sizes
        and all(evaluate(g, values) for g in spec.guards)
        and all(evaluate(w, values) == n for ws, ns in shapes for w, n in zip(ws, ns, strict=True))
    )


def _has_gradient_strides(result: torch.Tensor, spec: PassSpec, leaf: int, values: Mapping[str, int]) -> bool:
    stride = tuple(evaluate(s, values) for s in spec.inputs[leaf].stride)
    expected = gradient_strides(tuple(result.shape), stride)
    return all(n <= 1 or a == b for n, a, b in zip(result.shape, result.stride(), expected, strict=True))


def _largest_norm(example: ExamplePass) -> float:
    dense = (
        v for v in example.values.values() if v is not None and v.layout is torch.strided and v.is_floating_point()
    )
    return max(map(norm, dense), default=0.0)


def _dtypes(example: ExamplePass) -> set[torch.dtype]:
    tensors = (*example.inputs.values(), *example.values.values())
    return {
        t.dtype
        for t in tensors
        if t is not None and t.dtype in RELATIVE and t.dtype not in (torch.float64, torch.complex128)
    }


def _library(graph: Graph, artifact: Artifact) -> Library:
    spec = library_spec(graph, artifact)
    on_gpu = any(tensor.device == "cuda" for tensor in (*spec.inputs, *spec.outputs))
    library = library_on(
        torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu"),
        lambda: artifact.library,
        spec,
    )
    library.bind((dict(graph.constants.values()), ()))
    return library
