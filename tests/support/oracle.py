"""Eager PyTorch in the same process, on the same inputs. Every numerical test compares with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

RELATIVE = {
    torch.float32: 3e-5,
    torch.float64: 1e-11,
    torch.bfloat16: 2e-2,
    torch.float16: 5e-3,
    torch.complex64: 3e-5,
    torch.complex128: 1e-11,
}


def clones(args: Any) -> Any:
    """Return copies of the arguments as new leaves."""
    return pytree.tree_map(
        lambda v: v.detach().clone().requires_grad_(v.requires_grad) if isinstance(v, torch.Tensor) else v, args
    )


def tensors(value: Any) -> list[torch.Tensor]:
    return [v for v in pytree.tree_leaves(value) if isinstance(v, torch.Tensor)]


def run(
    module: torch.nn.Module, args: tuple[Any, ...], cotangents: Sequence[torch.Tensor | None] | int, kwargs: Any = None
) -> dict[str, Any]:
    """Run forward and backward. Return outputs, every ``.grad`` and every buffer, by name.

    ``cotangents``: one incoming gradient per output that requires grad (None: that output gets none), or a seed to draw
    them with.
    """
    args = clones(args)
    for parameter in module.parameters():
        parameter.grad = None
    torch.manual_seed(3)
    value = module(*args, **(kwargs or {}))
    out: dict[str, Any] = {f"output[{i}]": t.detach().clone() for i, t in enumerate(tensors(value))}
    differentiable = [t for t in tensors(value) if t.requires_grad]
    if isinstance(cotangents, int):
        generator = torch.Generator().manual_seed(cotangents)
        cotangents = [
            torch.randn(t.shape, generator=generator, dtype=torch.complex64 if t.is_complex() else None).to(t.dtype)
            for t in differentiable
        ]
    pairs = [(t, c) for t, c in zip(differentiable, cotangents, strict=True) if c is not None]
    if pairs:
        torch.autograd.backward([t for t, _ in pairs], [c for _, c in pairs])
    out |= {f"grad of {n}": p.grad for n, p in module.named_parameters(remove_duplicate=False)}
    out |= {f"grad of input {i}": t.grad for i, t in enumerate(tensors(args))}
    out |= {f"buffer {n}": b.detach().clone() for n, b in module.named_buffers()}
    return out


def assert_same(actual: Mapping[str, Any], expected: Mapping[str, Any], relative: float | None = None) -> None:
    """Check that both have the same tensors: None in the same places, equal dtypes, shapes and strides, and values
    within the dtype's tolerance."""
    assert actual.keys() == expected.keys()
    scale = max(
        (
            float(e.norm())
            for n, e in expected.items()
            if e is not None and (e.is_floating_point() or e.is_complex()) and "grad" in n
        ),
        default=0.0,
    )
    for name, e in expected.items():
        a = actual[name]
        assert (a is None) == (e is None), f"{name}: {a is None=}, {e is None=}"
        if e is None:
            continue
        assert (a.dtype, a.shape) == (e.dtype, e.shape), name
        assert all(n <= 1 or s == t for n, s, t in zip(e.shape, a.stride(), e.stride(), strict=True)), (
            f"{name}: {a.stride()} and {e.stride()}"
        )
        if torch.equal(a, e):
            continue
        assert e.is_floating_point() or e.is_complex(), name
        tolerance = (relative or RELATIVE[e.dtype]) * max(
            float(e.norm()), (0.1 * scale if "grad" in name else 0.0), 1e-6
        )
        wide = torch.complex128 if e.is_complex() else torch.float64
        error = float((a.to(wide) - e.to(wide)).norm())
        assert error <= tolerance, f"{name}: off by {error:.3g}, allowed {tolerance:.3g}"
