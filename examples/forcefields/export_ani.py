"""Export an ANI model of TorchANI: energy and forces of molecules. Needs torchani.

    python examples/forcefields/export_ani.py ani.pt2

The model has ANI's architecture and random weights. It has terms of three atoms, and one network for each element, and
TorchANI lists both by values. Compiled code cannot have a size that depends on values, so the program that calls it
makes these lists (``lists``, with NumPy). Therefore ANI is not an ``ab.forcefield``.
"""

import sys

import numpy as np
import torch
import torchani
from torch import nn

import aot_backward as ab

SYMBOLS = ("H", "C", "O")


def random_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    options = {"self_energies": "zero", "repulsion": False, "strategy": "pyaev", "neighborlist": "all_pairs"}
    model: nn.Module = torchani.arch.simple_ani(SYMBOLS, lot="wb97x-631gd", **options)
    return model.to(dtype).eval()


class Energy(nn.Module):
    """The energy of a molecule, by TorchANI's own terms and networks, with the lists of :func:`lists`."""

    def __init__(self, model: nn.Module):
        super().__init__()
        potential = model.potentials["nnp"]
        self.terms = potential.aev_computer
        self.networks = nn.ModuleList(potential.neural_networks.atomics[s] for s in SYMBOLS)

    def forward(
        self,
        positions: torch.Tensor,
        species: torch.Tensor,
        pairs: torch.Tensor,
        close: torch.Tensor,
        central: torch.Tensor,
        sides: torch.Tensor,
        signs: torch.Tensor,
        hydrogen: torch.Tensor,
        carbon: torch.Tensor,
        oxygen: torch.Tensor,
    ) -> torch.Tensor:
        elements = species[None]
        distances = (positions[pairs[0]] - positions[pairs[1]]).norm(dim=-1)
        radial = self.terms._collect_radial(elements, pairs, self.terms.radial(distances))
        vectors = (positions[close[0]] - positions[close[1]])[sides.reshape(-1)].reshape(2, -1, 3) * signs[..., None]
        angular = self.terms._collect_angular(
            elements, close, central, sides, signs, self.terms.angular(vectors.norm(dim=-1), vectors)
        )
        features = torch.cat([radial, angular], -1)[0]
        energies = [
            network(features[atoms]).sum()
            for network, atoms in zip(self.networks, (hydrogen, carbon, oxygen), strict=True)
        ]
        return torch.stack(energies).sum()


def lists(positions: np.ndarray, species: np.ndarray, radial: float, angular: float) -> tuple[np.ndarray, ...]:
    """Return the arguments of :class:`Energy` after ``positions``: ``species`` (n,), numbers in ``SYMBOLS``; ``pairs``
    (2, p) within the cutoff ``radial``; ``close`` (2, q) within ``angular``; for each two close pairs that share an
    atom, that atom ``central`` (t,), the pairs ``sides`` (2, t), and ``signs`` (2, t): 1 if the atom is the pair's
    first, else -1; the atoms of each element."""
    first, second = np.triu_indices(len(positions), 1)
    distances = np.linalg.norm(positions[first] - positions[second], axis=1)
    pairs = np.stack([first, second])[:, distances <= radial]
    close = np.stack([first, second])[:, distances <= angular]
    triples = []
    for atom in range(len(positions)):
        own = np.flatnonzero((close == atom).any(0))
        one, other = np.triu_indices(len(own), 1)
        triples.append(np.stack([np.full(len(one), atom), own[one], own[other]]))
    central, *sides = np.concatenate(triples, axis=1)
    signs = np.where(close[0][np.stack(sides)] == central, 1, -1).astype(positions.dtype)
    return (
        species,
        pairs,
        close,
        central,
        np.stack(sides),
        signs,
        *(np.flatnonzero(species == i) for i in range(len(SYMBOLS))),
    )


def cutoffs(model: nn.Module) -> tuple[float, float]:
    terms = model.potentials["nnp"].aev_computer  # type: ignore[union-attr,index]
    return float(terms.radial.cutoff), float(terms.angular.cutoff)


def entry(model: nn.Module) -> ab.Grad:
    dtype = next(model.parameters()).dtype
    positions = np.array([[0, 0, 0], [1.1, 0, 0], [1.8, 1.1, 0], [-0.4, 1.5, 0.8], [3.0, 0.5, 1.0], [1.2, -1.4, 0.5]])
    species = np.array([0, 1, 2, 0, 1, 2])
    arguments = [torch.from_numpy(a) for a in (positions, *lists(positions, species, *cutoffs(model)))]
    example = tuple(a.to(dtype) if a.is_floating_point() else a for a in arguments)
    atoms, pairs, close, triples = (
        torch.export.Dim(name, min=low) for name, low in (("atoms", 2), ("pairs", 0), ("close", 0), ("triples", 0))
    )
    elements = [{0: torch.export.Dim(f"count{i}", min=0)} for i in range(len(SYMBOLS))]
    shapes = ({0: atoms}, {0: atoms}, {1: pairs}, {1: close}, {0: triples}, {1: triples}, {1: triples}, *elements)
    facts = {
        "species": list(SYMBOLS),
        "radial": cutoffs(model)[0],
        "angular": cutoffs(model)[1],
        "energy": "Ha",
        "length": "Ang",
    }
    return ab.Grad(Energy(model), [ab.Variant(example, dynamic_shapes=shapes)], wrt="positions", metadata=facts)


if __name__ == "__main__":
    (path,) = sys.argv[1:] or ["ani.pt2"]
    ab.export(path, {"energy": entry(random_model())})
    print(f"wrote {path}")
