"""A ``torch.optim`` optimizer, as one graph: from parameters, gradients and state to what ``optimizer.step()`` would make of them.

The person's own object is traced, the single-tensor form of its ``step``, on fake tensors. Two things are other than in eager:

- The numbers of its parameter groups (learning rate, weight decay, betas, …) are symbols while it is traced, so that what it computes from
  them in Python stands in the graph, in float64, and what it decides by them becomes a condition on the number (``weight_decay != 0``).
- State of one element per parameter (``step``) is read as float64, which is what eager's ``.item()`` makes of it.
"""

from __future__ import annotations

import builtins
import contextlib
import copy
import dataclasses
import inspect
import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from aot_backward_runtime.errors import ExportError
from aot_backward_runtime.manifest import GroupSpec, Interval, NumberSpec

from .. import torch_api
from .joint import tracing

_WHOLE = ("lr", "weight_decay", "momentum", "dampening", "lr_decay")
"""Numbers that people write as ``0`` and ``1``, and a schedule moves nevertheless."""
_REFUSED = {
    torch.optim.LBFGS: "evaluates the loss several times in each step (a closure)",
    torch.optim.SparseAdam: "takes sparse gradients, which compiled code does not make; torch.optim.Adam takes dense ones",
}
_FROM_A_NUMBER = {torch.optim.Rprop: ("step_size", "lr"), torch.optim.ASGD: ("eta", "lr")}
"""State that is made from a number of the group."""
_FIXED = ("ns_coefficients",)
"""Numbers that shape the computation, and no schedule moves."""
_LOW = (torch.bfloat16, torch.float16)
_CAPTURABLE = (torch.optim.RAdam, torch.optim.ASGD, torch.optim.Rprop)
"""Their other form decides by the value of a tensor which formula holds."""


@dataclass(frozen=True)
class Number:
    """A number of a parameter group: ``groups[group][key]``, or ``[position]`` of it where that is a tuple."""

    group: int
    key: str
    position: int
    value: float

    @property
    def label(self) -> str:
        return f"param_groups[{self.group}][{self.key!r}]" + (f"[{self.position}]" if self.position >= 0 else "")


@dataclass(frozen=True)
class Slot:
    """One tensor of the optimizer's state. ``parameters``: those that share it, as their ``step`` counts are always equal."""

    key: str
    parameters: tuple[str, ...]
    value: torch.Tensor
    starts_as: int = -1  # the number, by its place among all, that it holds before the first step


@dataclass(frozen=True)
class Settings:
    """What an entry does with gradients before the optimizer gets them."""

    clip_norm: float | None = None
    clip_value: float | None = None
    skip_nonfinite: bool = False

    def __post_init__(self) -> None:
        for key, value in (("clip_norm", self.clip_norm), ("clip_value", self.clip_value)):
            if value is not None and not (type(value) in (int, float) and 0 <= value < math.inf):
                raise ExportError(f"{key} is {value!r}; expected a finite number (a large one clips nothing; clip_norm gives grad_norm even so)")


@dataclass(frozen=True)
class Optimized:
    """An optimizer, looked at: its groups by the names of their parameters, its numbers, and its state as it is before the next step."""

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
    """The names, in ``module``, of the optimizer's parameters, by their identity. Refuses by name what cannot be exported rightly."""
    kind = type(optimizer)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ExportError(f"optimizer is a {kind.__module__}.{kind.__qualname__}; expected a torch.optim.Optimizer")
    for refused, reason in _REFUSED.items():
        if isinstance(optimizer, refused):
            raise ExportError(f"{kind.__qualname__} cannot be exported: it {reason}")
    everywhere = [*torch_api._global_optimizer_pre_hooks, *torch_api._global_optimizer_post_hooks]
    if everywhere or optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        raise ExportError(f"the {kind.__qualname__} has step hooks, which a compiled step would not call; remove them before the export")
    names: dict[int, str] = {}
    for name, parameter in module.named_parameters():
        names.setdefault(id(parameter), name)
    out = {}
    for g, group in enumerate(optimizer.param_groups):
        for i, parameter in enumerate(group["params"]):
            if id(parameter) not in names:
                raise ExportError(f"param_groups[{g}]['params'][{i}], of shape {tuple(parameter.shape)}, is no parameter of the module")
            out[id(parameter)] = names[id(parameter)]
    return out


