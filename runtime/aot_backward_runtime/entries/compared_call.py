"""A check of one call of a live module: its own forward and compiled code run on copies; results, buffers and gradients
are compared."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..errors import ExecutionError
from .dispatch import Entry
from .module_call import call_entry
from .named_tensors import state_of

_RESULTS = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float16: 3e-2, torch.bfloat16: 6e-2}
_OTHERS = 1e-4
"""Allowed error of results relative to their norm. Rounding in another order explains this much in networks of some
hundred layers."""
_GRADIENTS = 10
"""Factor for gradients, which pass through twice as many operations, and are compared after sums over the batch."""
_SMALL = {torch.float16: 0.1, torch.bfloat16: 0.1}
_OTHERS_SMALL = 1e-3
"""Fraction of the largest gradient's norm. A smaller gradient may have the error of one of that size, because its own
terms may cancel (the gradient of a bias before a batch normalization consists of rounding errors)."""

Values = Mapping[str, "torch.Tensor | None"]


def compare_call(
    entry: Entry, net: nn.Module, mode: str, args: tuple[Any, ...], kwargs: dict[str, Any], served: Callable[[], object]
) -> None:
    """Raise :class:`ExecutionError`, which names the first result, buffer or gradient that differs between compiled
    code and the class's forward.

    Both run on deep copies of ``net`` and of the arguments, from the same random state, with the same random incoming
    gradients; ``net``, its ``.grad``\\ s and the random state are unchanged. Needs memory for two copies. ``served``:
    called if compiled code serves the call."""

    def by_eager(twin: nn.Module, args: Any, kwargs: Any) -> Any:
        return type(net).forward(twin, *args, **kwargs)

    def compiled(twin: nn.Module, args: Any, kwargs: Any) -> Any:
        tensors = state_of(twin)
        return call_entry(entry, [tensors[n] for n in entry.state.names], mode, args, kwargs)

    actual, gradients = _run(compiled, net, args, kwargs)
    served()
    expected, expected_gradients = _run(by_eager, net, args, kwargs)
    largest = max((_norm(g) for g in expected_gradients.values() if g is not None), default=0.0)
    words = _difference(actual, expected, 1, 0.0) or _difference(gradients, expected_gradients, _GRADIENTS, largest)
    if words:
        raise ExecutionError(
            f"compiled code and the module's own forward differ: {words}. Export the module as it is now."
        )


def _run(call: Callable[..., Any], net: nn.Module, args: Any, kwargs: Any) -> tuple[Values, Values]:
    """Return results and buffers, and the gradients of tensors that require some."""
    try:
        twin = copy.deepcopy(net)
    except Exception as error:
        raise ExecutionError(
            f"compare: expected a module that copy.deepcopy can copy, got {error}. Attach it without compare."
        ) from error
    copies: dict[int, torch.Tensor] = {}
    args, kwargs = pytree.tree_map(lambda value: _new_leaf(value, copies), (args, kwargs))
    with torch.random.fork_rng(devices=list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []):
        results = pytree.tree_leaves(call(twin, args, kwargs))
        tensors = {f"result {i}": r for i, r in enumerate(results) if isinstance(r, torch.Tensor)}
        values = {
            **{n: t.detach() for n, t in tensors.items()},
            **{f"the buffer {n}": b.detach().clone() for n, b in twin.named_buffers()},
        }
        outputs = [t for t in tensors.values() if t.requires_grad]
        values |= {f"whether {n} requires a gradient": torch.tensor(t.requires_grad) for n, t in tensors.items()}
        sources: dict[str, torch.Tensor] = {
            f"the gradient of {n}": p for n, p in twin.named_parameters() if p.requires_grad
        }
        sources |= {
            f"the gradient of tensor {i} of the arguments": t for i, t in enumerate(copies.values()) if t.requires_grad
        }
        if not outputs or not sources:
            return values, {}
        gradients = torch.autograd.grad(outputs, list(sources.values()), _incoming(outputs), allow_unused=True)
    return values, dict(zip(sources, gradients, strict=True))


def _new_leaf(value: Any, copies: dict[int, torch.Tensor]) -> Any:
    """Return a tensor as a new leaf, one for each tensor; anything else unchanged."""
    if not isinstance(value, torch.Tensor):
        return value
    if id(value) not in copies:
        copies[id(value)] = (
            value.detach().clone(memory_format=torch.preserve_format).requires_grad_(value.requires_grad)
        )
    return copies[id(value)]


def _incoming(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return random gradients, the same for the same shapes."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o.dtype).to(o.device) for o in outputs]


def _difference(actual: Values, expected: Values, factor: float, largest: float) -> str:
    if mismatches := [n for n in {**expected, **actual} if n not in actual or n not in expected]:
        return f"{mismatches[0]} exists only in {'compiled code' if mismatches[0] in actual else 'eager'}"
    return next((f"{n} {words}" for n in expected if (words := _compared(actual[n], expected[n], factor, largest))), "")


def _compared(actual: torch.Tensor | None, expected: torch.Tensor | None, factor: float, largest: float) -> str:
    if actual is None or expected is None:
        return "" if actual is expected else f"is None in {'compiled code' if actual is None else 'eager'} only"
    if actual.dtype is not expected.dtype or actual.shape != expected.shape:
        return f"is {actual.dtype} {tuple(actual.shape)} in compiled code and {expected.dtype} {tuple(expected.shape)} in eager"
    if not (actual.is_floating_point() or actual.is_complex()):
        return "" if torch.equal(actual, expected) else "has other values in compiled code"
    nonfinite = ~torch.isfinite(expected)
    if (
        not torch.equal(_infinities(actual[nonfinite]), _infinities(expected[nonfinite]))
        or not torch.isfinite(actual[~nonfinite]).all()
    ):
        return "has other Inf or NaN elements than eager"
    tolerance = (
        factor
        * _RESULTS.get(actual.dtype, _OTHERS)
        * max(_norm(expected[~nonfinite]), _SMALL.get(actual.dtype, _OTHERS_SMALL) * largest)
    )
    error = _norm(actual[~nonfinite] - expected[~nonfinite])
    return "" if error <= tolerance else f"is off by {error:.3g}; {tolerance:.3g} is allowed"


def _infinities(tensor: torch.Tensor) -> torch.Tensor:
    """Return masks of the elements that are NaN, Inf and -Inf."""
    parts = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return torch.stack([parts.isnan(), parts.isposinf(), parts.isneginf()])


def _norm(tensor: torch.Tensor) -> float:
    return float(
        torch.linalg.vector_norm(tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64))
    )
