"""Validate an optimizer of ``torch.optim``. Read its hyperparameters (and which of them a scheduler may change) and the
state before its next step. Refuse optimizers that cannot be exported correctly, by name. :mod:`.optimizer_graph` traces
the update."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from aot_backward_exporters import torch_api
from aot_backward_runtime.errors import ExportError
from aot_backward_runtime.format.manifest import GroupSpec
from aot_backward_runtime.optimizer_steps.interception import step_of
from aot_backward_runtime.training.param_groups import plain

_WHOLE = ("lr", "weight_decay", "momentum", "dampening", "lr_decay")
"""Numbers that are often written as ``0`` and ``1`` although a scheduler changes them."""
_REFUSED = {
    torch.optim.LBFGS: "evaluates the loss several times in each step (a closure)",
    torch.optim.SparseAdam: "needs sparse gradients, and compiled gradients are dense. Use torch.optim.Adam instead",
}
_FROM_A_NUMBER = {torch.optim.Rprop: ("step_size", "lr"), torch.optim.ASGD: ("eta", "lr")}
"""State that is initialised from a number of the group."""
_FIXED = ("ns_coefficients",)
"""Numbers that shape the computation; no scheduler changes them."""


@dataclass(frozen=True)
class Number:
    """A number of a parameter group: ``groups[group][key]``, or its element ``[position]`` if that is a tuple."""

    group: int
    key: str
    position: int
    value: float

    @property
    def label(self) -> str:
        return f"param_groups[{self.group}][{self.key!r}]" + (f"[{self.position}]" if self.position >= 0 else "")


@dataclass(frozen=True)
class Slot:
    """One tensor of the optimizer's state. ``parameters``: the parameters that share it because their ``step`` counts
    are always equal."""

    key: str
    parameters: tuple[str, ...]
    value: torch.Tensor
    starts_as: int = -1  # index of the number that it holds before the first step


@dataclass(frozen=True)
class Settings:
    """Operations of an entry on gradients before the optimizer step, and the decay of averages of the parameters after
    it."""

    clip_norm: float | None = None
    clip_value: float | None = None
    skip_nonfinite: bool = False
    loss_scale: float | None = None
    ema: float | None = None

    @property
    def numbers(self) -> dict[str, float]:
        """The numbers that are read when the graph runs, in order; they follow the optimizer's own."""
        return {
            key: float(v)
            for key in ("clip_norm", "clip_value", "loss_scale", "ema")
            if (v := getattr(self, key)) is not None
        }

    def __post_init__(self) -> None:
        if self.ema is not None and not (type(self.ema) in (int, float) and 0 <= self.ema <= 1):
            raise ExportError(f"ema: expected a decay from 0 to 1, such as 0.999, got {self.ema!r}")
        scale = self.loss_scale
        if scale is not None and not (
            type(scale) in (int, float) and 0 < float(torch.tensor(float(scale), dtype=torch.float32)) < math.inf
        ):
            raise ExportError(
                f"loss_scale: expected a positive number, such as torch.amp.GradScaler's initial 65536.0, got {scale!r}"
            )
        for key, value in (("clip_norm", self.clip_norm), ("clip_value", self.clip_value)):
            if value is not None and not (type(value) in (int, float) and 0 <= value < math.inf):
                raise ExportError(
                    f"{key}: expected a finite number from 0 on, got {value!r}. Use a large number to clip nothing (clip_norm still gives grad_norm)"
                )


@dataclass(frozen=True)
class OptimizerSpec:
    """An optimizer's groups by parameter name, its numbers, and its state before the next step."""

    optimizer: torch.optim.Optimizer
    names: dict[int, str]  # id of a parameter -> its name
    groups: tuple[GroupSpec, ...]
    numbers: tuple[Number, ...]
    slots: tuple[Slot, ...]
    trained: tuple[str, ...]  # the parameters that get a gradient, in the order of the groups
    fresh: bool  # whether it has not made a step yet

    @property
    def name(self) -> str:
        kind = type(self.optimizer)
        return f"{kind.__module__}.{kind.__qualname__}"


