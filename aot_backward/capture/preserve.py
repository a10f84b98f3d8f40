"""Restore a program's modes and tensors after code has run or traced it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from aot_backward_runtime.errors import ExportError


@contextlib.contextmanager
def random_state_kept() -> Iterator[None]:
    """Restore the random state on the CPU and on every GPU that this process uses."""
    with torch.random.fork_rng(range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()):
        yield


@contextlib.contextmanager
def values_kept(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Restore the values of ``tensors``."""
    saved = [(t, t.detach().clone()) for t in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in saved:
                tensor.copy_(value)


@contextlib.contextmanager
def attributes_kept(program: nn.Module) -> Iterator[None]:
    """Restore attributes of ``program`` and its submodules that are numbers, text or None, and the contents of its
    lists and dicts: a forward may count its calls or cache results."""
    plain, lists, dicts = [], [], []
    for module in program.modules():
        attrs = {n: v for n, v in vars(module).items() if not n.startswith("_")}
        plain.append(
            (vars(module), {n: v for n, v in attrs.items() if v is None or type(v) in (bool, int, float, complex, str)})
        )
        lists += [(v, list(v)) for v in attrs.values() if type(v) is list]
        dicts += [(v, dict(v)) for v in attrs.values() if type(v) is dict]
    try:
        yield
    finally:
        for attributes, values in plain:
            attributes.update(values)
        for items, old_items in lists:
            items[:] = old_items
        for entries, old_entries in dicts:
            entries.clear()
            entries.update(old_entries)


@contextlib.contextmanager
def in_mode(program: nn.Module, mode: str) -> Iterator[None]:
    """Put ``program`` into ``mode`` ("train", "eval", or "" for a function, which has none), and afterwards restore
    every submodule.

    If the program is already in that mode, submodules keep their own: a BatchNorm frozen by ``.eval()`` stays frozen.
    """
    saved_modes = [(m, m.training) for m in program.modules()]
    try:
        if mode and program.training != (mode == "train"):
            program.train(mode == "train")
        yield
    finally:
        for module, training in saved_modes:
            module.training = training


@contextlib.contextmanager
def slots_kept(program: nn.Module) -> Iterator[None]:
    """Restore each parameter and buffer object, whatever the trace or the program put in its place.

    Tracing swaps them for its own, and restores the wrong ones if a submodule has two names.
    """
    _refuse_unsupported(program)
    all_slots: list[dict[str, Any]] = [slots for m in program.modules() for slots in (m._parameters, m._buffers)]
    saved = [(slots, dict(slots)) for slots in all_slots]
    try:
        yield
    finally:
        for slots, old in saved:
            slots.clear()
            slots.update(old)


def _refuse_unsupported(program: nn.Module) -> None:
    """Refuse wrappers with hooks that a trace does not see, TorchScript, and tensors that are not plain."""
    if torch.is_inference_mode_enabled():
        raise ExportError(
            "torch.inference_mode() is enabled, and autograd records nothing in it. Export outside of it (torch.no_grad() is allowed)"
        )
    wrappers = (nn.parallel.DistributedDataParallel, nn.DataParallel)
    for name, module in program.named_modules():
        subject = f"the submodule {name!r}" if name else "the module"
        if isinstance(module, wrappers):
            raise ExportError(
                f"{subject} is a {type(module).__name__}: export the module that it wraps (.module), and wrap the loaded module"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise ExportError(
                f"{subject} is TorchScript, and the backward of TorchScript cannot be traced: {_instead_of_torchscript(program, name)}"
            )
    for name, tensor in [*program.named_parameters(), *program.named_buffers()]:
        if nn.parameter.is_lazy(tensor):
            raise ExportError(f"{name} has no shape yet: call the module once on example inputs before the export")
        if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            raise ExportError(
                f"{name} is a {type(tensor).__name__}; a package takes plain tensors: export the module before it is wrapped"
            )
        if tensor.layout is not torch.strided:
            raise ExportError(
                f"{name} has layout {tensor.layout}; a package takes strided tensors: register its dense form, or its indices and values"
            )


def _instead_of_torchscript(program: nn.Module, name: str) -> str:
    """Return a remedy for ``name``, a part of ``program`` that is TorchScript."""
    parents = []
    while name:
        name = name.rpartition(".")[0]
        parents.append(program.get_submodule(name))
    makers = {type(module).__module__.partition(".")[0] for module in parents}
    if not makers & {"e3nn", "mace", "nequip"}:
        return (
            "use the original nn.Module, without torch.jit.script or torch.jit.trace, and load the state_dict into it"
        )
    mace_advice = ", with mace net = type(net)(**mace.tools.scripts_utils.extract_config_mace_model(net))" * (
        "mace" in makers
    )
    return (
        "e3nn made it when the model was built. Call e3nn.set_optimization_defaults(jit_script_fx=False) before you build the model. For a loaded "
        f"model, build a new one from its configuration{mace_advice}, and load its state_dict into the new one"
    )


@contextlib.contextmanager
def requiring_alone(parameters: Iterable[torch.Tensor], targets: Iterable[torch.Tensor]) -> Iterator[None]:
    """Let only ``targets`` among ``parameters`` require a gradient inside the context."""
    saved_flags = [(p, p.requires_grad) for p in parameters]
    target_ids = {id(t) for t in targets}
    try:
        for parameter, _ in saved_flags:
            parameter.requires_grad_(id(parameter) in target_ids)
        yield
    finally:
        for parameter, flag in saved_flags:
            parameter.requires_grad_(flag)
