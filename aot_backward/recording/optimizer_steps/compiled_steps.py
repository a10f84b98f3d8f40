"""Trace and compile observed optimizer steps and clippings, compare them with eager, and time both."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from aot_backward_exporters.graph import Artifact, Graph
from aot_backward_exporters.inductor import compile, targets
from aot_backward_exporters.portable import graph_json
from aot_backward_exporters.progress import Progress
from aot_backward_runtime.errors import AotBackwardError, ExportError
from aot_backward_runtime.format.manifest import ClippingSpec, UpdateSpec
from aot_backward_runtime.native.cuda_library import library_on

from ...packaging.package_writer import library_spec
from ..infer_shapes import fake_mode
from .observed_steps import ObservedSteps
from .traced_clipping import TracedClipping
from .traced_step import TracedStep

_STEP, _CLIPPING = "update", "clipping"


@dataclass
class CompiledStep:
    """One kind of steps or of clippings, ready for the package."""

    spec: UpdateSpec | ClippingSpec
    graph: Graph
    artifact: Artifact
    portable: bytes | None

    @property
    def name(self) -> str:
        """The optimizer or function: ``AdamW``, ``clip_grad_norm_``."""
        return _name(self.spec)


def compile_steps(
    observed: ObservedSteps, folder: Path, target: str, say: Progress, tune: str, skipped: Counter[str]
) -> Iterator[CompiledStep]:
    """Yield the steps that came more than once. If one cannot be compiled or differs from eager, it is left out, with
    the reason in ``skipped``."""
    mode = fake_mode()
    traced: list[TracedStep | TracedClipping] = []
    kinds, clippings = observed.repeated, observed.clippings.repeated
    for done, (digest, kind) in enumerate(kinds.items()):
        say("trace optimizer steps", done, len(kinds) + len(clippings))
        with _left_out(kind.words, skipped):
            traced.append(TracedStep(f"{_STEP}.{digest[:12]}", kind, mode))
    for done, (digest, clipping) in enumerate(clippings.items(), len(kinds)):
        say("trace optimizer steps", done, len(kinds) + len(clippings))
        with _left_out(clipping.words, skipped):
            traced.append(TracedClipping(f"{_CLIPPING}.{digest[:12]}", clipping, mode))
    if not traced:
        return
    artifacts = _artifacts(traced, folder, mode, target, say, skipped)
    for done, step in enumerate(traced):
        say("check optimizer steps", done, len(traced))
        if step.spec.library in artifacts:
            with _left_out(step.words, skipped):
                yield _finished(step, artifacts[step.spec.library], target, tune)
    say("check optimizer steps", len(traced), len(traced))


@contextlib.contextmanager
def _left_out(words: str, skipped: Counter[str]) -> Iterator[None]:
    """Catch an error inside, and note it as the reason why ``words`` is left out."""
    try:
        yield
    except (AotBackwardError, RuntimeError) as error:
        skipped[f"{words}: {str(error).partition(chr(10))[0]}"] += 1


def _artifacts(
    traced: Sequence[TracedStep | TracedClipping],
    folder: Path,
    mode: Any,
    target: str,
    say: Progress,
    skipped: Counter[str],
) -> dict[str, Artifact]:
    """Compile all graphs at once and return them by name. If the compiler refuses one, compile each alone."""
    (together := folder / _STEP).mkdir()
    name = targets.parsed(target)[0]
    try:
        return compile.compile_graphs(
            [t.graph for t in traced], folder=together, fake_mode=mode, target=name, progress=say
        )
    except ExportError:
        artifacts: dict[str, Artifact] = {}
        for step in traced:
            (step_folder := folder / step.graph.name).mkdir()
            with _left_out(step.words, skipped):
                artifacts |= compile.compile_graphs(
                    [step.graph], folder=step_folder, fake_mode=mode, target=name, progress=say
                )
        return artifacts


def _finished(step: TracedStep | TracedClipping, artifact: Artifact, target: str, tune: str) -> CompiledStep:
    """Check and time a step, and write its graph as data."""
    library = library_on(torch.device("cpu"), lambda: artifact.library, library_spec(step.graph, artifact))
    spec = step.finished(library, tune, target)
    portable = None
    with contextlib.suppress(ExportError):  # without the graph as data the package works, but cannot be rebuilt
        portable = graph_json.graph_to_bytes(step.graph, int, {})
    return CompiledStep(spec, step.graph, artifact, portable)


def slower(spec: UpdateSpec | ClippingSpec) -> str:
    """Return the times of a step that is not faster when compiled, as text."""
    times: Mapping[str, float] = spec.speed.means if spec.speed is not None else {}
    prefix = "the optimizer step of " if isinstance(spec, UpdateSpec) else ""
    return (
        f"{prefix}{_name(spec)}: {', '.join(f'{name} {microseconds:,.0f} µs' for name, microseconds in times.items())}"
    )


def _name(spec: UpdateSpec | ClippingSpec) -> str:
    return spec.optimizer.rpartition(".")[2] if isinstance(spec, UpdateSpec) else spec.function
