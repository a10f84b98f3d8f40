"""Trace a ``torch.optim`` optimizer to one graph: from parameters, gradients and state to the results of
``optimizer.step()``.

The single-tensor form of the user's own optimizer is traced on fake tensors. Two things differ from eager:

- The numbers of its parameter groups (learning rate, weight decay, betas, …) are symbols while it is traced. Python
  arithmetic on them becomes float64 operations in the graph, and a decision by them becomes a condition on the number
  (``weight_decay != 0``).
- State of one element per parameter (``step``) is read as float64, as by eager's ``.item()``.
"""

from __future__ import annotations

import builtins
import contextlib
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from aot_backward_exporters import sixteen_bits, torch_api
from aot_backward_exporters.process_state import patched_items
from aot_backward_runtime.errors import ExportError
from aot_backward_runtime.format.manifest import Interval, NumberSpec
from aot_backward_runtime.optimizer_steps.interception import step_of

from ..trace_environment import tracing
from .alike import Alike
from .hyperparameters import FIRST_NUMBER, LOW, numbers_first, with_tensors
from .optimizer_spec import OptimizerSpec, Settings, duplicate, single_tensor_form

AVERAGE, AVERAGED = "ema", "n_averaged"
"""Keys of the state that an entry adds with ``ema``: the average of each trained parameter, and the number of updates
in the averages. docs/format.md (section 5) fixes them."""
_CAPTURABLE = (torch.optim.RAdam, torch.optim.ASGD, torch.optim.Rprop)
"""Optimizers that are traced as ``capturable``: their other form chooses a formula by the value of a tensor."""


@dataclass(frozen=True)
class Update:
    """The traced update. Placeholders of ``graph``: gradients, then parameters, of ``OptimizerSpec.trained``; the
    slots; with ``ema`` the averages and their count; the vector of numbers. It returns the new values of all but the
    gradients and numbers and, if requested, the gradients' norm and whether all of them were finite."""

    graph: torch.fx.GraphModule
    allowed: tuple[NumberSpec, ...]
    norm: bool
    finite: bool
    reduced_precision: bool  # whether it computes in 16 bits for wider parameters (Muon)
    in_place: bool  # whether it is element-wise, and so allocates nothing after its first write to the state


def trace(
    about: OptimizerSpec,
    gradients: Sequence[torch.Tensor],
    parameters: Sequence[torch.Tensor],
    fake_mode: Any,
    settings: Settings,
) -> Update:
    """Trace the step of ``about.optimizer`` on fake ``gradients`` and ``parameters``. Raise :class:`ExportError` if a
    graph cannot express it."""
    for name, gradient in zip(about.trained, gradients, strict=True):
        if gradient.layout != torch.strided:
            raise ExportError(
                f"the gradient of {name!r}: expected a dense tensor, got a sparse one. Build its layer with sparse=False"
            )
    env = torch_api.ShapeEnv()
    labels = [n.label for n in about.numbers] + list(settings.numbers)
    values = [n.value for n in about.numbers] + list(settings.numbers.values())
    symbols = [_symbol(env, f"number{i}", v) for i, v in enumerate(values)]
    with fake_mode:
        vector = torch.empty(FIRST_NUMBER + len(values), dtype=torch.float64, device=parameters[0].device)
    alike, whole = Alike(about, gradients, parameters), None
    if len(alike.spec.trained) < len(about.trained):
        first = _traced(
            alike.spec, settings, alike.firsts(gradients), alike.firsts(parameters), vector, symbols, fake_mode
        )
        with fake_mode, torch.no_grad():
            inputs = [*gradients, *parameters, *_state(about, settings, parameters), vector]
            whole = alike.for_all(first, inputs, averages=settings.ema is not None)
    if whole is None:
        whole = _traced(about, settings, gradients, parameters, vector, symbols, fake_mode)
    with fake_mode, torch.no_grad():
        graph = numbers_first(whole, len(gradients))
    allowed = tuple(
        NumberSpec(
            group=about.numbers[i].group if i < len(about.numbers) else -1,
            key=about.numbers[i].key if i < len(about.numbers) else labels[i],
            position=about.numbers[i].position if i < len(about.numbers) else -1,
            value=values[i],
            allowed=(Interval(0.0, 1.0, False, False),) if labels[i] == "ema" else _allowed(env, symbols[i], values[i]),
        )
        for i in range(len(values))
    )
    sixteen_bits.mark_all_rounded(graph)
    reduced_precision = sixteen_bits.computes_in_16_bits(graph) and not any(p.dtype in LOW for p in parameters)
    return Update(
        graph,
        allowed,
        settings.clip_norm is not None,
        settings.skip_nonfinite,
        reduced_precision,
        _in_place(graph, len(gradients)),
    )