def look_at(optimizer: torch.optim.Optimizer, names: Mapping[int, str], with_gradient: Callable[[str], bool]) -> Optimized:
    """``with_gradient``: whether the parameter of that name gets one; the others are passed over, as eager passes over ``.grad is None``."""
    trained = tuple(names[id(p)] for g in optimizer.param_groups for p in g["params"] if with_gradient(names[id(p)]))
    if not trained:
        raise ExportError("none of the optimizer's parameters gets a gradient from this loss")
    for parameter in (p for g in optimizer.param_groups for p in g["params"] if names[id(p)] in trained):
        if parameter.is_complex():
            raise ExportError(f"the parameter {names[id(parameter)]!r} is complex, which the compiler has no optimizer for: train its real view")
        if not parameter.numel():
            raise ExportError(f"the parameter {names[id(parameter)]!r} has no elements; leave it out of the optimizer")
    groups = tuple(
        GroupSpec(tuple(names[id(p)] for p in g["params"]), _as_json(f"param_groups[{n}]", {k: v for k, v in g.items() if k != "params"}))
        for n, g in enumerate(optimizer.param_groups)
    )
    numbers = tuple(number for n, g in enumerate(optimizer.param_groups) for number in _numbers(n, g))
    state = _state_before_a_step(optimizer, names, set(trained))
    fresh = not any(isinstance(v, torch.Tensor) for slots in optimizer.state.values() for v in slots.values())  # SGD's first momentum is None
    slots = _slots(optimizer, names, state)
    if fresh:
        _refuse_state_from_numbers(optimizer, names, trained, state)
        slots = tuple(dataclasses.replace(s, starts_as=_starts_as(optimizer, groups, numbers, s)) for s in slots)
    return Optimized(optimizer, dict(names), groups, numbers, slots, trained, fresh)


def _starts_as(optimizer: torch.optim.Optimizer, groups: Sequence[GroupSpec], numbers: Sequence[Number], slot: Slot) -> int:
    for kind, (key, number) in _FROM_A_NUMBER.items():
        if isinstance(optimizer, kind) and slot.key == key:
            group = next(i for i, g in enumerate(groups) if slot.parameters[0] in g.parameters)
            return next(i for i, n in enumerate(numbers) if (n.group, n.key) == (group, number))
    return -1


def _refuse_state_from_numbers(optimizer: torch.optim.Optimizer, names: Mapping[int, str], trained: Sequence[str], state: Any) -> None:
    """A person's own optimizer whose first state depends on its learning rate would start otherwise under a schedule that warms up."""
    if type(optimizer).__module__.startswith("torch.optim.") or not all(isinstance(g.get("lr"), (int, float)) for g in optimizer.param_groups):
        return
    before = [g["lr"] for g in optimizer.param_groups]
    try:
        for group in optimizer.param_groups:
            group["lr"] = 2 * group["lr"] + 0.125
        other = _state_before_a_step(optimizer, names, set(trained))
    finally:
        for group, lr in zip(optimizer.param_groups, before, strict=True):
            group["lr"] = lr
    for name, slots in state.items():
        for key, value in slots.items():
            if not _same(value, other[name].get(key)):
                raise ExportError(
                    f"{type(optimizer).__qualname__} makes the first state[{name!r}][{key!r}] from lr, which a schedule may move before that; let it "
                    f"make a step before the export"
                )


def _numbers(index: int, group: Mapping[str, Any]) -> Iterator[Number]:
    for key, value in group.items():
        if key in _FIXED or (key == "dampening" and not value):  # with it SGD's first step is another: see _starts_otherwise
            continue
        if isinstance(value, torch.Tensor) and key != "params" and value.numel() == 1:
            value = float(value)
        if isinstance(value, float) or (type(value) is int and key in _WHOLE):
            yield Number(index, key, -1, float(value))
        elif isinstance(value, (tuple, list)) and key != "params":
            for position, v in enumerate(value):
                if isinstance(v, float) or (isinstance(v, torch.Tensor) and v.numel() == 1):
                    yield Number(index, key, position, float(v))