def parameters_of(optimizer: torch.optim.Optimizer, module: nn.Module) -> dict[int, str]:
    """Return the names in ``module`` of the optimizer's parameters, by their ``id``. Refuse optimizers that cannot be
    exported correctly."""
    kind = type(optimizer)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ExportError(f"optimizer is a {kind.__module__}.{kind.__qualname__}; expected a torch.optim.Optimizer")
    for refused_type, reason in _REFUSED.items():
        if isinstance(optimizer, refused_type):
            raise ExportError(f"{kind.__qualname__} cannot be exported: it {reason}")
    global_hooks = [*torch_api._global_optimizer_pre_hooks, *torch_api._global_optimizer_post_hooks]
    if global_hooks or optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise ExportError(
            f"the {kind.__qualname__} has step hooks, which a compiled step would not call; remove them before the export"
        )
    names: dict[int, str] = {}
    for name, parameter in module.named_parameters():
        names.setdefault(id(parameter), name)
    out = {}
    for g, group in enumerate(optimizer.param_groups):
        for i, parameter in enumerate(group["params"]):
            if id(parameter) not in names:
                raise ExportError(
                    f"param_groups[{g}]['params'][{i}], of shape {tuple(parameter.shape)}, is not a parameter of the module"
                )
            out[id(parameter)] = names[id(parameter)]
    return out


def inspect_optimizer(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], with_gradient: Callable[[str], bool]
) -> OptimizerSpec:
    """Describe ``optimizer``. ``with_gradient``: whether the parameter of that name gets one; others are skipped, as
    eager skips ``.grad is None``."""
    trained = tuple(names[id(p)] for g in optimizer.param_groups for p in g["params"] if with_gradient(names[id(p)]))
    if not trained:
        raise ExportError("none of the optimizer's parameters gets a gradient from this loss")
    for parameter in (p for g in optimizer.param_groups for p in g["params"] if names[id(p)] in trained):
        if parameter.is_complex():
            raise ExportError(
                f"the parameter {names[id(parameter)]!r} is complex, and no optimizer is compiled for complex parameters: train its real view"
            )
        if not parameter.numel():
            raise ExportError(f"the parameter {names[id(parameter)]!r} has no elements; leave it out of the optimizer")
    groups = tuple(
        GroupSpec(
            tuple(names[id(p)] for p in g["params"]),
            _as_json(f"param_groups[{n}]", {k: v for k, v in g.items() if k != "params"}),
        )
        for n, g in enumerate(optimizer.param_groups)
    )
    numbers = tuple(number for n, g in enumerate(optimizer.param_groups) for number in _numbers(n, g))
    state = _state_before_a_step(optimizer, names, set(trained))
    # SGD's first momentum is None
    fresh = not any(isinstance(v, torch.Tensor) for slots in optimizer.state.values() for v in slots.values())
    slots = _slots(optimizer, names, state)
    if fresh:
        _refuse_state_from_numbers(optimizer, names, trained, state)
        slots = tuple(dataclasses.replace(s, starts_as=_starts_as(optimizer, groups, numbers, s)) for s in slots)
    return OptimizerSpec(optimizer, dict(names), groups, numbers, slots, trained, fresh)


def _starts_as(
    optimizer: torch.optim.Optimizer, groups: Sequence[GroupSpec], numbers: Sequence[Number], slot: Slot
) -> int:
    for kind, (key, number) in _FROM_A_NUMBER.items():
        if isinstance(optimizer, kind) and slot.key == key:
            group = next(i for i, g in enumerate(groups) if slot.parameters[0] in g.parameters)
            return next(i for i, n in enumerate(numbers) if (n.group, n.key) == (group, number))
    return -1


def _refuse_state_from_numbers(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], trained: Sequence[str], state: Any
) -> None:
    """Refuse a custom optimizer with a first state that depends on its learning rate: a warm-up schedule would change
    that state."""
    if type(optimizer).__module__.startswith("torch.optim.") or not all(
        isinstance(g.get("lr"), (int, float)) for g in optimizer.param_groups
    ):
        return
    saved_lrs = [g["lr"] for g in optimizer.param_groups]
    try:
        for group in optimizer.param_groups:
            group["lr"] = 2 * group["lr"] + 0.125
        other_state = _state_before_a_step(optimizer, names, set(trained))
    finally:
        for group, lr in zip(optimizer.param_groups, saved_lrs, strict=True):
            group["lr"] = lr
    for name, slots in state.items():
        for key, value in slots.items():
            if not _same(value, other_state[name].get(key)):
                raise ExportError(
                    f"{type(optimizer).__qualname__} computes the initial state[{name!r}][{key!r}] from lr, and a scheduler may change lr before the "
                    f"first step. Make one step before the export"
                )


