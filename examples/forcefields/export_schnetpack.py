"""Export SchNet or PaiNN of SchNetPack as a force field for ASE, LAMMPS and OpenMM. Needs schnetpack and ase.

    python examples/forcefields/export_schnetpack.py schnet.pt2
    python examples/forcefields/export_schnetpack.py painn.pt2 PaiNN

The models are small and have random weights.
"""

import sys
from typing import TypeVar

import torch
import torch.utils.data.dataloader
from ase import Atoms
from ase.data import atomic_numbers
from torch import nn

if not hasattr(torch.utils.data.dataloader, "T_co"):  # schnetpack 2.1 imports it; torch 2.13 does not have it
    torch.utils.data.dataloader.T_co = TypeVar("T_co", covariant=True)  # type: ignore[attr-defined]

import schnetpack.atomistic
import schnetpack.nn
import schnetpack.representation

import aot_backward as ab

CUTOFF = 5.0
SYMBOLS = ["H", "C", "O"]


class Energies(nn.Module):
    """The energy of each atom, with the arguments of ``ab.forcefield``."""

    def __init__(self, representation: nn.Module, output: nn.Module):
        super().__init__()
        self.representation, self.output = representation, output
        self.register_buffer("numbers", torch.tensor([atomic_numbers[s] for s in SYMBOLS]))

    def forward(
        self, positions: torch.Tensor, species: torch.Tensor, src: torch.Tensor, dst: torch.Tensor, shift: torch.Tensor
    ) -> torch.Tensor:
        vectors = positions[dst] - positions[src] + shift
        graph = {
            "_atomic_numbers": self.numbers[species],
            "_Rij": vectors,
            "_idx_i": src,
            "_idx_j": dst,
            "_positions": positions,
        }
        return self.output.outnet(self.representation(graph)["scalar_representation"])[:, 0]


def random_model(dtype: torch.dtype = torch.float32, kind: str = "SchNet") -> Energies:
    torch.manual_seed(0)
    radial, cutoff = schnetpack.nn.GaussianRBF(20, CUTOFF), schnetpack.nn.CosineCutoff(CUTOFF)
    representation = getattr(schnetpack.representation, kind)(
        n_atom_basis=32, n_interactions=2, radial_basis=radial, cutoff_fn=cutoff
    )
    return Energies(representation, schnetpack.atomistic.Atomwise(n_in=32, output_key="energy")).to(dtype).eval()


def entry(model: Energies) -> ab.Grad:
    atoms = Atoms(
        "HCOHC", [[0, 0, 0], [1.1, 0, 0], [1.8, 1.1, 0], [-0.4, 1.5, 0.8], [3.0, 0.5, 1.0]], cell=[7.0] * 3, pbc=True
    )
    return ab.forcefield(model, atoms, cutoff=CUTOFF, species=SYMBOLS, layers=2)


if __name__ == "__main__":
    path, *kind = sys.argv[1:] or ["schnet.pt2"]
    ab.export(path, {"energy": entry(random_model(torch.float32, *kind))})
    print(f"wrote {path}")