def plain(value: Any) -> Any:
    """A group's option as JSON can hold it: tensors of one element as numbers, tuples as lists."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return float(value)
    if isinstance(value, (tuple, list)):
        return [plain(v) for v in value]
    return value


def _as_json(where: str, options: Mapping[str, Any]) -> str:
    for key, value in options.items():
        try:
            json.dumps(plain(value), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ExportError(f"{where}[{key!r}] is {value!r}, which a package cannot hold: numbers, strings, None and lists of them can") from error
    return json.dumps({k: plain(v) for k, v in options.items()}, allow_nan=False)


class _Inserted(dict[str, Any]):
    """A parameter's state that keeps each tensor as it was when the optimizer put it in."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.first: dict[str, Any] = {k: v.detach().clone() if isinstance(v, torch.Tensor) else v for k, v in self.items()}

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in self.first:
            self.first[key] = value.detach().clone() if isinstance(value, torch.Tensor) else value
        super().__setitem__(key, value)

    def setdefault(self, key: str, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value


def _state_before_a_step(optimizer: torch.optim.Optimizer, names: Mapping[int, str], trained: set[str]) -> dict[str, dict[str, Any]]:
    """By parameter that is trained, the state that the next step will start from. What is made in the first step is seen by making two, on copies
    of the parameters and with gradients of zero: state is put in before it is updated, or (momentum) is then zero. What a compiled step could
    not do is seen too: numbers that the optimizer keeps elsewhere than in tensors of this state, and changes."""
    kind = type(optimizer).__qualname__
    other = _twin(optimizer)
    attributes = _attributes(optimizer)
    vars(other).update(copy.deepcopy(attributes))
    other.param_groups, state = [], defaultdict[Any, Any](_Inserted)
    name_of, had = {}, {}
    for group in optimizer.param_groups:
        copies = []
        for p in group["params"]:
            q = p.detach().clone(memory_format=torch.preserve_format).requires_grad_(p.requires_grad)
            q.grad = torch.zeros_like(q) if names[id(p)] in trained else None
            name_of[id(q)] = names[id(p)]
            had[names[id(p)]] = optimizer.state.get(p, {}).get("momentum_buffer") is not None
            copies.append(q)
            if p in optimizer.state:
                state[q] = _Inserted(copy.deepcopy(dict(optimizer.state[p])))
        other.param_groups.append({**group, "params": copies, **_flags(group)})
    other.state = state
    groups = [{k: v for k, v in g.items() if k != "params"} for g in other.param_groups]
    kept: list[dict[tuple[str, str], Any]] = []
    for _ in range(2):
        try:
            with torch.no_grad():
                type(optimizer).step(other)
        except Exception as error:  # the optimizer's own code, which may raise anything
            raise ExportError(f"{kind}.step fails on gradients of zero (a compiled step has no closure): {type(error).__name__}: {error}") from error
        if odd := [key for key in state if id(key) not in name_of]:
            raise ExportError(f"{kind} keeps state[{odd[0]!r}], which belongs to no parameter; a compiled step has state of parameters alone")
        kept.append({(name_of[id(q)], key): v for q, slots in state.items() for key, v in slots.items() if not isinstance(v, torch.Tensor)})
    for n, (before, group) in enumerate(zip(groups, other.param_groups, strict=True)):
        for key, value in group.items():
            if key != "params" and (key not in before or not _same(value, before[key])):
                raise ExportError(f"{kind}.step changes param_groups[{n}][{key!r}]; {_ONLY_TENSORS}")
    for key, value in _attributes(other).items():
        if key not in attributes or not _same(value, attributes[key]):
            raise ExportError(f"{kind}.step changes the optimizer's own {key!r}; {_ONLY_TENSORS}")
    out = {name_of[id(q)]: slots.first for q, slots in state.items()}
    if isinstance(optimizer, torch.optim.SGD):  # weight decay is in the momentum that it has just put in
        for q, slots in state.items():
            if slots.first.get("momentum_buffer") is not None and not had[name_of[id(q)]]:
                slots.first["momentum_buffer"].zero_()
    for (name, key), value in kept[1].items():
        if not _same(value, kept[0].get((name, key))) or not _same(value, out[name].get(key)):
            raise ExportError(f"{kind} keeps state[{name!r}][{key!r}] as a {type(value).__name__} that changes with each step; {_ONLY_TENSORS}")
    return {name: slots for name, slots in out.items() if name in trained}


_ONLY_TENSORS = "only tensors of a parameter's state can change in a compiled step: keep it there, as a tensor of one element"


def _twin(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Another of its kind, with the same attributes. Not ``copy.copy``: that drops those which its own class has added, and its
    ``__setstate__`` changes the original's groups and defaults."""
    other = object.__new__(type(optimizer))
    vars(other).update(vars(optimizer))
    return other


def _attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What an optimizer's own class keeps in it beside groups and state, as far as it is plain data."""
    usual = vars(torch.optim.Optimizer([torch.zeros(1)], {}))
    data = (bool, int, float, complex, str, list, tuple, dict, set, torch.Tensor, type(None))
    return {key: value for key, value in vars(optimizer).items() if key not in usual and isinstance(value, data)}


def _same(a: Any, b: Any) -> bool:
    ours, form = pytree.tree_flatten(a)
    theirs, other = pytree.tree_flatten(b)
    if form != other:
        return False
    pairs = zip(ours, theirs, strict=True)
    return all(torch.equal(x, y) if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor) else x is y or x == y for x, y in pairs)


def _slots(optimizer: torch.optim.Optimizer, names: Mapping[int, str], state: Mapping[str, Mapping[str, Any]]) -> tuple[Slot, ...]:
    out: list[Slot] = []
    for group in optimizer.param_groups:
        members = [names[id(p)] for p in group["params"] if names[id(p)] in state]
        dims = {names[id(p)]: p.dim() for p in group["params"]}
        for key in dict.fromkeys(k for n in members for k in state[n]):
            tensors = {n: state[n][key] for n in members if isinstance(state[n].get(key), torch.Tensor)}
            counts = {n: t for n, t in tensors.items() if t.dim() == 0 and (dims[n] > 0 or key == "step")}
            alike = key == "step" or type(optimizer).__module__.startswith("torch.optim.")  # others may keep what differs once a step was made
            if alike and len({(t.item(), t.dtype, t.device) for t in counts.values()}) == 1:
                out.append(Slot(key, tuple(counts), next(iter(counts.values()))))
            else:
                out += [Slot(key, (n,), t) for n, t in counts.items()]
            out += [Slot(key, (n,), t) for n, t in tensors.items() if n not in counts]
    return tuple(out)


def _flags(group: Mapping[str, Any]) -> dict[str, Any]:
    """The form that is traced: one tensor after another, no fused kernels."""
    wanted = {"foreach": False, "fused": None, "differentiable": False, "capturable": False}
    return {key: value for key, value in wanted.items() if key in group}


@dataclass(frozen=True)
class Update:
    """The traced update. Placeholders of ``graph``: gradients, then parameters, of ``Optimized.trained``; the slots; the vector of numbers.
    It returns new parameters, new slots, and, where they were asked for, the gradients' norm and whether all of them were finite."""

    graph: torch.fx.GraphModule
    allowed: tuple[NumberSpec, ...]
    norm: bool
    finite: bool
    coarse: bool  # whether it computes in 16 bits what has more (Muon)
    in_place: bool  # whether it works element by element, and so allocates nothing once it has begun to change the state


FIRST_NUMBER = 2
"""The vector of numbers begins with two flags: whether gradients are added to what has been accumulated, or replace it; and whether the
optimizer has no state yet."""


def trace(about: Optimized, gradients: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor], fake_mode: Any, settings: Settings) -> Update:
    """Traces ``about.optimizer``'s step on fake ``gradients`` and ``parameters``. :class:`ExportError` where it does what a graph cannot."""
    for name, gradient in zip(about.trained, gradients, strict=True):
        if gradient.layout != torch.strided:
            raise ExportError(
                f"the gradient of {name!r} is sparse, which compiled code cannot hand to an optimizer; build its layer with sparse=False"
            )
    env = torch_api.ShapeEnv()
    clips = [v for v in (settings.clip_norm, settings.clip_value) if v is not None]
    labels = [n.label for n in about.numbers] + [n for n in ("clip_norm", "clip_value") if getattr(settings, n) is not None]
    values = [n.value for n in about.numbers] + clips
    symbols = [_symbol(env, f"number{i}", v) for i, v in enumerate(values)]
    with fake_mode:
        slots = [torch.empty_strided(s.value.shape, s.value.stride(), dtype=s.value.dtype, device=s.value.device) for s in about.slots]
        vector = torch.empty(FIRST_NUMBER + len(values), dtype=torch.float64, device=parameters[0].device)

    def update(grads: Any, params: Any, states: Any, first: Any, numbers: Any) -> Any:
        return _update(about, settings, grads, params, states, first, numbers)

    kind = type(about.optimizer).__qualname__
    try:
        with fake_mode, tracing(), torch.no_grad(), _lenient(type(about.optimizer)):
            traced = make_fx(torch.func.functionalize(update, remove="mutations"))(list(gradients), list(parameters), slots, vector[1], symbols)
    except ExportError:
        raise
    except Exception as error:  # the optimizer's own code ran in there, and may raise anything
        first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ExportError(f"{kind}.step could not be traced: {type(error).__name__}: {first}") from error
    with fake_mode, torch.no_grad():
        graph = _with_tensors(traced, list(gradients), list(parameters), slots, vector)
    allowed = tuple(
        NumberSpec(
            group=about.numbers[i].group if i < len(about.numbers) else -1,
            key=about.numbers[i].key if i < len(about.numbers) else labels[i],
            position=about.numbers[i].position if i < len(about.numbers) else -1,
            value=values[i],
            allowed=_allowed(env, symbols[i], values[i]),
        )
        for i in range(len(values))
    )
    coarse = any(v.dtype in _LOW for n in graph.graph.nodes if isinstance(v := n.meta.get("val"), torch.Tensor))
    coarse = coarse and not any(p.dtype in _LOW for p in parameters)
    return Update(graph, allowed, settings.clip_norm is not None, settings.skip_nonfinite, coarse, _in_place(graph, len(gradients)))


