"""A small message-passing potential: its packages, example atoms, and energies, forces and stress by eager PyTorch."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import torch
from ase import Atoms
from ase.neighborlist import neighbor_list
from ase.stress import full_3x3_to_voigt_6_stress
from torch import nn

import aot_backward as ab

from ..support.exports import shared

CUTOFF = 2.5
SPECIES = ["H", "He"]


class Potential(nn.Module):
    """Two layers of messages, and a repulsion of pairs."""

    def __init__(self, width: int = 8, radial: int = 6):
        super().__init__()
        self.embed = nn.Embedding(2, width)
        self.register_buffer("centers", torch.linspace(0.5, CUTOFF, radial))
        self.filters = nn.ModuleList(nn.Sequential(nn.Linear(radial, width), nn.SiLU()) for _ in range(2))
        self.updates = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.SiLU()) for _ in range(2))
        self.read = nn.Linear(width, 1)

    def forward(
        self, positions: torch.Tensor, species: torch.Tensor, src: torch.Tensor, dst: torch.Tensor, shift: torch.Tensor
    ) -> torch.Tensor:
        r = (positions[dst] - positions[src] + shift).square().sum(1).sqrt()
        fade = torch.cos(r * (torch.pi / CUTOFF)) + 1  # grows again beyond the cutoff: no adapter may pass such an edge
        radial = torch.exp(-8 * (r[:, None] - self.centers).square())
        h = self.embed(species)
        for filters, update in zip(self.filters, self.updates, strict=True):
            h = h + update(torch.zeros_like(h).index_add(0, src, h[dst] * filters(radial) * fade[:, None]))
        repulsion = torch.zeros_like(h[:, 0]).index_add(0, src, fade * torch.exp(-5 * (r - 1)))
        return 0.1 * self.read(h)[:, 0] + 0.25 * repulsion


def model(dtype: torch.dtype = torch.float64, seed: int = 0) -> Potential:
    torch.manual_seed(seed)
    return Potential().to(dtype).eval()


def crystal(side: int = 3, spacing: float = 1.6, seed: int = 0) -> Atoms:
    rng = np.random.default_rng(seed)
    sites = np.stack(np.meshgrid(*[np.arange(side)] * 3, indexing="ij"), -1).reshape(-1, 3) * spacing
    symbols = ["H", "He", *rng.choice(["H", "He"], side**3 - 2)]
    return Atoms(symbols, sites + 0.05 * rng.standard_normal(sites.shape), cell=[side * spacing] * 3, pbc=True)


def package() -> Path:
    """Return a package with the model in float64 ("double") and float32 ("single"), without metadata ("bare") and in
    other units ("units")."""

    def make(path: Path) -> None:
        double, single = (
            ab.forcefield(model(dtype), crystal(), cutoff=CUTOFF, species=SPECIES, layers=2)
            for dtype in (torch.float64, torch.float32)
        )
        units = dict(double.metadata or {}) | {"energy": "kcal/mol", "length": "Bohr"}
        entries = {"double": double, "single": single, "bare": dataclasses.replace(double, metadata=None)}
        ab.export(path, entries | {"units": dataclasses.replace(double, metadata=units)}, runtime="standalone")

    return shared("potential", make)


def other_package() -> Path:
    """Return a package with another model's sole entry."""
    return shared(
        "potential-other",
        lambda path: ab.export(
            path, {"double": ab.forcefield(model(seed=1), crystal(), cutoff=CUTOFF, species=SPECIES, layers=2)}
        ),
    )


def unlike_package() -> Path:
    """Return a package with entries that are not force fields."""

    def make(path: Path) -> None:
        x = ab.Variant((torch.ones(3),))
        twice = ab.Function(lambda x: 2 * x, [x])
        ab.export(path, {"norm": ab.Grad(lambda x: x.square().sum(), [x]), "double": twice, "value": twice})

    return shared("no-potential", make)


def eager(atoms: Atoms, net: Potential) -> tuple[float, np.ndarray, np.ndarray, np.ndarray | None]:
    """Return the energy, the energies, the forces and the stress (in Voigt's order) by eager PyTorch."""
    src, dst, images = neighbor_list("ijS", atoms, CUTOFF)
    dtype = net.read.weight.dtype
    strain = torch.zeros(3, 3, dtype=dtype, requires_grad=True)
    positions = torch.from_numpy(atoms.positions).to(dtype).requires_grad_()
    deformation = torch.eye(3, dtype=dtype) + (strain + strain.T) / 2
    species = torch.tensor([["H", "He"].index(s) for s in atoms.symbols])
    shift = torch.from_numpy(images @ atoms.cell.array).to(dtype)
    energies = net(positions @ deformation, species, torch.from_numpy(src), torch.from_numpy(dst), shift @ deformation)
    by_positions, by_strain = torch.autograd.grad(energies.sum(), [positions, strain], materialize_grads=True)
    stress = full_3x3_to_voigt_6_stress(by_strain.numpy() / atoms.get_volume()) if atoms.cell.rank == 3 else None
    return energies.sum().item(), energies.detach().numpy(), -by_positions.numpy(), stress
