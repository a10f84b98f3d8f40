"""Entries -> capture -> native code -> self-check -> one package, for targets that include this machine's kind."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from torch import nn

from aot_backward_exporters.inductor.compile import shared_parts_started
from aot_backward_exporters.process_state import exclusive
from aot_backward_exporters.progress import Progress
from aot_backward_runtime.format.manifest import Manifest
from aot_backward_runtime.native import allocator

from .. import operators
from ..capture import preserve, program_module
from ..entries import Entries, Function, Grad, Step
from .builder import Build
from .contents import Contents
from .package_writer import write_package
from .standalone import with_standalone


def checked_package(
    path: Path,
    entries: Entries,
    target: str,
    *,
    weights: bool,
    portable: bool,
    tune: str,
    metadata: str,
    progress: Progress,
    runtime: str | None = None,
) -> Manifest:
    """Write the package. One of its targets is this machine's kind. ``metadata``: a JSON object, or ""."""
    parameters = [t for program in _programs(entries) for t in program.parameters()]
    size = sum(t.nbytes for t in parameters if t.layout is torch.strided and not nn.parameter.is_lazy(t))
    with (
        everything_kept(entries),
        allocator.freed_at_once(size),
        tempfile.TemporaryDirectory(prefix="aot-backward-") as folder,
    ):
        contents = Contents(
            target, Path(folder), progress, portable=portable, tune=tune, standalone=runtime == "standalone"
        )
        build = Build(contents)
        with shared_parts_started(contents.targets):
            for name, entry in entries.items():
                build.add(name, entry)
        examples: dict[str, torch.Tensor] = {}
        manifest = dataclasses.replace(build.manifest(weights), metadata=metadata)
        manifest = build.check(manifest, contents.packages(manifest), examples)
        write = partial(write_package, artifacts=contents.artifacts, weights=contents.weights, examples=examples)
        manifest = with_standalone(
            manifest,
            contents.artifacts,
            contents.weights,
            examples,
            Path(folder),
            required=runtime == "standalone",
            progress=progress,
        )
        progress("write", 0, 1)
        written_manifest = write(path, manifest, graphs=contents.portables)
        progress("write", 1, 1)
    operators.say(written_manifest.operators)
    return manifest


@contextlib.contextmanager
def everything_kept(entries: Entries) -> Iterator[None]:
    """Restore buffers and random state afterwards: tracing and checking run the program. Only one thread is inside at a
    time."""
    programs = _programs(entries)
    with exclusive(), preserve.random_state_kept(), contextlib.ExitStack() as stack:
        # Read under the lock: another thread's export of the same module may be changing them
        buffers = [b for p in programs for b in p.buffers()]
        copies = [b.detach().clone() for b in buffers]
        for program in programs:
            stack.enter_context(preserve.slots_kept(program))
            stack.enter_context(preserve.attributes_kept(program))
        try:
            yield
        finally:
            torch.clear_autocast_cache()
            with torch.no_grad():
                for buffer, value in zip(buffers, copies, strict=True):
                    if not torch.equal(buffer, value):
                        buffer.copy_(value)


def _programs(entries: Entries) -> list[nn.Module]:
    """Return the exported programs and the loss functions."""
    fns = [e.fn if isinstance(e, Function | Grad) else e.module for e in entries.values()]
    fns += [e.loss_fn for e in entries.values() if isinstance(e, Step) and e.loss_fn is not None]
    return [p if isinstance(p, nn.Module) else program_module.FunctionModule(p) for p in fns]