def _in_place(graph: torch.fx.GraphModule, gradients: int) -> bool:
    """Whether nothing but element-wise operators is applied to what depends on parameters and state."""
    dependent = set(list(graph.graph.find_nodes(op="placeholder"))[gradients:])
    for node in graph.graph.nodes:
        if node.op != "call_function" or dependent.isdisjoint(node.all_input_nodes):
            continue
        if node.meta["val"].dim() > 0 or any(n.meta["val"].dim() > 0 for n in node.all_input_nodes if n in dependent and n.op != "placeholder"):
            tags = getattr(node.target, "tags", ())
            if torch.Tag.pointwise not in tags and not _STILL.intersection({getattr(node.target, "_opname", "")}):
                return False
        dependent.add(node)
    return True


_STILL = {"copy", "clone", "select", "unsqueeze", "cat", "convert_element_type", "view_as_real", "view_as_complex", "full", "zeros_like", "full_like"}
"""What is not called element-wise, and allocates nothing either where the compiler fuses it."""


def _symbol(env: Any, name: str, value: float) -> Any:
    source = torch_api.ConstantSource(name)
    symbol = env.create_unspecified_symbol(value, source=source, dynamic_dim=torch_api.DimDynamic.DYNAMIC)
    return env.create_symfloatnode(symbol, hint=value, source=source)


