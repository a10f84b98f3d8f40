"""``export``: entries -> capture -> native code -> self-check -> one package."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from aot_backward_exporters.progress import Progress, silent
from aot_backward_runtime.errors import ExportError

from .capture.cuda_semantics import as_on_gpu
from .entries import Entries, Grad, Module, Step, Variant
from .packaging.checked_package import checked_package
from .packaging.package_writer import check_destination
from .packaging.standalone import check_runtime
from .packaging.tuning import say_slower, tune_of


def export(
    path: str | os.PathLike[str],
    entries: Entries,
    *,
    target: str = "cpu",
    weights: bool = True,
    portable: bool = True,
    tune: str | None = None,
    runtime: str | None = None,
    progress: Progress | None = None,
) -> Path:
    """Compiles ``entries`` ahead of time, compares each with eager, and writes one package to ``path``.

    ``target``: "cpu" (any x86-64-v3 processor, the same as "cpu:avx2"), "cpu:sse4" (older ones), "cpu:avx512", several with commas between them, of
    which ``load`` takes the best that its processor can, "cuda" (this machine's GPU), or "cuda:sm_90" and others (GPUs that need not be here:
    ``docs/rebuild.md``). ``weights=False`` leaves the weights out; they are bound when the package is loaded. ``portable=False`` leaves out the
    graphs as data, without which the package can neither be rebuilt for another torch or target nor converted. Nothing is written where a gradient
    is wrong or cannot be had: :class:`ExportError` says which and why.
    ``tune``: how many ways to compile a variant are tried, each timed beside eager, of which the fastest is shipped: "quick", those that the graph
    gives reason for; "none". Without it what ``$AOT_BACKWARD_TUNE`` says, else "quick". What was measured is in the package
    (``VariantSpec.speed``), and what is slower than eager is logged as a warning.
    ``runtime="standalone"``: every entry must run without PyTorch (``docs/native.md``); :class:`ExportError` names the operators that stand in the
    way. Otherwise it is tried where ``aot-backward-native`` is installed, and the package says what came of it (``EntrySpec.standalone``).
    The modules are left as they were: parameters, buffers, ``.grad``, modes and the random state.
    """
    if not isinstance(path, str | os.PathLike) or "\0" in os.fspath(path):
        raise ExportError(f"path is {path!r}; expected the name of the file to write, such as 'model.pt2'")
    path = Path(path)
    if not entries:
        raise ExportError("nothing to export: entries is empty")
    check_entries(entries)
    tune = tune_of(tune)
    check_runtime(runtime, target, weights)
    check_destination(path)
    if target.startswith("cuda:"):
        return _for_absent_gpus(path, entries, target, weights=weights, portable=portable, tune=tune, progress=progress)
    progress = progress or silent
    say_slower(checked_package(path, entries, target, weights=weights, portable=portable, tune=tune, runtime=runtime, progress=progress))
    return path


def _for_absent_gpus(path: Path, entries: Entries, target: str, *, weights: bool, portable: bool, tune: str, progress: Progress | None) -> Path:
    """Compiled for the CPU and compared with eager there, which casts under autocast as it would on a GPU; then the same graphs for the GPUs, which
    compares nothing where there is none."""
    from .packaging.rebuild import check_target, rebuild

    check_target(target)  # before minutes of compiling
    with tempfile.TemporaryDirectory(prefix="aot-backward-") as folder:
        with as_on_gpu():
            checked = Path(folder) / "cpu.pt2"
            checked_package(checked, entries, "cpu", weights=weights, portable=True, tune=tune, progress=progress or silent)
        return rebuild(checked, path, target=target, with_graphs=portable, captured_for="cuda", progress=progress)


def export_module(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    requires_grad: Sequence[str] | None = None,
    order: int = 1,
    target: str = "cpu",
    tune: str | None = None,
    path: str | os.PathLike[str],
    progress: Progress | None = None,
) -> Path:
    """One module, one variant, in its present mode: forward and backward, with ``order=2`` twice. See :class:`Module`, :class:`Variant` and
    :func:`export`."""
    variant = Variant(args, kwargs, dynamic_shapes=dynamic_shapes, requires_grad=requires_grad)
    return export(path, {"module": Module(module, [variant], order)}, target=target, tune=tune, progress=progress)


def export_grad(
    fn_or_module: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    wrt: str | Sequence[str] | None = None,
    has_aux: bool = False,
    dynamic_shapes: Any = None,
    target: str = "cpu",
    tune: str | None = None,
    path: str | os.PathLike[str],
    progress: Progress | None = None,
) -> Path:
    """One function or module that returns a loss: value and gradients in one fused graph. See :class:`Grad` and :func:`export`."""
    variant = Variant(args, kwargs, dynamic_shapes=dynamic_shapes)
    return export(path, {"grad": Grad(fn_or_module, [variant], wrt, has_aux)}, target=target, tune=tune, progress=progress)


def export_step(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    loss_fn: Callable[..., Any] | None = None,
    optimizer: torch.optim.Optimizer,
    dynamic_shapes: Any = None,
    target: str = "cpu",
    tune: str | None = None,
    path: str | os.PathLike[str],
    accumulate: bool = False,
    distributed: bool = False,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    skip_nonfinite: bool = False,
    loss_scale: float | None = None,
    progress: Progress | None = None,
) -> Path:
    """A whole training step, in the module's present mode: forward, backward and optimizer in one native call. See :class:`Step` and
    :func:`export`. ``args``: the module's positional arguments and, with a ``loss_fn``, its target as the last."""
    step = Step(
        module,
        [Variant(args, kwargs, dynamic_shapes=dynamic_shapes)],
        optimizer,
        loss_fn=loss_fn,
        accumulate=accumulate,
        distributed=distributed,
        clip_norm=clip_norm,
        clip_value=clip_value,
        skip_nonfinite=skip_nonfinite,
        loss_scale=loss_scale,
    )
    return export(path, {"step": step}, target=target, tune=tune, progress=progress)


def check_entries(entries: Any) -> None:
    if not isinstance(entries, Mapping):
        raise ExportError(f"entries is a {type(entries).__name__}; expected a dict, {{'module': Module(net, [Variant((x,))])}}")
    for name, entry in entries.items():
        if not isinstance(name, str):
            raise ExportError(f"an entry is named {name!r}; expected a string")
        if not isinstance(entry, Module | Grad | Step):
            raise ExportError(f"entry {name!r} is a {type(entry).__name__}; expected a Module, a Grad or a Step")
        if not isinstance(entry.variants, Sequence) or not all(isinstance(v, Variant) for v in entry.variants):
            raise ExportError(f"entry {name!r}: variants is {entry.variants!r:.80}; expected a list, [Variant((x,))]")
