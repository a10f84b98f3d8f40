"""Export SchNet of torch_geometric as a force field for ASE, LAMMPS and OpenMM. Needs torch_geometric and ase.

    python examples/forcefields/export_schnet_of_torch_geometric.py schnet.pt2

The model is small and has random weights. Two of its parts are replaced. Its search for neighbors needs another
library: the edges come from the simulation. Its readout counts the molecules in the data (``dim_size=None``), and
compiled code cannot have a size that depends on values: the readout here returns the energy of each atom.
"""

import sys

import torch
from ase import Atoms
from ase.data import atomic_numbers
from torch import nn
from torch_geometric.nn import SchNet

import aot_backward as ab

CUTOFF = 5.0
SYMBOLS = ["H", "C", "O"]


class GivenEdges(nn.Module):
    """An ``interaction_graph`` that returns the edges of the simulation."""

    edges: tuple[torch.Tensor, torch.Tensor]

    def forward(self, positions: torch.Tensor, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.edges


class EachAtom(nn.Module):
    """A readout that keeps the atoms apart."""

    def forward(self, energies: torch.Tensor, batch: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return energies


class Energies(nn.Module):
    """The energy of each atom, with the arguments of ``ab.forcefield``."""

    def __init__(self, net: SchNet):
        super().__init__()
        self.net = net
        self.net.interaction_graph, self.net.readout = GivenEdges(), EachAtom()
        self.register_buffer("numbers", torch.tensor([atomic_numbers[s] for s in SYMBOLS]))

    def forward(
        self, positions: torch.Tensor, species: torch.Tensor, src: torch.Tensor, dst: torch.Tensor, shift: torch.Tensor
    ) -> torch.Tensor:
        distance = (positions[dst] - positions[src] + shift).norm(dim=1)
        # Messages go from the first row to the second
        self.net.interaction_graph.edges = torch.stack([dst, src]), distance
        return self.net(self.numbers[species], positions, torch.zeros_like(species))[:, 0]


def random_model(dtype: torch.dtype = torch.float32) -> Energies:
    torch.manual_seed(0)
    return (
        Energies(SchNet(hidden_channels=32, num_filters=32, num_interactions=2, num_gaussians=20, cutoff=CUTOFF))
        .to(dtype)
        .eval()
    )


def entry(model: Energies) -> ab.Grad:
    atoms = Atoms(
        "HCOHC", [[0, 0, 0], [1.1, 0, 0], [1.8, 1.1, 0], [-0.4, 1.5, 0.8], [3.0, 0.5, 1.0]], cell=[7.0] * 3, pbc=True
    )
    return ab.forcefield(model, atoms, cutoff=CUTOFF, species=SYMBOLS, layers=2)


if __name__ == "__main__":
    (path,) = sys.argv[1:] or ["schnet.pt2"]
    ab.export(path, {"energy": entry(random_model())})
    print(f"wrote {path}")