def _update(about: Optimized, settings: Settings, grads: Any, params: Any, states: Any, first: Any, numbers: Any) -> Any:
    """One step as a function of tensors. ``first``: 1 where the optimizer has no state yet."""
    own, clips = list(numbers[: len(about.numbers)]), list(numbers[len(about.numbers) :])
    norm = finite = None
    if settings.clip_norm is not None:
        norm = nn.utils.get_total_norm(grads, foreach=False)
    if settings.skip_nonfinite:
        finite = torch.isfinite(norm) if norm is not None else torch.stack([torch.isfinite(g).all() for g in grads]).all()
    with _Scalars():
        if norm is not None:
            coefficient = torch.clamp(clips.pop(0) / (norm + 1e-6), max=1.0).to(norm.dtype)  # as nn.utils.clip_grads_with_norm_
            grads = [g * coefficient for g in grads]
        if settings.clip_value is not None:
            limit = clips.pop(0)
            grads = [_clamped(g, -limit, limit) for g in grads]
        started = None
        if _starts_otherwise(about.optimizer):
            started = _stepped(about, own, grads, [p.clone() for p in params], None)
        new, after = _stepped(about, own, grads, params, states)
        if started is not None:
            new = [torch.where(first != 0, a, b) for a, b in zip(started[0], new, strict=True)]
            after = [torch.where(first != 0, a, b) for a, b in zip(started[1], after, strict=True)]
    return new, after, [v for v in (norm, finite) if v is not None]


def _starts_otherwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether no state stands for "none yet": SGD's first momentum is the gradient itself, whatever the dampening."""
    return isinstance(optimizer, torch.optim.SGD) and any(g["momentum"] and g["dampening"] for g in optimizer.param_groups)