def _traced(
    about: OptimizerSpec, settings: Settings, gradients: Any, parameters: Any, vector: Any, symbols: Any, fake_mode: Any
) -> Any:
    with fake_mode:
        slots = _state(about, settings, parameters)

    def update(grads: Any, params: Any, states: Any, first: Any, numbers: Any) -> Any:
        return _update(about, settings, grads, params, states, first, numbers)

    kind = type(about.optimizer).__qualname__
    try:
        with fake_mode, tracing(), torch.no_grad(), _min_and_max_of_tensors(type(about.optimizer)):
            traced = make_fx(torch.func.functionalize(update, remove="mutations"))(
                list(gradients), list(parameters), slots, vector[1], symbols
            )
    except ExportError:
        raise
    except Exception as error:  # the optimizer's own code may raise anything
        cause = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ExportError(f"{kind}.step could not be traced: {type(error).__name__}: {cause}") from error
    with fake_mode, torch.no_grad():
        return with_tensors(traced, list(gradients), list(parameters), slots, vector)


def _state(about: OptimizerSpec, settings: Settings, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors like the optimizer's state, and like the averages and their count."""
    state = [
        torch.empty_strided(s.value.shape, s.value.stride(), dtype=s.value.dtype, device=s.value.device)
        for s in about.slots
    ]
    if settings.ema is not None:
        state += [*map(torch.empty_like, parameters), torch.empty((), dtype=torch.float64, device=parameters[0].device)]
    return state


def _in_place(graph: torch.fx.GraphModule, gradients: int) -> bool:
    """Return whether only element-wise operators use values that depend on parameters and state."""
    dependent = set(list(graph.graph.find_nodes(op="placeholder"))[gradients:])
    for node in graph.graph.nodes:
        if node.op != "call_function" or dependent.isdisjoint(node.all_input_nodes):
            continue
        if node.meta["val"].dim() > 0 or any(
            n.meta["val"].dim() > 0 for n in node.all_input_nodes if n in dependent and n.op != "placeholder"
        ):
            tags = getattr(node.target, "tags", ())
            if torch.Tag.pointwise not in tags and getattr(node.target, "_opname", "") not in _ALLOCATE_NOTHING:
                return False
        dependent.add(node)
    return True


_ALLOCATE_NOTHING = {
    "copy", "clone", "select", "unsqueeze", "cat", "convert_element_type", "view_as_real", "view_as_complex", "full", "zeros_like", "full_like",
}  # fmt: skip
"""Operators without the pointwise tag that also allocate nothing if the compiler fuses them."""


def _symbol(env: Any, name: str, value: float) -> Any:
    source = torch_api.ConstantSource(name)
    symbol = env.create_unspecified_symbol(value, source=source, dynamic_dim=torch_api.DimDynamic.DYNAMIC)
    return env.create_symfloatnode(symbol, hint=value, source=source)


def _update(
    about: OptimizerSpec, settings: Settings, grads: Any, params: Any, states: Any, first: Any, numbers: Any
) -> Any:
    """Make one step as a function of tensors. ``first``: 1 if the optimizer has no state yet."""
    group_numbers, clips = list(numbers[: len(about.numbers)]), list(numbers[len(about.numbers) :])
    averages, states = states[len(about.slots) :], states[: len(about.slots)]
    norm = finite = None
    if settings.clip_norm is not None:
        norm = nn.utils.get_total_norm(grads, foreach=False)
    if settings.skip_nonfinite:
        finite = (
            torch.isfinite(norm) if norm is not None else torch.stack([torch.isfinite(g).all() for g in grads]).all()
        )
    with _Scalars():
        if norm is not None:
            # As nn.utils.clip_grads_with_norm_
            coefficient = torch.clamp(clips.pop(0) / (norm + 1e-6), max=1.0).to(norm.dtype)
            grads = [g * coefficient for g in grads]
        if settings.clip_value is not None:
            limit = clips.pop(0)
            grads = [_clamped(g, -limit, limit) for g in grads]
        first_step = None
        if _first_step_differs(about.optimizer):
            first_step = _stepped(about, group_numbers, grads, [p.clone() for p in params], None)
        new_params, new_state = _stepped(about, group_numbers, grads, params, states)
        if first_step is not None:
            new_params = [torch.where(first != 0, a, b) for a, b in zip(first_step[0], new_params, strict=True)]
            new_state = [torch.where(first != 0, a, b) for a, b in zip(first_step[1], new_state, strict=True)]
        new_averages = _averaged(averages, new_params, clips[-1]) if settings.ema is not None else []
    return new_params, new_state + new_averages, [v for v in (norm, finite) if v is not None]


def _averaged(averages: Sequence[Any], params: Sequence[Any], decay: Any) -> list[Any]:
    """Return the new averages and their count, as ``torch.optim.swa_utils.AveragedModel`` with
    ``get_ema_multi_avg_fn(decay)``: the first time the parameters themselves, then by the formula of the kernel of
    ``lerp``."""
    *averages, count = averages
    weight = 1 - _full(decay) * torch.clamp(count, max=1.0)
    is_small = weight < 0.5
    factor = torch.where(is_small, weight, weight - 1)

    def moved(average: Any, parameter: Any) -> Any:
        a, p = (t.float() if t.dtype in LOW else t for t in (average, parameter))  # as kernels compute 16-bit tensors
        return (torch.where(is_small, a, p) + factor * (p - a)).to(average.dtype)

    return [*map(moved, averages, params), count + 1]


def _first_step_differs(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether no state stands for "none yet": SGD's first momentum is the gradient itself, whatever the
    dampening."""
    return isinstance(optimizer, torch.optim.SGD) and any(
        g["momentum"] and g["dampening"] for g in optimizer.param_groups
    )


def _stepped(
    about: OptimizerSpec, numbers: Sequence[Any], grads: Any, params: Any, states: Any
) -> tuple[list[Any], list[Any]]:
    """Run the user's optimizer on ``params``, in place; return them and its new state. ``states``: None if it has none
    yet."""
    optimizer = about.optimizer
    by_name = dict(zip(about.trained, params, strict=True))
    other = duplicate(optimizer)
    other.param_groups, other.state = [], defaultdict(dict)
    for n, group in enumerate(optimizer.param_groups):
        new_group = {**group, **single_tensor_form(group)}
        if isinstance(optimizer, _CAPTURABLE):
            new_group["capturable"] = True
        for number, symbol in zip(about.numbers, numbers, strict=True):
            if number.group == n and number.position < 0:
                new_group[number.key] = symbol
            elif number.group == n:
                new_group[number.key] = tuple(
                    symbol if i == number.position else v for i, v in enumerate(new_group[number.key])
                )
        new_group["params"] = [by_name[about.names[id(p)]] for p in group["params"] if about.names[id(p)] in by_name]
        other.param_groups.append(new_group)
    for p, g in zip(params, grads, strict=True):
        p.grad = g
    if states is not None:
        for slot, state in zip(about.slots, states, strict=True):
            is_count = (
                state.dim() == 0
                and state.dtype is torch.float32
                and (slot.key == "step" or by_name[slot.parameters[0]].dim() > 0)
            )
            for name in slot.parameters:  # each gets its own tensor, which it may increment in place
                other.state[by_name[name]][slot.key] = state.double() if is_count else state.clone()
        _copy_constant_state(about, by_name, other.state)
    step_of(optimizer)(other)
    new_state = [other.state[by_name[s.parameters[0]]][s.key].to(s.value.dtype) for s in about.slots]
    return [by_name[n] for n in about.trained], new_state


def _copy_constant_state(about: OptimizerSpec, by_name: Mapping[str, Any], state: Any) -> None:
    """Copy state that is not a tensor: None, or a number that never changes."""
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
    scalar_tensor: Any = torch.scalar_tensor
    return scalar_tensor(value, dtype=torch.float64) if isinstance(value, torch.SymFloat) else value


class _Scalars(TorchFunctionMode):
    """Replaces operators that take a Python number by tensor operations if the number is known only when the step runs,
    with the formulas of the CPU kernels (``self + (value * a) / b``)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.scalar_tensor:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        base = name.rstrip("_")
        if name == "item":
            return args[0].double()
        number = kwargs.get(
            "alpha", kwargs.get("value", kwargs.get("weight", args[2] if base == "lerp" and len(args) > 2 else None))
        )
        if base in ("add", "sub", "addcdiv", "addcmul", "lerp") and isinstance(number, (torch.SymFloat, torch.Tensor)):
            # As kernels compute 16-bit tensors
            wide_args = [a.float() if a.dtype in LOW else a for a in args[: 3 if base.startswith("addc") else 2]]
            out = _written_out(base, wide_args, number).to(args[0].dtype)
            return args[0].copy_(out) if name.endswith("_") else out
        if name == "square_":  # the only in-place operator here that functionalization lacks
            return args[0].copy_(args[0] * args[0])
        if base in ("clamp", "clip") and any(
            isinstance(v, (torch.SymFloat, torch.Tensor)) for v in (*args[1:], *kwargs.values())
        ):
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
    tensor = args[0]
    if base == "lerp":
        if isinstance(number, torch.SymFloat):
            small_weight = bool(number > -0.5) and bool(number < 0.5)
            number = _tensor_of(number)
            return tensor + number * (args[1] - tensor) if small_weight else args[1] - (args[1] - tensor) * (1 - number)
        number = number.to(torch.float64) if number.dim() == 0 else number
        return torch.where(
            number.abs() < 0.5, tensor + number * (args[1] - tensor), args[1] - (args[1] - tensor) * (1 - number)
        )
    number = _tensor_of(number)
    if base == "add":
        return tensor + number * args[1]
    if base == "sub":
        return tensor - number * args[1]
    return tensor + (number * args[1]) / args[2] if base == "addcdiv" else tensor + (number * args[1]) * args[2]


@contextlib.contextmanager
def _min_and_max_of_tensors(kind: Any) -> Iterator[None]:
    """Let ``min`` and ``max`` of the optimizer's own module take tensors: Adafactor and ASGD call them on two
    numbers."""

    def chosen(builtin: Callable[..., Any], tensors: Callable[..., Any]) -> Callable[..., Any]:
        def choose(*values: Any, **kwargs: Any) -> Any:
            if len(values) == 2 and any(isinstance(v, torch.Tensor) for v in values):
                return tensors(*(_full(v).double() for v in values))
            return builtin(*values, **kwargs)

        return choose

    names = inspect.unwrap(kind.step).__globals__
    shadows = {"min": chosen(builtins.min, torch.minimum), "max": chosen(builtins.max, torch.maximum)}
    with patched_items(names, **{n: f for n, f in shadows.items() if n not in names}):
        yield


def _allowed(env: Any, symbol: Any, value: float) -> tuple[Interval, ...]:
    """Return the intervals of the number in which the traced conditions hold: one point if it is fixed, no interval if
    any number is allowed."""
    expression = symbol.node.expr
    if not expression.free_symbols or expression in env.replacements:
        return (Interval(value, value, False, False),)
    x = sympy.Symbol("x", real=True)
    allowed_set: Any = sympy.S.Reals
    for guard in env.guards:
        if expression not in guard.expr.free_symbols:
            continue
        if len(guard.expr.free_symbols) > 1:
            return (Interval(value, value, False, False),)
        allowed_set = allowed_set.intersect(guard.expr.xreplace({expression: x}).as_set())
    if allowed_set == sympy.S.Reals:
        return ()
    parts = allowed_set.args if isinstance(allowed_set, sympy.Union) else (allowed_set,)
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
