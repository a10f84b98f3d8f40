"""Attributes that a forward assigns. A package holds state only in parameters and buffers, and changes buffers in
place."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType, ModuleType
from typing import Any

import torch
from torch import nn

from aot_backward_exporters import torch_api
from aot_backward_exporters.process_state import patched

from .. import preserve
from . import source_location


@contextlib.contextmanager
def recorded_writes(program: nn.Module) -> Iterator[dict[str, str]]:
    """Yield a dict: name of an attribute that held a tensor and was assigned -> the user's line. Restore tensors at the
    end."""
    names = {id(m): f"{n}." if n else "" for n, m in program.named_modules()}
    saved = [
        (m.__dict__, {n: v for n, v in m.__dict__.items() if v is None or isinstance(v, torch.Tensor)})
        for m in program.modules()
    ]
    writes: dict[str, str] = {}
    original = nn.Module.__setattr__

    def assign(self: nn.Module, name: str, value: Any) -> None:
        old = self._buffers.get(name) if name in self.__dict__.get("_buffers", ()) else self.__dict__.get(name)
        if id(self) in names and isinstance(old, torch.Tensor) and old is not value:
            writes.setdefault(names[id(self)] + name, source_location.here())
        original(self, name, value)

    with patched(nn.Module, __setattr__=assign):
        try:
            yield writes
        finally:
            for slots, values in saved:
                slots.update({n: v for n, v in values.items() if slots.get(n) is not v})


def name_of(program: nn.Module, tensor: torch.Tensor) -> str:
    """Return the name of the plain attribute that holds ``tensor``, such as "body.scale", or ""."""
    for prefix, module in program.named_modules():
        for name, value in module.__dict__.items():
            if value is tensor:
                return f"{prefix}.{name}" if prefix else name
    return ""


def plain_tensors(program: nn.Module) -> dict[str, torch.Tensor]:
    """Return tensors in attributes that are neither parameters nor buffers, also in lists and dicts: "the attribute
    'body.stats[0]'"."""
    tensors: dict[str, torch.Tensor] = {}
    for prefix, module in program.named_modules():
        for name, value in module.__dict__.items():
            if not name.startswith("_"):
                tensors |= {
                    f"the attribute '{path}'": t
                    for path, t in tensors_in(value, f"{prefix}.{name}" if prefix else name).items()
                }
    return tensors


def tensors_used(frames: Iterable[FrameType]) -> dict[str, torch.Tensor]:
    """Return tensors in the globals and the closures of the user's functions that run in ``frames``: "the global
    'mean'"."""
    tensors: dict[str, torch.Tensor] = {}
    for frame in frames:
        if source_location.is_user_code(frame.f_code.co_filename):
            variables = {n: ("global", frame.f_globals.get(n)) for n in frame.f_code.co_names}
            variables |= {n: ("closure's variable", frame.f_locals.get(n)) for n in frame.f_code.co_freevars}
            for name, (kind, value) in variables.items():
                tensors |= {f"the {kind} '{path}'": t for path, t in tensors_in(value, name).items()}
    return tensors


def tensors_in(value: Any, name: str, depth: int = 3) -> dict[str, torch.Tensor]:
    """Return the tensors in ``value``: in lists, tuples and dicts down to ``depth``, and in attributes of the user's
    objects."""
    if isinstance(value, torch.Tensor):
        return {name: value}
    if isinstance(value, nn.Module | type | ModuleType) or depth == 0:
        return {}
    children: dict[str, Any] = {}
    if isinstance(value, list | tuple):
        children = {f"{name}[{i}]": v for i, v in enumerate(value)}
    elif isinstance(value, dict):
        children = {f"{name}[{k}]" if isinstance(k, int) else f'{name}["{k}"]': v for k, v in value.items()}
    elif isinstance(attributes := getattr(value, "__dict__", None), dict) and not callable(value):
        children = {f"{name}.{k}": v for k, v in attributes.items()}
    return {path: t for n, v in children.items() for path, t in tensors_in(v, n, depth - 1).items()}


def changed_by(run: Callable[[], object], program: nn.Module, error: BaseException) -> tuple[list[str], str]:
    """Return the names of the plain tensors that ``run`` writes to in eager, and the first such line. Restore
    everything. Its trace raised ``error``."""
    buffers = {id(b) for b in program.buffers()}
    names: dict[int, str] = {}
    snapshots: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    places: list[str] = []

    def add(tensors: Mapping[str, torch.Tensor]) -> None:
        for name, t in tensors.items():
            if id(t) not in snapshots:
                names[id(t)], snapshots[id(t)] = name, (t, t.detach().clone())

    class Watching(torch_api.TorchDispatchMode):
        def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if isinstance(operator, torch_api.OpOverload) and operator._schema.is_mutable:
                add(tensors_used(frame for frame, _ in traceback.walk_stack(None)))
                storages = {
                    t.untyped_storage().data_ptr() for number, (t, _) in snapshots.items() if number not in buffers
                }
                if isinstance(args[0], torch.Tensor) and args[0].untyped_storage().data_ptr() in storages:
                    places.append(source_location.here(program))
            return operator(*args, **(kwargs or {}))

    add({f"buffer {n}": b for n, b in program.named_buffers()})
    add(plain_tensors(program) | tensors_used(frame for frame, _ in traceback.walk_tb(error.__traceback__)))
    with contextlib.ExitStack() as stack:
        for context in (
            preserve.slots_kept(program),
            preserve.attributes_kept(program),
            preserve.random_state_kept(),
            torch.no_grad(),
        ):
            stack.enter_context(context)
        stack.enter_context(contextlib.suppress(Exception))
        stack.enter_context(Watching())
        run()
    changed_ids = [
        number
        for number, (t, value) in snapshots.items()
        if not torch.allclose(t, value, rtol=0, atol=0, equal_nan=True)
    ]
    with torch.no_grad():
        for number in changed_ids:
            tensor, value = snapshots[number]
            tensor.copy_(value)
    return [names[number] for number in changed_ids if number not in buffers], (places[0] if places else "")
