"""Run operations of a tape, or of a plan, in their order, as eager would.

Every operation gets the gradients of eager's node: undefined ones are None. Hooks and custom functions are called in
eager's order, with eager's checks of their results.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from .. import torch_api
from .tape import CALLS_OUT, Derived, Op, Slot

Tensors = list[torch.Tensor | None]
MATERIALIZE = "_aot_backward_materialize_grads"
"""The attribute of a custom function's context for its ``set_materialize_grads`` argument: the engine's own flag cannot
be read."""
functional: dict[str, Callable[..., Any]] = {}
"""Functional backwards by node type; the engine binds each once per process (``recorder.py``)."""

_OPERATORS: dict[str, Callable[..., Any]] = {
    **{n: getattr(operator, n) for n in ("add", "sub", "mul", "floordiv", "mod", "neg", "pow", "truediv")},
    "min": min,
    "max": max,
    "pad": lambda grads, count: [*grads[: int(count)], *[None] * (int(count) - len(grads))],
}  # fmt: skip
_TRACING = "[Compiled Autograd Tracing:]"  # the engine's checks begin with this; eager names the node instead


class Run:
    """One pass: its operands, and the values computed so far."""

    def __init__(
        self,
        inputs: Sequence[Any],
        sizes: Sequence[Any],
        scalars: Sequence[Any],
        hooks: Sequence[Any],
        packed: Sequence[Any],
        outside: Callable[[], AbstractContextManager[None]] = nullcontext,
    ):
        """``outside``: a context entered while a hook or a custom function is called."""
        self.outside = outside
        self.values: dict[int, Any] = {}
        self.operands: dict[str, Any] = {
            "input": inputs,
            "size": sizes,
            "scalar": scalars,
            "hook": hooks,
            "packed": packed,
            "value": self.values,
        }
        self.marks: list[Any] = []  # the tensors' memory and metadata when the pass began (compiled_pass.py)
        self.latest: Op | None = None  # the last node that ran, for error messages
        self.check_nans = torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()

    def execute(self, ops: Iterable[Op], outputs: Sequence[Any]) -> Tensors:
        for op in ops:
            self.step(op)
        return [self.get(o) for o in outputs]

    def step(self, op: Op) -> None:
        if op.kind in CALLS_OUT:
            with self.outside():
                results = getattr(self, op.kind)(op)
        else:
            results = getattr(self, op.kind)(op)
        for slot, value in zip(op.results, results, strict=True):
            if slot >= 0:
                self.values[slot] = value

    def get(self, x: Any) -> Any:
        if isinstance(x, Slot):
            return self.operands[x.kind][x.index]
        if isinstance(x, (list, tuple)):
            return type(x)(map(self.get, x))
        if isinstance(x, Derived):
            return _OPERATORS[x.operator](*map(self.get, x.operands))
        return x

    # -- one method per kind of operation (KINDS in tape.py)

    def apply(self, op: Op) -> Sequence[Any]:
        grads, *args = op.operands
        self.latest = op
        results = functional[op.name](self.get(grads), *self.get(tuple(args)))
        if self.check_nans:
            for i, result in enumerate(results):
                if result is not None and torch.isnan(result).any():
                    raise RuntimeError(f"Function '{op.name}' returned nan values in its {i}th output.")
        return results[: len(op.results)]

    def validate(self, op: Op) -> Sequence[Any]:
        grads, metadata = op.operands
        if not op.results:
            return ()
        try:
            return functional["validate_outputs"](self.get(grads), self.get(metadata))
        except RuntimeError as error:
            text = str(error)
            if not text.startswith(_TRACING):
                raise
            text = text.removeprefix(_TRACING)
            raise RuntimeError(
                text if self.latest is None else f"Function {self._name(self.latest)} returned an {text}"
            ) from None

    def _name(self, op: Op) -> str:
        """Return eager's name for the node of an "apply" or "custom" operation."""
        return self.get(op.operands[0]).name() if op.kind == "custom" else op.name

    def add(self, op: Op) -> Sequence[Any]:
        old, new = self.get(op.operands[0]), self.get(op.operands[1])
        if old is None or new is None:
            return [new if old is None else old]
        return [new + old if old.is_sparse and not new.is_sparse else old + new]

    def accumulate(self, op: Op) -> Sequence[Any]:
        leaf, grad = self.get(op.operands[0]), self.get(op.operands[1])
        if grad is not None:
            # The engine's own function has the rules for stealing, copying, adding in place and layout.
            (updated,) = functional["AccumulateGrad"]([grad], leaf, leaf.grad, False)
            if updated is not leaf.grad:
                leaf.grad = updated
        return ()

    def custom(self, op: Op) -> Sequence[Any]:
        context, saved, grads, metadata = (self.get(o) for o in op.operands[:4])
        self.latest = op
        results = call_custom(context, saved, grads, [m is not None for m in metadata])
        if self.check_nans:
            for i, result in enumerate(results):
                if result is not None and torch.isnan(result).any():
                    raise RuntimeError(f"Function '{context.name()}' returned nan values in its {i}th output.")
        return results

    def zeros(self, op: Op) -> Sequence[Any]:
        size, dtype, device = op.operands
        return [torch.zeros(self.get(size), dtype=dtype, device=device)]

    def copy_slices_prologue(self, op: Op) -> Sequence[Any]:
        grads, base_size, base_stride, base_offset, size, stride, offset = (self.get(o) for o in op.operands)
        (grad, *_) = grads
        if grad is None:
            return [None, None, None]
        result = grad.new_empty_strided(base_size, base_stride)
        result.copy_(grad)
        part = result.as_strided(size, stride, offset - base_offset)
        return [result, part, part.clone(memory_format=torch.contiguous_format)]

    def copy_slices_epilogue(self, op: Op) -> Sequence[Any]:
        needed, result, grads, part = (self.get(o) for o in op.operands)
        out: Tensors = [None] * len(needed)
        for i, grad in enumerate(grads):
            if not needed[i] or grad is None:
                continue
            if i == 0:
                part.copy_(grad)
                out[0] = result
            else:
                out[i] = grad
        return out

    def unpack_hook(self, op: Op) -> Sequence[Any]:
        hook, packed = self.get(op.operands)
        value = hook(packed)
        if not isinstance(value, torch.Tensor):
            raise TypeError(
                "Output of saved tensor unpack_hook expected to be a Tensor but got result of type "
                + type(value).__name__
            )
        return [value]

    def tensor_pre_hook(self, op: Op) -> Sequence[Any]:
        hook, grad = self.get(op.operands)
        result = hook(grad)
        if result is None:
            return [grad]
        _check_replacement(hook, grad, result)
        return [result]

    def cpp_tensor_pre_hook(self, op: Op) -> Sequence[Any]:
        number, grad = self.get(op.operands)
        return [None if grad is None else torch_api.call_cpp_tensor_pre_hooks(number, grad)]

    def pre_hook(self, op: Op) -> Sequence[Any]:
        hook, grads = self.get(op.operands)
        result = hook(tuple(grads))
        return grads if result is None else _replacement_of(hook, grads, result)

    def post_hook(self, op: Op) -> Sequence[Any]:
        hook, results, grads = self.get(op.operands)
        changed = hook(tuple(results), tuple(grads))
        return results if changed is None else _replacement_of(hook, results, changed)

    def post_accumulate_hook(self, op: Op) -> Sequence[Any]:
        hook, leaf = self.get(op.operands)
        if hook(leaf) is not None:
            raise RuntimeError("Tensor post accumulate grad hooks should return None.")
        return ()


