"""Small backward passes of every kind that a script may run. Tests compare recorded passes with eager on them.

A scenario makes fresh parameters and returns ``step(i)``. The step runs forward and backward number ``i``, most at
another batch size for ``i == 2``. It returns its observations: gradients (or None), logs of hook calls, and the texts
of errors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Seen = dict[str, object]
Step = Callable[[int], Seen]
SCENARIOS: dict[str, Callable[[], Step]] = {}


def scenario(make: Callable[[], Step]) -> Callable[[], Step]:
    """Register ``make`` by its name, with fixed random seeds for the factory and for each step."""

    def seeded() -> Step:
        torch.manual_seed(0)
        step = make()

        def run(i: int) -> Seen:
            torch.manual_seed(100 + i)
            seen = step(i)
            return {
                **seen,
                **{
                    f"strides of {n}": strides(t)
                    for n, t in seen.items()
                    if isinstance(t, Tensor) and t.layout == torch.strided
                },
            }

        return run

    SCENARIOS[make.__name__] = seeded
    return make


def strides(tensor: Tensor) -> list[int]:
    """Return the strides of the dimensions larger than 1. The kernel chooses the other strides, and a copy of the
    gradient does not keep them (a 1x1 convolution in channels_last: [4, 1, 4, 4] on one processor, [4, 1, 1, 1] on
    another)."""
    return [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]


def batch(i: int) -> int:
    return 5 if i == 2 else 2


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def grads(*tensors: Tensor | nn.Module) -> Seen:
    """Return copies of each ``.grad``, by position."""
    leaves = [p for t in tensors for p in (t.parameters() if isinstance(t, nn.Module) else [t])]
    return {f"grad {n}": None if p.grad is None else p.grad.clone() for n, p in enumerate(leaves)}


def clear(*tensors: Tensor | nn.Module) -> None:
    for t in tensors:
        if isinstance(t, nn.Module):
            t.zero_grad()
        else:
            t.grad = None


def named(values: Iterable[Tensor | None], name: str = "result") -> Seen:
    return {f"{name} {n}": v for n, v in enumerate(values)}


def error(call: Callable[[], object]) -> str:
    """Return the type and text of the error that ``call`` raises."""
    try:
        call()
    except Exception as e:
        return f"{type(e).__name__}: {e}"
    return "no error"


def logging_hook(log: list[object], name: str, factor: float | None = None) -> Callable[[Tensor], Tensor | None]:
    def hook(grad: Tensor) -> Tensor | None:
        log.append(f"{name} {float(grad.detach().double().sum()):.17g}")
        return None if factor is None else grad * factor

    return hook


def sums(values: Sequence[Tensor | None]) -> list[tuple[float, list[int]] | None]:
    return [None if v is None else (float(v.detach().double().sum()), [*v.shape]) for v in values]


def backward_of(parameters: Callable[[], Any]) -> Callable[[Callable[..., Any]], Callable[[], Step]]:
    """Register a scenario that clears all gradients before each step and returns them after it. ``parameters()`` returns
    a module, a leaf or a tuple of these. The function takes the step's number and these. It returns the loss,
    optionally followed by further leaves, or calls ``backward()`` itself and returns None or further observations."""

    def register(forward: Callable[..., Any]) -> Callable[[], Step]:
        def make() -> Step:
            made = parameters()
            leaves = made if isinstance(made, tuple) else (made,)

            def step(i: int) -> Seen:
                clear(*leaves)
                result = forward(i, *leaves)
                if result is None or isinstance(result, dict):
                    return {**grads(*leaves), **(result or {})}
                loss, *others = result if isinstance(result, tuple) else (result,)
                loss.backward()
                return grads(*leaves, *others)

            return step

        make.__name__ = forward.__name__
        return scenario(make)

    return register
