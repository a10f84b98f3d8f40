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
from .entries import Entries, Function, Grad, Module, Step, Variant
from .packaging.builder import metadata_text
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
    metadata: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Path:
    """Compile entries ahead of time, compare each with eager, and write them into one package.

    Your modules stay unchanged: parameters, buffers, ``.grad``, modes and the random state. If a result is wrong or
    cannot be computed, nothing is written.

    Args:
        path: The file to write, such as "model.pt2".
        entries: The programs to export, by name: each a :class:`Module`, a :class:`Function`, a :class:`Grad` or a
            :class:`Step`.
        target: The processors or the GPUs to compile for; separate several by commas, and ``load`` takes the best one
            for its machine. "cpu" is any x86-64-v3 processor (the same as "cpu:avx2"), "cpu:sse4" an older one,
            "cpu:avx512" a newer one, "cpu:neon" a 64-bit one of Arm, which needs a compiler for it
            (``docs/how-to/raspberry-pi.md``). "cuda" is this machine's GPU. "cuda:sm_90" and others are GPUs that need
            not be here (``docs/rebuild.md``).
        weights: Whether to write the weights too. Without them, bind yours with ``load(path, weights=…)``.
        portable: Whether to write the graphs as data too. Without them the package can neither be rebuilt for another
            torch or target nor converted.
        tune: "quick" compiles a variant in each way that the graph gives reason for, times them and eager, and ships
            the fastest; it logs a warning for a variant that is slower than eager. "none" times nothing. The default
            is ``$AOT_BACKWARD_TUNE``, else "quick".
        runtime: "standalone" requires that every entry runs without PyTorch (``docs/native.md``); code that cannot run
            here is marked "not run". "torch" and None do not require it: if ``aot-backward-native`` is installed,
            export tries it, and the package states the result.
        metadata: A JSON object of your own, such as a version or an author; it is ``load(path).metadata``. Entries
            have their own.
        progress: A function that is called as ``progress(stage, done, total)``.

    Returns:
        The path of the package.

    Raises:
        ExportError: An entry cannot be exported correctly, or an argument is invalid. The message names the operator,
            the tensor or the size.

    Examples:
        >>> variant = ab.Variant((torch.randn(4, 8),))
        >>> path = ab.export("net.pt2", {"net": ab.Module(net, [variant])})
        >>> ab.load(path).entries
        {'net': 'module'}
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
    own_metadata = metadata_text(metadata, "metadata")
    if target.startswith("cuda:"):
        return _for_absent_gpus(
            path,
            entries,
            target,
            weights=weights,
            portable=portable,
            tune=tune,
            metadata=own_metadata,
            progress=progress,
        )
    manifest = checked_package(
        path,
        entries,
        target,
        weights=weights,
        portable=portable,
        tune=tune,
        runtime=runtime,
        metadata=own_metadata,
        progress=progress or silent,
    )
    say_slower(manifest)
    return path


def _for_absent_gpus(
    path: Path,
    entries: Entries,
    target: str,
    *,
    weights: bool,
    portable: bool,
    tune: str,
    metadata: str,
    progress: Progress | None,
) -> Path:
    """Compile for the CPU and compare with eager there, which casts under autocast as on a GPU. Then compile the same
    graphs for the GPUs; without a GPU these are not compared."""
    from .packaging.rebuild import check_target, rebuild

    check_target(target)  # before minutes of compiling
    with tempfile.TemporaryDirectory(prefix="aot-backward-") as folder:
        with as_on_gpu():
            cpu_path = Path(folder) / "cpu.pt2"
            checked_package(
                cpu_path,
                entries,
                "cpu",
                weights=weights,
                portable=True,
                tune=tune,
                metadata=metadata,
                progress=progress or silent,
            )
        return rebuild(cpu_path, path, target=target, with_graphs=portable, captured_for="cuda", progress=progress)


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
    runtime: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    path: str | os.PathLike[str],
    progress: Progress | None = None,
) -> Path:
    """Export one module with its forward and backward, in its present mode and in one variant.

    The package has one entry, "module". See :class:`Module` and :class:`Variant` for details, and :func:`export` for
    packages of several entries.

    Args:
        module: The module. Call ``train()`` or ``eval()`` before.
        args: Example arguments. Their dtypes and ranks are fixed; so are their sizes, except for dynamic ones.
        kwargs: Example keyword arguments.
        dynamic_shapes: The dynamic sizes, as for ``torch.export.export``.
        requires_grad: Names of the inputs and parameters that get a gradient; the default is every tensor that requires
            one now.
        order: The highest order of derivatives; 2 also compiles differentiable gradients.
        target: As for :func:`export`.
        tune: As for :func:`export`.
        runtime: As for :func:`export`.
        metadata: As for :func:`export`.
        path: The file to write.
        progress: As for :func:`export`.

    Returns:
        The path of the package.

    Raises:
        ExportError: The module cannot be exported correctly; nothing is written.

    Examples:
        >>> batch = torch.export.Dim("batch", min=2, max=1024)
        >>> path = ab.export_module(net, (torch.randn(4, 8),), dynamic_shapes=({0: batch},), path="net.pt2")
        >>> ab.load(path).module()(torch.randn(100, 8)).shape
        torch.Size([100, 1])
    """
    if not isinstance(module, nn.Module):
        raise ExportError(
            f"module: expected an nn.Module, got a {type(module).__name__}. For its outputs call export_function, for gradients export_grad."
        )
    variant = Variant(args, kwargs, dynamic_shapes=dynamic_shapes, requires_grad=requires_grad)
    entries = {"module": Module(module, [variant], order)}
    return export(path, entries, target=target, tune=tune, runtime=runtime, metadata=metadata, progress=progress)


def export_function(
    fn_or_module: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    target: str = "cpu",
    tune: str | None = None,
    runtime: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    path: str | os.PathLike[str],
    progress: Progress | None = None,
) -> Path:
    """Export one function or module without gradients. It may compute derivatives itself, with ``torch.autograd.grad``
    or ``torch.func``.

    The package has one entry, "function". See :class:`Function` and :class:`Variant` for details.

    Args:
        fn_or_module: A function or a module that returns tensors, in any nesting.
        args: Example arguments.
        kwargs: Example keyword arguments.
        dynamic_shapes: The dynamic sizes, as for ``torch.export.export``.
        target: As for :func:`export`.
        tune: As for :func:`export`.
        runtime: As for :func:`export`.
        metadata: As for :func:`export`.
        path: The file to write.
        progress: As for :func:`export`.

    Returns:
        The path of the package.

    Raises:
        ExportError: The function cannot be exported correctly; nothing is written.

    Examples:
        >>> def distances(pos):
        ...     return torch.cdist(pos, pos)
        >>> path = ab.export_function(distances, (torch.randn(4, 3),), path="distances.pt2")
        >>> ab.load(path).function()(torch.randn(4, 3)).shape
        torch.Size([4, 4])
    """
    variant = Variant(args, kwargs, dynamic_shapes=dynamic_shapes)
    entries = {"function": Function(fn_or_module, [variant])}
    return export(path, entries, target=target, tune=tune, runtime=runtime, metadata=metadata, progress=progress)


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
    runtime: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    path: str | os.PathLike[str],
    progress: Progress | None = None,
) -> Path:
    """Export one function or module that returns a scalar loss: the value and its gradients in one fused graph.

    The package has one entry, "grad". See :class:`Grad` and :class:`Variant` for details.

    Args:
        fn_or_module: A function or a module that returns a scalar loss, or ``(loss, aux)``.
        args: Example arguments.
        kwargs: Example keyword arguments.
        wrt: Names of the inputs or parameters to differentiate, "parameters" or "inputs"; the default is the parameters
            of a module, and the inputs of a function.
        has_aux: Whether the result is ``(loss, aux)``.
        dynamic_shapes: The dynamic sizes, as for ``torch.export.export``.
        target: As for :func:`export`.
        tune: As for :func:`export`.
        runtime: As for :func:`export`.
        metadata: As for :func:`export`.
        path: The file to write.
        progress: As for :func:`export`.

    Returns:
        The path of the package.

    Raises:
        ExportError: The function cannot be exported correctly; nothing is written.

    Examples:
        >>> def energy(pos):
        ...     return (pos[:, None] - pos[None]).square().sum()
        >>> path = ab.export_grad(energy, (torch.randn(4, 3),), wrt="pos", path="energy.pt2")
        >>> value, gradient = ab.load(path).grad()(torch.randn(4, 3))
        >>> gradient.shape
        torch.Size([4, 3])
    """
    variant = Variant(args, kwargs, dynamic_shapes=dynamic_shapes)
    entries = {"grad": Grad(fn_or_module, [variant], wrt, has_aux)}
    return export(path, entries, target=target, tune=tune, runtime=runtime, metadata=metadata, progress=progress)


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
    runtime: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    path: str | os.PathLike[str],
    accumulate: bool = False,
    distributed: bool = False,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    skip_nonfinite: bool = False,
    loss_scale: float | None = None,
    ema: float | None = None,
    progress: Progress | None = None,
) -> Path:
    """Export a whole training step, in the module's present mode: forward, backward and optimizer in one native call.

    The package has one entry, "step". See :class:`Step` and :class:`Variant` for details.

    Args:
        module: The module to train.
        args: Example arguments of the module and, with a ``loss_fn``, its target as the last.
        kwargs: Example keyword arguments of the module.
        loss_fn: A function that returns the loss, called as ``loss_fn(output, target)``. Without it, the module returns
            the loss.
        optimizer: The optimizer of the module's parameters; any ``torch.optim`` optimizer except LBFGS and SparseAdam.
        dynamic_shapes: The dynamic sizes, as for ``torch.export.export``.
        target: As for :func:`export`.
        tune: As for :func:`export`.
        runtime: As for :func:`export`.
        metadata: As for :func:`export`.
        path: The file to write.
        accumulate: Whether calls may only add up gradients: ``step(x, y, update=False)``.
        distributed: Whether gradients can be averaged over processes, with ``LoadedStep.distribute``.
        clip_norm: The largest norm of all gradients together.
        clip_value: The largest absolute value of a gradient's element.
        skip_nonfinite: Whether an update is skipped if a gradient has Inf or NaN.
        loss_scale: The initial factor of the loss, for float16.
        ema: The decay of averages of the trained parameters, such as 0.999: ``LoadedStep.averages``.
        progress: As for :func:`export`.

    Returns:
        The path of the package.

    Raises:
        ExportError: The step cannot be exported correctly; nothing is written.

    Examples:
        >>> x, y = torch.randn(4, 8), torch.randn(4, 1)
        >>> adam = torch.optim.Adam(net.parameters(), lr=1e-3)
        >>> path = ab.export_step(net, (x, y), loss_fn=torch.nn.functional.mse_loss, optimizer=adam, path="step.pt2")
        >>> loss = ab.load(path).step()(x, y)
        >>> loss.shape
        torch.Size([])
    """
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
        ema=ema,
    )
    return export(path, {"step": step}, target=target, tune=tune, runtime=runtime, metadata=metadata, progress=progress)


def check_entries(entries: Any) -> None:
    if not isinstance(entries, Mapping):
        raise ExportError(
            f"entries is a {type(entries).__name__}; expected a dict, {{'module': Module(net, [Variant((x,))])}}"
        )
    for name, entry in entries.items():
        if not isinstance(name, str):
            raise ExportError(f"an entry is named {name!r}; expected a string")
        if not isinstance(entry, Module | Function | Grad | Step):
            raise ExportError(
                f"entry {name!r} is a {type(entry).__name__}; expected a Module, a Function, a Grad or a Step"
            )
        metadata_text(entry.metadata, f"metadata of entry {name!r}")
        if not isinstance(entry.variants, Sequence) or not all(isinstance(v, Variant) for v in entry.variants):
            raise ExportError(f"entry {name!r}: variants is {entry.variants!r:.80}; expected a list, [Variant((x,))]")
