"""Ways to compile a loss and its gradients in one process and to compute them in another.

Every way gets the same program. Its forward returns a scalar; the gradients end up in the ``.grad`` of the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

Program = Callable[..., torch.Tensor]
"""Take the arguments, return the loss. Afterwards the parameters have their ``.grad``."""
Dims = Sequence[Mapping[int, Any] | None]
"""Per argument: its dynamic dimensions and their ``torch.export.Dim``."""


@dataclass(frozen=True)
class Way:
    """``write(program, args, dims, folder)`` compiles. ``load(folder, program)`` returns a callable and the module that
    gets the gradients.

    ``program`` in ``load`` is a callable that makes the module, for ways that need the module in the second process."""

    write: Callable[[nn.Module, tuple[Any, ...], Dims, Path], None]
    load: Callable[[Path, Callable[[], nn.Module]], tuple[Program, nn.Module]]


def _write_nothing(program: nn.Module, args: tuple[Any, ...], dims: Dims, folder: Path) -> None:
    pass


def _load_eager(folder: Path, program: Callable[[], nn.Module]) -> tuple[Program, nn.Module]:
    module = program()
    return _backward(module), module


def _write_ours(program: nn.Module, args: tuple[Any, ...], dims: Dims, folder: Path) -> None:
    import aot_backward as ab

    ab.export_module(program, args, dynamic_shapes=tuple(dims) if any(dims) else None, path=folder / "ours.pt2")


def _load_ours(folder: Path, program: Callable[[], nn.Module]) -> tuple[Program, nn.Module]:
    from aot_backward_runtime import load

    module = load(folder / "ours.pt2").module()
    return _backward(module), module


def _write_compiled(program: nn.Module, args: tuple[Any, ...], dims: Dims, folder: Path) -> None:
    for tensor, each in zip(args, dims, strict=True):
        for dim in each or ():  # dynamic=True also makes numbers symbolic, and aot_compile fails on these
            torch._dynamo.mark_dynamic(tensor, dim)
    options = {"fallback_random": True}  # draw the same random numbers as eager
    compiled = torch.compile(program.forward, fullgraph=True, dynamic=None if any(dims) else False, options=options)
    compiled.aot_compile((args, {})).save_compiled_function(str(folder / "compiled"))


def _load_compiled(folder: Path, program: Callable[[], nn.Module]) -> tuple[Program, nn.Module]:
    module = program()
    with (folder / "compiled").open("rb") as file:
        compiled = torch.compiler.load_compiled_function(file)
    return _backward(lambda *args: compiled(module, *args)), module


def _write_precompiled(program: nn.Module, args: tuple[Any, ...], dims: Dims, folder: Path) -> None:
    from torch.compiler import precompile

    for tensor, each in zip(args, dims, strict=True):
        # Without a shape_id, torch treats sizes that are always equal as different
        for dim, known in (each or {}).items():
            torch._dynamo.decorators.mark_unbacked(tensor, dim, shape_id=known.__name__, min=known.min, max=known.max)
    with precompile.capture(
        _step, artifact_path=folder / "precompiled.py", cache_path=folder / "precompiled.cache"
    ) as capture:
        capture(program, *args)


def _load_precompiled(folder: Path, program: Callable[[], nn.Module]) -> tuple[Program, nn.Module]:
    from torch.compiler import precompile

    module, loaded = program(), precompile.load(folder / "precompiled.py", folder / "precompiled.cache")
    return lambda *args: loaded(module, *args), module


def _step(program: nn.Module, *args: Any) -> torch.Tensor:
    loss: torch.Tensor = program(*args)
    loss.backward()
    return loss.detach()


def _backward(forward: Callable[..., torch.Tensor]) -> Program:
    def called(*args: Any) -> torch.Tensor:
        loss = forward(*args)
        loss.backward()
        return loss.detach()

    return called


WAYS: dict[str, Way] = {
    "eager": Way(_write_nothing, _load_eager),
    "ours": Way(_write_ours, _load_ours),
    "torch.compile aot_compile": Way(_write_compiled, _load_compiled),
}
# torch 2.15; the one of 2.14 has a different interface
if hasattr(getattr(torch.compiler, "precompile", None), "capture"):
    WAYS["torch.compiler.precompile"] = Way(_write_precompiled, _load_precompiled)