def _numbers(index: int, group: Mapping[str, Any]) -> Iterator[Number]:
    for key, value in group.items():
        # A nonzero dampening changes SGD's first step: see _first_step_differs
        if key in _FIXED or (key == "dampening" and not value):
            continue
        if isinstance(value, torch.Tensor) and key != "params" and value.numel() == 1:
            value = float(value)
        if isinstance(value, float) or (type(value) is int and key in _WHOLE):
            yield Number(index, key, -1, float(value))
        elif isinstance(value, (tuple, list)) and key != "params":
            for position, v in enumerate(value):
                if isinstance(v, float) or (isinstance(v, torch.Tensor) and v.numel() == 1):
                    yield Number(index, key, position, float(v))


def _as_json(where: str, options: Mapping[str, Any]) -> str:
    for key, value in options.items():
        try:
            json.dumps(plain(value), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ExportError(
                f"{where}[{key!r}]: expected a number, a string, None or a list of these, got {value!r}"
            ) from error
    return json.dumps({k: plain(v) for k, v in options.items()}, allow_nan=False)


class _FirstValues(dict[str, Any]):
    """A parameter's state that also keeps each tensor's first value."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.first: dict[str, Any] = {k: _copy(v) for k, v in self.items()}

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in self.first:
            self.first[key] = _copy(value)
        super().__setitem__(key, value)

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value


def _copy(value: Any) -> Any:
    """Return ``value``, or a copy of a tensor. A copy of zeros, the usual first moments, takes no memory until it is
    written to."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_contiguous() and not value.count_nonzero():
        return torch.zeros(value.shape, dtype=value.dtype, device=value.device)
    return value.detach().clone()


def _state_before_a_step(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], trained: set[str]
) -> dict[str, dict[str, Any]]:
    """Return the state before the next step, by trained parameter. Make two steps on copies of the parameters with
    gradients of zero to see the state that the first step creates: it is stored before it is updated, or (momentum) is
    then zero. Refuse changes that a compiled step cannot make: changed numbers that the optimizer keeps outside the
    tensors of this state."""
    kind = type(optimizer).__qualname__
    other = duplicate(optimizer)
    attributes = _attributes(optimizer)
    vars(other).update(copy.deepcopy(attributes))
    other.param_groups, state = [], defaultdict[Any, Any](_FirstValues)
    name_of, had_momentum = {}, {}
    for group in optimizer.param_groups:
        copies = []
        for p in group["params"]:
            q = p.detach().clone(memory_format=torch.preserve_format).requires_grad_(p.requires_grad)
            q.grad = torch.zeros_like(q) if names[id(p)] in trained else None
            name_of[id(q)] = names[id(p)]
            had_momentum[names[id(p)]] = optimizer.state.get(p, {}).get("momentum_buffer") is not None
            copies.append(q)
            if p in optimizer.state:
                state[q] = _FirstValues(copy.deepcopy(dict(optimizer.state[p])))
        other.param_groups.append({**group, "params": copies, **single_tensor_form(group)})
    other.state = state
    groups = [{k: v for k, v in g.items() if k != "params"} for g in other.param_groups]
    non_tensors: list[dict[tuple[str, str], Any]] = []
    for _ in range(2):
        try:
            with torch.no_grad():
                step_of(optimizer)(other)
        except Exception as error:  # the optimizer's own code may raise anything
            raise ExportError(
                f"{kind}.step fails on gradients of zero (a compiled step has no closure): {type(error).__name__}: {error}"
            ) from error
        if unsupported := [key for key in state if id(key) not in name_of]:
            raise ExportError(
                f"{kind} keeps state[{unsupported[0]!r}], which does not belong to a parameter; a compiled step supports only state of parameters"
            )
        non_tensors.append(
            {
                (name_of[id(q)], key): v
                for q, slots in state.items()
                for key, v in slots.items()
                if not isinstance(v, torch.Tensor)
            }
        )
    for n, (old_group, group) in enumerate(zip(groups, other.param_groups, strict=True)):
        for key, value in group.items():
            if key != "params" and (key not in old_group or not _same(value, old_group[key])):
                raise ExportError(f"{kind}.step changes param_groups[{n}][{key!r}]; {_ONLY_TENSORS}")
    for key, value in _attributes(other).items():
        if key not in attributes or not _same(value, attributes[key]):
            raise ExportError(f"{kind}.step changes the optimizer's own {key!r}; {_ONLY_TENSORS}")
    out = {name_of[id(q)]: slots.first for q, slots in state.items()}
    if isinstance(optimizer, torch.optim.SGD):  # its new momentum contains weight decay
        for q, slots in state.items():
            if slots.first.get("momentum_buffer") is not None and not had_momentum[name_of[id(q)]]:
                slots.first["momentum_buffer"].zero_()
    for (name, key), value in non_tensors[1].items():
        if not _same(value, non_tensors[0].get((name, key))) or not _same(value, out[name].get(key)):
            raise ExportError(
                f"{kind} keeps state[{name!r}][{key!r}] as a {type(value).__name__} that changes with each step; {_ONLY_TENSORS}"
            )
    return {name: slots for name, slots in out.items() if name in trained}


