"""Observe the optimizer steps of a recorded script, and keep an example of each kind to compile from."""

from __future__ import annotations

import copy
import hashlib
import json
import weakref
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from aot_backward_runtime.errors import InputError
from aot_backward_runtime.optimizer_steps.compiled_clipping import Kind
from aot_backward_runtime.optimizer_steps.compiled_update import name_of, refuse_unsupported
from aot_backward_runtime.optimizer_steps.interception import SERVED
from aot_backward_runtime.passes import origin
from aot_backward_runtime.training.param_groups import plain

from ...capture.step.optimizer_spec import duplicate
from .observed_clippings import ObservedClippings

_MAX_STEP_KINDS = 32  # the most kinds, and refusals, that are kept: bounds the memory of copied optimizers; a guess
# Inspect each of an optimizer's first steps, then one in this many, to save time; guesses
_FIRST_STEPS, _EVERY_STEPS = 16, 64


@dataclass
class ObservedStep:
    """Steps of one kind: the optimizer's class, its options, and the metadata of parameters, gradients and state.
    ``example``: a copied optimizer of that kind, as it was before one of these steps; None if the kind came once."""

    name: str
    count: int = 0
    example: torch.optim.Optimizer | None = None
    line: str = ""

    @property
    def words(self) -> str:
        return f"the optimizer step of {self.name.rpartition('.')[2]}, called at {self.line}"


@dataclass
class ObservedSteps:
    """``kinds``: by digest. ``refused``: why steps of an optimizer cannot be compiled. ``clippings``: of the gradients,
    before the steps."""

    kinds: dict[str, ObservedStep] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    clippings: ObservedClippings = field(default_factory=ObservedClippings)
    _steps: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = field(default_factory=weakref.WeakKeyDictionary)

    @property
    def repeated(self) -> dict[str, ObservedStep]:
        """The kinds that came more than once, which are compiled."""
        return {digest: kind for digest, kind in self.kinds.items() if kind.example is not None}

    @property
    def observed_any(self) -> bool:
        return bool(self.kinds or self.clippings.kinds)

    def observe_clipping(self, kind: Kind, gradients: list[torch.Tensor], limit: float) -> None:
        """Note a call before eager clips."""
        self.clippings.observe(kind, gradients, limit, origin.line())

    def observe(self, optimizer: torch.optim.Optimizer) -> None:
        """Note a step before it runs in eager."""
        line = origin.line()
        number = self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        if number > _FIRST_STEPS and number % _EVERY_STEPS:
            return
        try:
            key = _step_key(optimizer)
        except (InputError, TypeError, ValueError) as error:
            if len(self.refused) < _MAX_STEP_KINDS:
                self.refused[f"{type(optimizer).__qualname__}, step called at {line}"] = str(error)
            return
        if key is None:
            return
        digest = hashlib.sha256(key.encode()).hexdigest()
        if digest not in self.kinds and len(self.kinds) >= _MAX_STEP_KINDS:
            return
        kind = self.kinds.setdefault(digest, ObservedStep(name_of(type(optimizer)), line=line))
        kind.count += 1
        if kind.count > 1 and kind.example is None:
            kind.example = copied(optimizer)


def _step_key(optimizer: torch.optim.Optimizer) -> str | None:
    """Return a text that identifies the kind of step; None if there is nothing to do, or the state does not exist
    yet."""
    if type(optimizer) not in SERVED:
        raise InputError(
            f"{name_of(type(optimizer))} is not a supported optimizer of torch.optim; its steps run in eager"
        )
    refuse_unsupported(optimizer)
    groups: list[Any] = []
    any_gradient = False
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            raise InputError("differentiable=True makes the step part of the autograd graph")
        members: list[Any] = []
        for parameter in group["params"]:
            gradient, state = parameter.grad, optimizer.state.get(parameter, {})
            if gradient is None:
                members.append(None)
                continue
            any_gradient = True
            tensors = [parameter, gradient, *(v for v in state.values() if isinstance(v, torch.Tensor))]
            for tensor in tensors:
                _refuse_odd(tensor)
            if unsupported := [k for k, v in state.items() if v is not None and not isinstance(v, torch.Tensor)]:
                raise InputError(
                    f"state[…][{unsupported[0]!r}]: expected a tensor, got a value of type {type(state[unsupported[0]]).__name__}"
                )
            members.append([*map(_layout, tensors[:2]), {k: _layout(v) for k, v in state.items() if v is not None}])
        options = {k: plain(v) for k, v in group.items() if k in optimizer.defaults and not isinstance(plain(v), float)}
        groups.append([options, members])
    return json.dumps([name_of(type(optimizer)), groups], sort_keys=True) if any_gradient else None


def _refuse_odd(tensor: torch.Tensor) -> None:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise InputError(f"one of its tensors is a {type(tensor).__qualname__}")
    if tensor.layout is not torch.strided:
        raise InputError(f"one of its tensors has layout {tensor.layout}")
    if tensor.device.type != "cpu":
        raise InputError(f"one of its tensors is on {tensor.device}; steps are compiled for the CPU")
    if tensor.is_complex():
        raise InputError("one of its tensors is complex")
    if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        raise InputError("one of its tensors is expanded: several elements share memory")


def _layout(tensor: torch.Tensor) -> list[Any]:
    return [str(tensor.dtype), list(tensor.shape), list(tensor.stride())]


def copied(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return an optimizer of the same kind on copies of its parameters, gradients and state."""
    clone = duplicate(optimizer)
    clone.param_groups, clone.state = [], defaultdict(dict)
    for group in optimizer.param_groups:
        options: Mapping[str, Any] = {k: copy.deepcopy(v) for k, v in group.items() if k in optimizer.defaults}
        members = []
        for p in group["params"]:
            q = _with_strides(p).requires_grad_(p.requires_grad)
            q.grad = _with_strides(p.grad) if p.grad is not None else None
            if p in optimizer.state:
                clone.state[q] = {
                    k: _with_strides(v) if isinstance(v, torch.Tensor) else v for k, v in optimizer.state[p].items()
                }
            members.append(q)
        clone.param_groups.append({"params": members, **options})
    return clone


def _with_strides(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy with the same strides, which ``clone`` does not keep if there are gaps in memory."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(
        tensor.detach()
    )