def _stepped(about: Optimized, numbers: Sequence[Any], grads: Any, params: Any, states: Any) -> tuple[list[Any], list[Any]]:
    """The person's optimizer on ``params``, which it changes: they and its state afterwards. ``states`` None: it has none yet."""
    optimizer = about.optimizer
    by_name = dict(zip(about.trained, params, strict=True))
    other = _twin(optimizer)
    other.param_groups, other.state = [], defaultdict(dict)
    for n, group in enumerate(optimizer.param_groups):
        made = {**group, **_flags(group)}
        if isinstance(optimizer, _CAPTURABLE):
            made["capturable"] = True
        for number, symbol in zip(about.numbers, numbers, strict=True):
            if number.group == n and number.position < 0:
                made[number.key] = symbol
            elif number.group == n:
                made[number.key] = tuple(symbol if i == number.position else v for i, v in enumerate(made[number.key]))
        made["params"] = [by_name[about.names[id(p)]] for p in group["params"] if about.names[id(p)] in by_name]
        other.param_groups.append(made)
    for p, g in zip(params, grads, strict=True):
        p.grad = g
    if states is not None:
        for slot, state in zip(about.slots, states, strict=True):
            count = state.dim() == 0 and state.dtype is torch.float32 and (slot.key == "step" or by_name[slot.parameters[0]].dim() > 0)
            for name in slot.parameters:  # each gets one of its own, which it may count up in place
                other.state[by_name[name]][slot.key] = state.double() if count else state.clone()
        _fixed_state(about, by_name, other.state)
    type(optimizer).step(other)
    after = [other.state[by_name[s.parameters[0]]][s.key].to(s.value.dtype) for s in about.slots]
    return [by_name[n] for n in about.trained], after


def _fixed_state(about: Optimized, by_name: Mapping[str, Any], state: Any) -> None:
    """What of the state is no tensor: None, or a number that never changes."""
    for p, slots in about.optimizer.state.items():
        name = about.names.get(id(p), "")
        if name in by_name:
            for key, value in slots.items():
                if not isinstance(value, torch.Tensor):
                    state[by_name[name]][key] = value


def _full(value: Any) -> Any:
    value = _tensor_of(value)
    return value if isinstance(value, torch.Tensor) else torch.full((), value, dtype=torch.float64)


def _tensor_of(value: Any) -> Any:
    made: Any = torch.scalar_tensor
    return made(value, dtype=torch.float64) if isinstance(value, torch.SymFloat) else value


class _Scalars(TorchFunctionMode):
    """Numbers that are known only when the step runs, where an operator wants a Python number: written out with tensors, as the CPU kernels
    compute (``self + (value * a) / b``)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.scalar_tensor:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        base = name.rstrip("_")
        if name == "item":
            return args[0].double()
        number = kwargs.get("alpha", kwargs.get("value", kwargs.get("weight", args[2] if base == "lerp" and len(args) > 2 else None)))
        if base in ("add", "sub", "addcdiv", "addcmul", "lerp") and isinstance(number, (torch.SymFloat, torch.Tensor)):
            wide = [a.float() if a.dtype in _LOW else a for a in args[: 3 if base.startswith("addc") else 2]]  # as kernels compute 16 bits
            out = _written_out(base, wide, number).to(args[0].dtype)
            return args[0].copy_(out) if name.endswith("_") else out
        if name == "square_":  # the only one of them that functionalization does not know
            return args[0].copy_(args[0] * args[0])
        if base in ("clamp", "clip") and any(isinstance(v, (torch.SymFloat, torch.Tensor)) for v in (*args[1:], *kwargs.values())):
            limits = dict(zip(("min", "max"), args[1:], strict=False)) | kwargs
            out = _clamped(args[0], limits.get("min"), limits.get("max"))
            return args[0].copy_(out) if name.endswith("_") else out
        args = torch.utils._pytree.tree_map(_tensor_of, args)
        return func(*args, **{k: _tensor_of(v) for k, v in kwargs.items()})


def _clamped(own: Any, low: Any, high: Any) -> Any:
    if low is not None:
        own = torch.maximum(own, _full(low).to(own.dtype))
    return own if high is None else torch.minimum(own, _full(high).to(own.dtype))


def _written_out(base: str, args: Any, number: Any) -> Any:
    own = args[0]
    if base == "lerp":
        if isinstance(number, torch.SymFloat):
            near = bool(number > -0.5) and bool(number < 0.5)
            number = _tensor_of(number)
            return own + number * (args[1] - own) if near else args[1] - (args[1] - own) * (1 - number)
        number = number.to(torch.float64) if number.dim() == 0 else number
        return torch.where(number.abs() < 0.5, own + number * (args[1] - own), args[1] - (args[1] - own) * (1 - number))
    number = _tensor_of(number)
    if base == "add":
        return own + number * args[1]
    if base == "sub":
        return own - number * args[1]
    return own + (number * args[1]) / args[2] if base == "addcdiv" else own + (number * args[1]) * args[2]


@contextlib.contextmanager
def _lenient(kind: Any) -> Iterator[None]:
    """``min`` and ``max`` of the optimizer's own module take tensors too: Adafactor and ASGD ask them for the smaller of two numbers."""

    def chosen(builtin: Callable[..., Any], tensors: Callable[..., Any]) -> Callable[..., Any]:
        def choose(*values: Any, **kwargs: Any) -> Any:
            if len(values) == 2 and any(isinstance(v, torch.Tensor) for v in values):
                return tensors(*(_full(v).double() for v in values))
            return builtin(*values, **kwargs)

        return choose

    names = inspect.unwrap(kind.step).__globals__
    shadows = {"min": chosen(builtins.min, torch.minimum), "max": chosen(builtins.max, torch.maximum)}
    own = names.keys() & shadows.keys()
    names.update({n: f for n, f in shadows.items() if n not in own})
    try:
        yield
    finally:
        for name in shadows.keys() - own:
            del names[name]


