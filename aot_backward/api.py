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
    """Compile ``entries`` ahead of time, compare each with eager, and write one package to ``path``.

    ``target``: "cpu" (any x86-64-v3 processor, the same as "cpu:avx2"), "cpu:sse4" (older ones), "cpu:avx512", several of these separated by commas
    (``load`` takes the best one for its processor), "cuda" (this machine's GPU), or "cuda:sm_90" and others (GPUs that need not be here:
    ``docs/rebuild.md``). ``weights=False`` omits the weights; they are bound when the package is loaded. ``portable=False`` omits the graphs as data:
    the package can then neither be rebuilt for another torch or target nor converted. If a gradient is wrong or cannot be computed, nothing is
    written and :class:`ExportError` gives the reason.

    ``tune``: "quick" compiles a variant in each way that the graph gives reason for, times them and eager, and ships the fastest; "none" times
    nothing. The default is ``$AOT_BACKWARD_TUNE``, else "quick". The package stores the measurements (``VariantSpec.speed``). Variants that are
    slower than eager are logged as a warning.

    ``runtime="standalone"``: every entry must run without PyTorch (``docs/native.md``); :class:`ExportError` names the operators that prevent it.
    Otherwise this is tried if ``aot-backward-native`` is installed, and the package states the result (``EntrySpec.standalone``).

    The modules stay unchanged: parameters, buffers, ``.grad``, modes and the random state.
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
    """Compile for the CPU and compare with eager there, which casts under autocast as on a GPU. Then compile the same graphs for the GPUs; without a
    GPU these are not compared."""
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
    """Export one module, one variant, in its present mode: forward and backward, with ``order=2`` also second derivatives. See :class:`Module`,
    :class:`Variant` and :func:`export`."""
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
    """Export one function or module that returns a loss: value and gradients in one fused graph. See :class:`Grad` and :func:`export`."""
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
    """Export a whole training step, in the module's present mode: forward, backward and optimizer in one native call. See :class:`Step` and
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
