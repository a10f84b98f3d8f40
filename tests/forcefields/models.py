"""The models of examples/forcefields: their inputs, their results in eager PyTorch, and errors."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ase.neighborlist import primitive_neighbor_list
from torch import nn

_EXAMPLES = Path(__file__).parents[2] / "examples" / "forcefields"


def load_example(name: str) -> dict[str, Any]:
    """Return the names that an example defines. It stays importable, which ``torch.compile`` needs."""
    spec = importlib.util.spec_from_file_location(name, _EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return vars(module)


def system(atoms: int, box: float, cutoff: float, seed: int) -> tuple[torch.Tensor, ...]:
    """Return the inputs of a force field in float64: random atoms of three species in a periodic box, none closer than
    0.9."""
    rng, positions = np.random.default_rng(seed), list[Any]()
    while len(positions) < atoms:
        place = rng.uniform(0, box, 3)
        vectors = [(place - p) - box * np.round((place - p) / box) for p in positions]
        if all(np.linalg.norm(v) > 0.9 for v in vectors):
            positions.append(place)
    src, dst, images = primitive_neighbor_list("ijS", [True] * 3, np.eye(3) * box, np.array(positions), cutoff)
    own = torch.ones(atoms, dtype=torch.float64)
    own[-1] = 0
    species = torch.from_numpy(rng.integers(0, 3, atoms))
    rest = (
        torch.from_numpy(src),
        torch.from_numpy(dst),
        torch.from_numpy(images * box),
        torch.zeros(3, 3, dtype=torch.float64),
        own,
    )
    return torch.from_numpy(np.array(positions)), species, *rest


def with_dtype(inputs: tuple[torch.Tensor, ...], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    return tuple(t.to(dtype) if t.is_floating_point() else t for t in inputs)


def in_eager(program: nn.Module, inputs: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
    """Return energies, and the gradients by positions, strain and shift, in float64."""
    leaves = [t.clone().requires_grad_(i in (0, 4, 5)) for i, t in enumerate(inputs)]
    value, aux = program(*leaves)
    gradients = torch.autograd.grad(value, [leaves[0], leaves[5], leaves[4]])
    named = zip(("energies", "positions", "strain", "shift"), (aux["energies"].detach(), *gradients), strict=True)
    return {name: t.double() for name, t in named}


def errors(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return the largest error of each result, relative to its largest element."""
    return {name: float((found[name] - e).abs().max() / e.abs().max()) for name, e in exact.items()}
