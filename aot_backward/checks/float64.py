"""Run eager in float64, the reference for results: widen the program's tensors, and perturb its inputs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from aot_backward_exporters import torch_api

from .example_sizes import SEED
from .tolerance import pieces


@contextlib.contextmanager
def in_float64(program: nn.Module, *, rounded: bool = False) -> Iterator[None]:
    """Replace the program's parameters and buffers by copies in float64 (``rounded``: each :func:`perturbed`), wherever
    the program refers to them. Restore them on exit, even if the copies have changed.

    The Python objects swap their tensors. Setting ``.data`` instead would make torch forget each AccumulateGrad node
    with its hooks, and would conflict with ``.grad``. Hooks on the gradients themselves run here too."""
    default = torch.get_default_dtype()
    swap, swapped = torch_api._swap_tensor_impl, list[tuple[torch.Tensor, torch.Tensor]]()
    try:
        for tensor in {id(t): t for t in [*program.parameters(), *program.buffers()]}.values():
            if tensor.is_floating_point():
                wide = tensor.detach().to(torch.float64, copy=True)
                replacement = (_perturb(wide) if rounded else wide).requires_grad_(tensor.requires_grad)
                if tensor._backward_hooks is not None:  # an empty dict may get a hook later; the copy must share it
                    replacement._backward_hooks = tensor._backward_hooks
                swap(tensor, replacement)
                swapped.append((tensor, replacement))
        torch.set_default_dtype(torch.float64)
        yield
    finally:
        torch.set_default_dtype(default)
        for tensor, replacement in swapped:
            swap(tensor, replacement)


def to_float64(value: Any) -> Any:
    """Return ``value`` with its floating-point tensors as float64 leaves."""

    def widen(v: Any) -> Any:
        return (
            v.detach().double().requires_grad_(v.requires_grad)
            if isinstance(v, torch.Tensor) and v.is_floating_point()
            else v
        )

    return pytree.tree_map(widen, value)


def perturbed(value: Any) -> Any:
    """Return ``value`` with each floating-point element changed by a random relative amount of up to float32's eps."""

    def perturb(v: Any) -> Any:
        return (
            _perturb(v.detach().clone()).requires_grad_(v.requires_grad)
            if isinstance(v, torch.Tensor) and v.is_floating_point()
            else v
        )

    return pytree.tree_map(perturb, value)


def _perturb(tensor: torch.Tensor) -> torch.Tensor:
    """Change ``tensor`` in place and return it."""
    generator = torch.Generator(tensor.device).manual_seed(SEED)
    for (piece,) in pieces(tensor):
        change = torch.rand(piece.shape, generator=generator, dtype=piece.dtype, device=piece.device).mul_(2).sub_(1)
        piece.mul_(change.mul_(torch.finfo(torch.float32).eps).add_(1))
    return tensor


def consumed_cuda_rng(device: str) -> bool:
    """Return whether a GPU has drawn random numbers since :data:`.example_sizes.SEED` was set: there float64 draws
    others than narrower types do. Set the seed again."""
    if device != "cuda":
        return False
    after = torch.cuda.get_rng_state()
    torch.manual_seed(SEED)
    return not torch.equal(after, torch.cuda.get_rng_state())