_ONLY_TENSORS = (
    "a compiled step can change only tensors in a parameter's state: keep the value there, as a tensor with one element"
)


def duplicate(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return another optimizer of its class with the same attributes. ``copy.copy`` would drop attributes that the
    class has added, and its ``__setstate__`` would change the original's groups and defaults."""
    other = object.__new__(type(optimizer))
    vars(other).update(vars(optimizer))
    return other


def _attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the plain data that an optimizer's own class keeps besides groups and state."""
    base_attributes = vars(torch.optim.Optimizer([torch.zeros(1)], {}))
    data_types = (bool, int, float, complex, str, list, tuple, dict, set, torch.Tensor, type(None))
    return {
        key: value
        for key, value in vars(optimizer).items()
        if key not in base_attributes and isinstance(value, data_types)
    }


def _same(a: Any, b: Any) -> bool:
    leaves_a, spec_a = pytree.tree_flatten(a)
    leaves_b, spec_b = pytree.tree_flatten(b)
    if spec_a != spec_b:
        return False
    pairs = zip(leaves_a, leaves_b, strict=True)
    return all(
        torch.equal(x, y) if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor) else x is y or x == y
        for x, y in pairs
    )


def _slots(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], state: Mapping[str, Mapping[str, Any]]
) -> tuple[Slot, ...]:
    out: list[Slot] = []
    for group in optimizer.param_groups:
        members = [names[id(p)] for p in group["params"] if names[id(p)] in state]
        dims = {names[id(p)]: p.dim() for p in group["params"]}
        for key in dict.fromkeys(k for n in members for k in state[n]):
            tensors = {n: state[n][key] for n in members if isinstance(state[n].get(key), torch.Tensor)}
            counts = {n: t for n, t in tensors.items() if t.dim() == 0 and (dims[n] > 0 or key == "step")}
            # Counts of custom optimizers may differ after a step
            can_share = key == "step" or type(optimizer).__module__.startswith("torch.optim.")
            if can_share and len({(t.item(), t.dtype, t.device) for t in counts.values()}) == 1:
                out.append(Slot(key, tuple(counts), next(iter(counts.values()))))
            else:
                out += [Slot(key, (n,), t) for n, t in counts.items()]
            out += [Slot(key, (n,), t) for n, t in tensors.items() if n not in counts]
    devices = {names[id(p)]: p.device for group in optimizer.param_groups for p in group["params"]}
    # Eager keeps a GPU's step count on the CPU
    return tuple(dataclasses.replace(s, value=s.value.to(devices[s.parameters[0]])) for s in out)


def single_tensor_form(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the form that is traced: one tensor after another, no fused kernels."""
    options = {"foreach": False, "fused": None, "differentiable": False, "capturable": False}
    return {key: value for key, value in options.items() if key in group}