def _with_tensors(traced: torch.fx.GraphModule, gradients: Any, parameters: Any, slots: Any, vector: torch.Tensor) -> torch.fx.GraphModule:
    """The graph again, with the numbers as elements of ``vector``: Python's arithmetic on symbols becomes arithmetic on float64 tensors."""
    for node in list(traced.graph.nodes):
        if node.op == "call_function" and (node.target is torch.ops.aten.copy_.default or "profiler" in str(node.target)):
            if node.users and node.target is torch.ops.aten.copy_.default:
                node.replace_all_uses_with(node.args[1])
            traced.graph.erase_node(node) if not node.users else None
    for node in reversed(list(traced.graph.nodes)):
        if node.op == "call_function" and "profiler" in str(node.target):
            traced.graph.erase_node(node)
    traced.graph.eliminate_dead_code()
    traced.recompile()

    class Again(torch.fx.Interpreter):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            if target is torch.ops.aten.scalar_tensor.default and isinstance(args[0], torch.Tensor):
                return args[0]
            given = [a for a in args if isinstance(a, torch.Tensor)]
            low = any(a.dtype in _LOW for a in given)
            if low and any(a.dtype is torch.float64 and a.dim() == 0 for a in given):
                # eager's kernels hold a Python number in float32 beside elements of 16 bits, a tensor of one element they would round to those
                wide = [a.float() if isinstance(a, torch.Tensor) and a.dim() > 0 else a for a in args]
                narrow = next(a.dtype for a in given if a.dtype in _LOW)
                return super().call_function(target, tuple(wide), kwargs).to(narrow)
            return super().call_function(target, args, kwargs)

    def again(grads: Any, params: Any, states: Any, numbers: torch.Tensor) -> Any:
        each = [numbers.select(0, i) for i in range(FIRST_NUMBER, numbers.shape[0])]
        return Again(traced).run(*grads, *params, *states, numbers.select(0, 1), *each)

    flat = torch.fx.CodeGen()
    traced.graph.set_codegen(flat)
    traced.recompile()
    from .joint import decompositions

    made = make_fx(again, decomposition_table=decompositions())(gradients, parameters, slots, vector)
    made.graph.set_codegen(torch.fx.CodeGen())
    made.graph = torch_api.fx_graph_cse(made.graph)
    made.graph.eliminate_dead_code()
    return torch.fx.GraphModule(made, _staged(made.graph, len(gradients)))


