"""Force matching, first half: export a training step whose loss has energies and forces, for any number of structures,
atoms and edges.

    python examples/forcefields/force_matching.py fit.pt2
    python examples/forcefields/force_matching_train.py fit.pt2 trained.safetensors

One native call computes energies, forces, the loss and its gradient through the forces (second derivatives), clips the
gradient, and updates the parameters (AdamW) and their averages. The second program imports no PyTorch.
"""

import sys

import torch
from torch import nn

import aot_backward as ab

CUTOFF = 4.0
FORCE_WEIGHT = 10.0


class Potential(nn.Module):
    """The energy of each atom, by two layers of messages between neighbors: the signature of ``ab.forcefield``."""

    def __init__(self, species: int = 2, width: int = 16, radial: int = 8):
        super().__init__()
        self.embed = nn.Embedding(species, width)
        self.filters = nn.ModuleList(
            nn.Sequential(nn.Linear(radial, width), nn.SiLU(), nn.Linear(width, width)) for _ in range(2)
        )
        self.updates = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width)) for _ in range(2)
        )
        self.read = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1))
        self.register_buffer("centers", torch.linspace(0.5, CUTOFF, radial))

    def forward(
        self, positions: torch.Tensor, species: torch.Tensor, src: torch.Tensor, dst: torch.Tensor, shift: torch.Tensor
    ) -> torch.Tensor:
        distance = (positions[dst] - positions[src] + shift).square().sum(1).sqrt()
        fade = torch.where(distance < CUTOFF, torch.cos(distance * (torch.pi / (2 * CUTOFF))).square(), 0.0)
        radial = torch.exp(-4 * (distance[:, None] - self.centers).square())
        h = self.embed(species)
        for filters, update in zip(self.filters, self.updates, strict=True):
            h = h + update(torch.zeros_like(h).index_add(0, src, h[dst] * filters(radial) * fade[:, None]))
        return self.read(h)[:, 0]


class Matching(nn.Module):
    """The loss of several structures: squared errors of the energy of an atom, and of forces."""

    def __init__(self, potential: nn.Module):
        super().__init__()
        self.potential = potential

    def forward(
        self,
        positions: torch.Tensor,
        species: torch.Tensor,
        src: torch.Tensor,
        dst: torch.Tensor,
        shift: torch.Tensor,
        structure: torch.Tensor,
        energy: torch.Tensor,
        forces: torch.Tensor,
    ) -> torch.Tensor:
        """``structure`` (atoms,): the structure of each atom, a place in ``energy`` (structures,). ``forces``: (atoms,
        3)."""
        positions = positions.detach().requires_grad_()
        each = self.potential(positions, species, src, dst, shift)
        predicted = torch.zeros_like(energy).index_add(0, structure, each)
        (gradient,) = torch.autograd.grad(predicted.sum(), positions, create_graph=True)
        atoms = torch.zeros_like(energy).index_add(0, structure, torch.ones_like(each))
        per_atom = (predicted - energy) / atoms.clamp(min=1)  # export also tries a structure without atoms
        return per_atom.square().mean() + FORCE_WEIGHT * (gradient + forces).square().mean()


def optimizer_of(matching: Matching) -> torch.optim.Optimizer:
    return torch.optim.AdamW(matching.parameters(), lr=3e-3, weight_decay=1e-5)


def matching(dtype: torch.dtype = torch.float32) -> Matching:
    torch.manual_seed(0)
    return Matching(Potential().to(dtype))


def entries(dtype: torch.dtype = torch.float32) -> dict[str, ab.Step]:
    module, pairs = matching(dtype), torch.tensor([[0, 0, 1, 1, 2, 2, 3, 4], [1, 2, 0, 2, 0, 1, 4, 3]])
    positions = torch.tensor([[0, 0, 0], [1.5, 0, 0], [0, 1.4, 0.3], [0, 0, 0], [0, 1.2, 1.1]], dtype=dtype)
    kinds, structure = torch.tensor([0, 1, 0, 1, 1]), torch.tensor([0, 0, 0, 1, 1])
    example = (
        positions,
        kinds,
        *pairs,
        torch.zeros(8, 3, dtype=dtype),
        structure,
        torch.zeros(2, dtype=dtype),
        torch.zeros(5, 3, dtype=dtype),
    )
    structures, atoms, edges = ({0: torch.export.Dim(name, min=1)} for name in ("structures", "atoms", "edges"))
    variant = ab.Variant(
        example, dynamic_shapes=(atoms, atoms, edges, edges, edges, atoms, structures, atoms), mode="train"
    )
    return {"fit": ab.Step(module, [variant], optimizer_of(module), clip_norm=10.0, ema=0.99)}


if __name__ == "__main__":
    (path,) = sys.argv[1:] or ["fit.pt2"]
    ab.export(path, entries(), runtime="standalone")
    print(f"wrote {path}")
