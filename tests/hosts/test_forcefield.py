"""``ab.forcefield``: what it puts into an entry, and what it refuses. The packages themselves are tested by the tests
of the adapters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ase import Atoms
from ase.build import bulk, molecule
from torch import nn

import aot_backward as ab

from .potential import CUTOFF, SPECIES, Potential, crystal, model


def pairs(
    positions: torch.Tensor, species: torch.Tensor, src: torch.Tensor, dst: torch.Tensor, shift: torch.Tensor
) -> torch.Tensor:
    r = (positions[dst] - positions[src] + shift).norm(dim=1)
    return torch.zeros_like(positions[:, 0]).index_add(0, src, (CUTOFF - r) ** 2)


def without_shift(
    positions: torch.Tensor, species: torch.Tensor, src: torch.Tensor, dst: torch.Tensor, shift: torch.Tensor
) -> torch.Tensor:
    return pairs(positions, species, src, dst, 0 * shift)


def from_the_other_end(
    positions: torch.Tensor, species: torch.Tensor, src: torch.Tensor, dst: torch.Tensor, shift: torch.Tensor
) -> torch.Tensor:
    return pairs(positions, species, src, dst, -shift)


def collected_at_dst(
    positions: torch.Tensor, species: torch.Tensor, src: torch.Tensor, dst: torch.Tensor, shift: torch.Tensor
) -> torch.Tensor:
    r = (positions[dst] - positions[src] + shift).norm(dim=1)
    return torch.zeros_like(positions[:, 0]).index_add(0, dst, (CUTOFF - r) ** 2)


def truncated(
    positions: torch.Tensor, species: torch.Tensor, src: torch.Tensor, dst: torch.Tensor, shift: torch.Tensor
) -> torch.Tensor:
    r = (positions[dst] - positions[src] + shift).norm(dim=1)
    return torch.zeros_like(positions[:, 0]).index_add(0, src, 1 / r)


def test_the_entry() -> None:
    entry = ab.forcefield(
        pairs, molecule("CH3CH2OH"), cutoff=CUTOFF, species=["O", "C", "H"], metadata={"name": "test"}
    )
    facts = {"forcefield": 1, "cutoff": 2.5, "species": ["O", "C", "H"], "energy": "eV", "length": "Ang", "layers": 1}
    assert entry.metadata == facts | {"name": "test"}
    assert entry.wrt == ["positions", "strain", "shift"] and entry.has_aux
    (variant,) = entry.variants
    _, species, src, dst, shift, strain, own = variant.args
    assert species.tolist() == [1, 1, 0, *[2] * 6] and species.dtype == src.dtype == dst.dtype == torch.int64
    assert (
        len(src) == len(dst) == len(shift)
        and torch.equal(strain, torch.zeros(3, 3).double())
        and torch.equal(own, torch.ones(9).double())
    )


def test_species_and_units_and_dtype_by_default_and_as_told() -> None:
    atoms = molecule("CH3CH2OH")
    symbols = ["H", "C", "O"]
    assert ab.forcefield(pairs, atoms, cutoff=CUTOFF, species=symbols).variants[0].args[0].dtype == torch.float64
    assert (
        ab.forcefield(model(torch.float32), crystal(), cutoff=CUTOFF, species=SPECIES, layers=2)
        .variants[0]
        .args[0]
        .dtype
        == torch.float32
    )
    in_nm = (
        ab.forcefield(pairs, atoms, cutoff=CUTOFF, species=symbols, length="nm", dtype=torch.float32).variants[0].args
    )
    torch.testing.assert_close(in_nm[0], torch.from_numpy(atoms.positions / 10).float())
    assert len(in_nm[2]) == 9 * 8  # all pairs are within 2.5 nm


def test_value_and_ownership() -> None:
    entry = ab.forcefield(model(), crystal(), cutoff=CUTOFF, species=SPECIES, layers=2)
    *inputs, own = entry.variants[0].args
    energy, aux = entry.fn(*inputs, own)
    each = model()(*inputs[:5])
    torch.testing.assert_close(aux, {"energies": each})
    torch.testing.assert_close(energy, each.sum())
    own[3:] = 0
    torch.testing.assert_close(entry.fn(*inputs, own)[0], each[:3].sum())


class Layers(Potential):
    """Passes messages ``count`` times."""

    def __init__(self, count: int):
        super().__init__()
        self.filters, self.updates = nn.ModuleList([self.filters[0]] * count), nn.ModuleList([self.updates[0]] * count)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_too_few_layers_are_refused(count: int) -> None:
    net = Layers(count).double().eval()
    entry = ab.forcefield(net, crystal(), cutoff=CUTOFF, species=SPECIES, layers=max(1, count))
    assert (entry.metadata or {})["layers"] == max(1, count)
    if count > 1:
        with pytest.raises(ab.ExportError, match=f"layers: expected at least {count}, got {count - 1}"):
            ab.forcefield(net, crystal(), cutoff=CUTOFF, species=SPECIES, layers=count - 1)


def test_a_jump_at_the_cutoff_warns() -> None:
    with pytest.warns(
        UserWarning, match=r"cutoff: expected energies that are continuous at 2.5, got a jump of 0.8 for two atoms"
    ):
        ab.forcefield(truncated, crystal(), cutoff=CUTOFF, species=SPECIES)


@pytest.mark.parametrize(
    ("energies", "atoms", "options", "words"),
    [
        (pairs, crystal(), {"energy": "Rydberg"}, "energy: expected one of eV, Ha, kcal/mol, kJ/mol, got 'Rydberg'"),
        (pairs, crystal(), {"length": "m"}, "length: expected one of Ang, nm, Bohr, got 'm'"),
        (pairs, crystal(), {"cutoff": 0.0}, "cutoff: expected a positive length, got 0.0"),
        (pairs, crystal(), {"species": ["H"]}, "atoms: expected the species H, got He"),
        (pairs, crystal(), {"species": ["H", "He", "H"]}, "species: expected each symbol once, got H twice"),
        (
            pairs,
            crystal(),
            {"metadata": {"cutoff": 3.0}},
            "metadata: expected names other than forcefield, cutoff, .*, got 'cutoff'",
        ),
        (
            pairs,
            Atoms("H"),
            {},
            "atoms: expected at least two atoms with neighbors within 2.5, got 1 atoms and 0 edges",
        ),
        (pairs, bulk("He", "sc", a=1.6), {}, "got 1 atoms and 18 edges"),
        (pairs, Atoms("H2", positions=[[0, 0, 0], [0, 0, 9]]), {}, "got 2 atoms and 0 edges"),
        (model(), crystal(), {}, "layers: expected at least 2, got 1"),
        (Layers(9).double(), crystal(), {"layers": 7}, "layers: expected at least 8, got 7"),
        (
            collected_at_dst,
            crystal(),
            {},
            r"got atoms that collect where they are dst\. Give the model dst in place of src",
        ),
        (without_shift, crystal(), {}, "expected the same energies when an atom moves to another periodic image"),
        (from_the_other_end, crystal(), {}, "expected the same energies when an atom moves to another periodic image"),
        (
            lambda *inputs: pairs(*inputs).sum(),
            crystal(),
            {},
            r"energies: expected a tensor of shape \(27,\), one energy an atom, got \(\)",
        ),
        (lambda *inputs: pairs(*inputs)[:, None], crystal(), {}, r"got \(27, 1\)"),
        (lambda *inputs: [pairs(*inputs)], crystal(), {}, "got list"),
        (
            lambda *inputs: pairs(*inputs).detach(),
            crystal(),
            {},
            "energies: expected energies that depend on positions, got constants",
        ),
    ],
)
def test_wrong_arguments_are_named(
    energies: Callable[..., Any], atoms: Atoms, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ab.ExportError, match=words):
        ab.forcefield(energies, atoms, **{"cutoff": CUTOFF, "species": SPECIES, **options})