def _staged(graph: torch.fx.Graph, gradients: int) -> torch.fx.Graph:
    """The graph with what is computed from numbers alone (bias corrections) done first, and read from memory by the loops over parameters.

    Else the compiler writes the computation into each loop: two ``pow`` for every eight elements. These scalars also wait for every gradient,
    the first ``gradients`` placeholders: so nothing is changed before everything has been allocated, and where memory runs out the state is
    still whole."""
    pure: set[torch.fx.Node] = set()
    given = set(list(graph.find_nodes(op="placeholder"))[:gradients])
    for node in (n for n in graph.nodes if n not in given):
        value = node.meta.get("val")
        numbers = node.op == "placeholder" and value.dim() <= 1 and value.dtype is torch.float64  # the vector itself
        scalar = isinstance(value, torch.Tensor) and value.dim() == 0 and value.is_floating_point()
        if numbers or (scalar and (node.op == "placeholder" or (node.all_input_nodes and pure.issuperset(node.all_input_nodes)))):
            pure.add(node)
    out = torch.fx.Graph()
    new: dict[torch.fx.Node, torch.fx.Node] = {}

    def copied(nodes: Sequence[torch.fx.Node]) -> None:
        for node in nodes:
            new[node] = out.node_copy(node, lambda n: new[n])

    order = [n for n in graph.nodes if n.op != "output"]
    copied([n for n in order if n.op == "placeholder"])
    copied([n for n in order if n in pure and n.op != "placeholder"])
    never = known_with(out, [new[n] for n in order[:gradients]])
    stages: dict[torch.dtype, list[torch.fx.Node]] = {}
    for node in order:
        loops = [u for u in node.users if u not in pure and u.op != "output"]
        if node in pure and loops and node.meta["val"].dim() == 0:
            single = all(u.meta["val"].dtype is torch.float32 for u in loops)
            stages.setdefault(torch.float32 if single else torch.float64, []).append(node)
    loaded: dict[torch.fx.Node, torch.fx.Node] = {}
    for dtype, nodes in stages.items():
        parts = []
        for node in nodes:
            part = new[node]
            if node.meta["val"].dtype is not dtype:
                part = _call(out, torch.ops.prims.convert_element_type.default, part, dtype)
            part = _waiting(out, never, part)
            parts.append(_call(out, torch.ops.aten.unsqueeze.default, part, 0))
        together = _call(out, torch.ops.aten.cat.default, parts if len(parts) > 1 else parts * 2)
        for i, node in enumerate(nodes):
            loaded[node] = _call(out, torch.ops.aten.select.int, together, 0, i)
    for node in order:
        if node not in new:
            new[node] = out.node_copy(node, lambda n: loaded.get(n, new[n]))
    for node in next(iter(graph.find_nodes(op="output"))).args[0]:
        if node in pure:
            new[node] = _waiting(out, never, new[node])
    out.output(torch.fx.node.map_arg(next(iter(graph.find_nodes(op="output"))).args[0], lambda n: new[n]))
    return out


def known_with(graph: torch.fx.Graph, tensors: Sequence[torch.fx.Node]) -> torch.fx.Node | None:
    """A 0-d False that is known only when all ``tensors`` are there."""
    aten = torch.ops.aten
    out: torch.fx.Node | None = None
    for tensor in tensors:
        if tensor.meta["val"].numel():
            for dim in range(tensor.meta["val"].dim() - 1, -1, -1):
                tensor = _call(graph, aten.select.int, tensor, dim, 0)
            odd = _call(graph, aten.isnan.default, tensor)
            neither = _call(graph, aten.logical_and.default, odd, _call(graph, aten.logical_not.default, odd))
            out = neither if out is None else _call(graph, aten.logical_or.default, out, neither)
    return out


def _waiting(graph: torch.fx.Graph, never: torch.fx.Node | None, scalar: torch.fx.Node) -> torch.fx.Node:
    if never is None:
        return scalar
    return _call(graph, torch.ops.aten.where.self, never, _call(graph, torch.ops.aten.neg.default, scalar), scalar)


def _call(graph: torch.fx.Graph, target: Any, *args: Any) -> torch.fx.Node:
    made = graph.call_function(target, args)
    made.meta["val"] = target(*torch.fx.node.map_arg(args, lambda n: n.meta["val"]))
    return made


def _allowed(env: Any, symbol: Any, value: float) -> tuple[Interval, ...]:
    """Where the conditions under which the optimizer was traced hold: intervals of the number. One point where it is fixed; none: anywhere."""
    own = symbol.node.expr
    if not own.free_symbols or own in env.replacements:
        return (Interval(value, value, False, False),)
    x = sympy.Symbol("x", real=True)
    found: Any = sympy.S.Reals
    for guard in env.guards:
        if own not in guard.expr.free_symbols:
            continue
        if len(guard.expr.free_symbols) > 1:
            return (Interval(value, value, False, False),)
        found = found.intersect(guard.expr.xreplace({own: x}).as_set())
    if found == sympy.S.Reals:
        return ()
    parts = found.args if isinstance(found, sympy.Union) else (found,)
    if not all(isinstance(p, sympy.Interval) for p in parts):
        return (Interval(value, value, False, False),)
    return tuple(
        Interval(
            None if p.start == -sympy.oo else float(p.start),
            None if p.end == sympy.oo else float(p.end),
            bool(p.left_open),
            bool(p.right_open),
        )
        for p in parts
    )
