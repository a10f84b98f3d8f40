"""Export a NequIP model as a force field for ASE, LAMMPS and OpenMM. Needs nequip and ase.

    python examples/forcefields/export_nequip.py nequip.pt2

The model is small and has random weights.
"""

import sys

import torch
from ase import Atoms
from nequip.model import NequIPGNNModel
from nequip.utils.global_state import set_global_state
from torch import nn

import aot_backward as ab

CUTOFF = 5.0
SYMBOLS = ["H", "C", "O"]


class Energies(nn.Module):
    """The energy of each atom, with the arguments of ``ab.forcefield``."""

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net

    def forward(
        self, positions: torch.Tensor, species: torch.Tensor, src: torch.Tensor, dst: torch.Tensor, shift: torch.Tensor
    ) -> torch.Tensor:
        graph = {
            "pos": positions,
            "edge_index": torch.stack([src, dst]),
            "atom_types": species,
            "edge_cell_shift": shift,  # in units of the cell below
            "cell": torch.eye(3, dtype=positions.dtype)[None],
            "batch": torch.zeros_like(species),
            "num_nodes": torch.tensor([1]),
        }
        return self.net(graph)["atomic_energy"][:, 0].to(positions.dtype)  # nequip adds up float32 models in float64


def random_model(dtype: torch.dtype = torch.float64) -> Energies:
    set_global_state()
    net = NequIPGNNModel(
        seed=0,
        model_dtype=str(dtype).removeprefix("torch."),
        r_max=CUTOFF,
        type_names=SYMBOLS,
        num_layers=2,
        l_max=1,
        num_features=8,
        radial_mlp_depth=1,
        radial_mlp_width=16,
        avg_num_neighbors=20.0,
        per_type_energy_scales=1.0,
        per_type_energy_shifts=0.0,
        do_derivatives=False,
    )
    return Energies(net).eval()


def entry(model: Energies) -> ab.Grad:
    atoms = Atoms(
        "HCOHC", [[0, 0, 0], [1.1, 0, 0], [1.8, 1.1, 0], [-0.4, 1.5, 0.8], [3.0, 0.5, 1.0]], cell=[7.0] * 3, pbc=True
    )
    dtype = next(p.dtype for p in model.parameters())
    return ab.forcefield(model, atoms, cutoff=CUTOFF, species=SYMBOLS, layers=2, dtype=dtype)


if __name__ == "__main__":
    (path,) = sys.argv[1:] or ["nequip.pt2"]
    ab.export(path, {"energy": entry(random_model())})
    print(f"wrote {path}")