class _Context:
    """A custom function's context with the saved tensors that the engine lifted: its own are already released."""

    def __init__(self, context: Any, saved: Sequence[Any]):
        self.__dict__.update(_context=context, saved_tensors=tuple(saved))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._context, name, value)


def call_custom(context: Any, saved: Sequence[Any], grads: Sequence[Any], differentiable: Sequence[bool]) -> Tensors:
    """Call the backward of an ``autograd.Function``. ``differentiable``: for each input of the forward, whether it was
    a tensor."""
    function = context._forward_cls
    backward = backward_of(function)
    if any(g is None for g in grads) and context.__dict__.get(MATERIALIZE, True):
        metadata = context._input_metadata
        grads = [
            torch.zeros(m.shape, dtype=m.dtype, device=m.device) if g is None else g
            for g, m in zip(grads, metadata, strict=True)
        ]
    # A torch.compile'd backward frees them early
    args = (list(grads),) if torch_api.takes_boxed_gradients(function) else grads
    results = backward(_Context(context, saved), *args)
    results = list(results) if isinstance(results, tuple) else [results]
    name = context.name()
    expected = len(differentiable)
    if len(results) > expected and all(r is None for r in results[expected:]):
        del results[expected:]
    if len(results) != expected:
        raise RuntimeError(
            f"function {name} returned an incorrect number of gradients (expected {expected}, got {len(results)})"
        )
    for i, (result, input_is_tensor) in enumerate(zip(results, differentiable, strict=True)):
        if result is not None and not input_is_tensor:
            raise RuntimeError(
                f"function {name} returned a gradient different than None at position {i + 1}, but the corresponding forward input was not a Variable"
            )
        if result is not None and not isinstance(result, torch.Tensor):
            raise RuntimeError(f"expected Variable or None (got {type(result).__name__})")
    return results


def backward_of(function: Any) -> Any:
    """Return the ``backward`` of an ``autograd.Function``, or its ``vjp`` (the other name) if defined."""
    return function.backward if function.vjp is torch.autograd.Function.vjp else function.vjp


def _check_replacement(hook: Any, old: torch.Tensor | None, new: Any) -> None:
    """Check a gradient that a hook returned, as eager does (``check_single_result`` in ``python_hook.cpp``)."""
    if not isinstance(new, torch.Tensor):
        raise TypeError(f"expected Variable, but hook returned '{type(new).__name__}'")
    if old is None:
        raise RuntimeError("can't replace a None gradient with a non-None value")
    if new.dtype != old.dtype or new.device.type != old.device.type or new.layout != old.layout:
        raise RuntimeError(
            f"hook '{_name_of(hook)}' has changed the type of value (was torch.{_type(old)} got torch.{_type(new)})"
        )
    if new.device != old.device:
        raise RuntimeError(f"hook '{_name_of(hook)}' has changed the device of value")
    if new.shape != old.shape:
        raise RuntimeError(f"hook '{_name_of(hook)}' has changed the size of value")


def _name_of(hook: Any) -> str:
    return getattr(hook, "__name__", "<unknown>")


def _type(tensor: torch.Tensor) -> str:
    return tensor.type().removeprefix("torch.")


def _replacement_of(hook: Any, old: Sequence[Any], new: Any) -> Sequence[Any]:
    if not isinstance(new, tuple):
        raise TypeError(f"expected tuple, but hook returned '{type(new).__name__}'")
    if len(new) != len(old):
        raise RuntimeError(
            f"hook '{_name_of(hook)}' has returned an incorrect number of values (got {len(new)}, but expected {len(old)})"
        )
    for before, after in zip(old, new, strict=True):
        if after is not before and after is not None:
            _check_replacement(hook, before, after)
    return list(new)
