"""Export an interatomic potential so that simulation programs can run it: ``ab.forcefield``
(``docs/how-to/hosts.md``)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from aot_backward_runtime.errors import ExportError

from .capture.program_module import FunctionModule
from .entries import Grad, Variant

if TYPE_CHECKING:
    from ase import Atoms

ENERGIES = ("eV", "Ha", "kcal/mol", "kJ/mol")
LENGTHS = {"Ang": 1.0, "nm": 10.0, "Bohr": 0.529177210544}
"""In Ångström; CODATA 2022."""
_MOST_LAYERS = 8  # edges of the chain that counts message passing layers


def forcefield(
    energies: Callable[..., torch.Tensor],
    atoms: Atoms,
    *,
    cutoff: float,
    species: Sequence[str],
    energy: str = "eV",
    length: str = "Ang",
    layers: int = 1,
    dtype: torch.dtype | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Grad:
    """Return an entry that ASE, OpenMM and LAMMPS run as a force field: energy, forces and virial for any number of
    atoms and edges.

    The edges are all pairs of atoms within the cutoff, in both directions, also with periodic images. Atom ``src[k]``
    sees atom ``dst[k]`` at ``positions[dst[k]] + shift[k]``. The energy must depend on positions only through these
    vectors.

    Args:
        energies: A function or a module, ``energies(positions, species, src, dst, shift)``. It returns the energy of
            each atom, ``(n,)``, for ``positions`` ``(n, 3)``, ``species`` ``(n,)`` (int64, numbers in the list
            ``species``), ``src`` and ``dst`` ``(e,)`` (int64) and ``shift`` ``(e, 3)``. The modules that a function
            calls are variables of its closure or globals.
        atoms: An example: at least two atoms with neighbors. Sizes and species of later calls may differ.
        cutoff: The largest distance of neighbors, in units of ``length``. The energy must not depend on atoms farther
            away.
        species: The chemical symbols in the order of the model's numbers: ``species[0]`` is the model's species 0.
        energy: The unit of the energies: "eV", "Ha", "kcal/mol" or "kJ/mol".
        length: The unit of positions and cutoff: "Ang", "nm" or "Bohr".
        layers: How many cutoffs away an atom's energy depends on others: the number of message passing layers, 1
            without messages. It is an error if the energy of a chain of atoms shows more.
        dtype: The dtype of positions. By default, that of the model's parameters, else float64.
        metadata: Further metadata of the entry, such as a name or a reference.

    Returns:
        The entry, for :func:`export`. Its inputs are ``positions``, ``species``, ``src``, ``dst``, ``shift``,
        ``strain`` ``(3, 3)`` and ``own`` ``(n,)``. Its value is the energy of the atoms with ``own`` 1, and
        ``{"energies": (n,)}``. Its gradients are by ``positions``, ``strain`` and ``shift``.

    Raises:
        ExportError: An argument is wrong, or the function does not follow the convention.

    Examples:
        >>> from ase.build import bulk
        >>> def pairs(positions, species, src, dst, shift):
        ...     r = (positions[dst] - positions[src] + shift).norm(dim=1)
        ...     each = torch.where(r < 4.0, (4.0 - r) ** 3, 0.0)
        ...     return torch.zeros_like(positions[:, 0]).index_add(0, src, each)
        >>> entry = ab.forcefield(pairs, bulk("Cu", cubic=True), cutoff=4.0, species=["Cu"])
        >>> path = ab.export("copper.pt2", {"copper": entry})
    """
    if energy not in ENERGIES:
        raise ExportError(
            f"energy: expected one of {', '.join(ENERGIES)}, got {energy!r}. Convert the energies to one of them."
        )
    if length not in LENGTHS:
        raise ExportError(
            f"length: expected one of {', '.join(LENGTHS)}, got {length!r}. Convert the positions to one of them."
        )
    if not cutoff > 0:
        raise ExportError(
            f"cutoff: expected a positive length, got {cutoff!r}. Give the largest distance of neighbors."
        )
    program = _ForceField(energies)
    own_metadata = dict(metadata or {})
    example = _example(atoms, cutoff, species, LENGTHS[length], dtype or _dtype_of(program))
    _check_convention(program, example)
    measured = _measured_layers(program, example, cutoff)
    if measured > layers:
        raise ExportError(
            f"layers: expected at least {measured}, got {layers}. An atom's energy depends on atoms {measured} edges away, so give a larger number."
        )
    _check_ends(program, example, cutoff, layers)
    _warn_of_a_jump(program, example, cutoff)
    facts = {
        "forcefield": 1,
        "cutoff": float(cutoff),
        "species": list(species),
        "energy": energy,
        "length": length,
        "layers": layers,
    }
    if clash := sorted(facts.keys() & own_metadata.keys()):
        raise ExportError(f"metadata: expected names other than {', '.join(facts)}, got {clash[0]!r}. Rename it.")
    count, edges = {0: torch.export.Dim("atoms", min=1)}, {0: torch.export.Dim("edges", min=0)}
    variant = Variant(example, dynamic_shapes=(count, count, edges, edges, edges, None, count))
    return Grad(program, [variant], wrt=["positions", "strain", "shift"], has_aux=True, metadata=facts | own_metadata)


class _ForceField(nn.Module):
    """The convention around the caller's function: strain and ownership of atoms."""

    def __init__(self, energies: Callable[..., torch.Tensor]):
        super().__init__()
        self.energies = energies if isinstance(energies, nn.Module) else FunctionModule(energies)
        self.training = isinstance(energies, nn.Module) and energies.training

    def forward(
        self,
        positions: torch.Tensor,
        species: torch.Tensor,
        src: torch.Tensor,
        dst: torch.Tensor,
        shift: torch.Tensor,
        strain: torch.Tensor,
        own: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        symmetric = (strain + strain.T) / 2
        each = self.energies(positions + positions @ symmetric, species, src, dst, shift + shift @ symmetric)
        if not isinstance(each, torch.Tensor) or each.shape != own.shape:
            got = tuple(each.shape) if isinstance(each, torch.Tensor) else type(each).__name__
            raise ExportError(
                f"energies: expected a tensor of shape {tuple(own.shape)}, one energy an atom, got {got}. Return one for each atom."
            )
        each = each * own
        return each.sum(), {"energies": each}


def _dtype_of(program: nn.Module) -> torch.dtype:
    return next((p.dtype for p in program.parameters() if p.is_floating_point()), torch.float64)


def _example(
    atoms: Atoms, cutoff: float, species: Sequence[str], length: float, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """Return the inputs of the entry for ``atoms``; ``length``: the model's unit in Ångström."""
    from ase.neighborlist import neighbor_list

    names = list(species)
    if unknown := sorted(set(atoms.symbols) - set(names)):
        raise ExportError(
            f"atoms: expected the species {', '.join(names)}, got {unknown[0]}. Add it to species, or give another example."
        )
    if twice := sorted({s for s in names if names.count(s) > 1}):
        raise ExportError(f"species: expected each symbol once, got {twice[0]} twice. Remove one.")
    src, dst, images = neighbor_list("ijS", atoms, cutoff * length)
    if len(atoms) < 2 or len(src) < 2:
        raise ExportError(
            f"atoms: expected at least two atoms with neighbors within {cutoff}, got {len(atoms)} atoms and {len(src)} edges. Give a larger example."
        )
    positions = torch.from_numpy(atoms.positions / length)
    kinds = torch.tensor([names.index(s) for s in atoms.symbols])
    shift = torch.from_numpy(images @ atoms.cell.array / length)
    return (
        positions.to(dtype), kinds, torch.from_numpy(src), torch.from_numpy(dst), shift.to(dtype), torch.zeros(3, 3, dtype=dtype),
        torch.ones(len(atoms), dtype=dtype),
    )  # fmt: skip


def _check_convention(program: _ForceField, example: tuple[torch.Tensor, ...]) -> None:
    """Raise :class:`ExportError` if the energies change when an atom moves to another periodic image, and its edges
    with it."""
    positions, species, src, dst, shift, *rest = example
    lattice = torch.tensor([3.0, -5.0, 7.0], dtype=positions.dtype)
    first = src[:1]
    moved = positions + (torch.arange(len(positions)) == first)[:, None] * lattice
    shifted = shift + ((src == first).to(shift) - (dst == first).to(shift))[:, None] * lattice
    before = program(*example)[1]["energies"].detach()
    after = program(moved, species, src, dst, shifted, *rest)[1]["energies"].detach()
    if not torch.allclose(before, after, rtol=1e-3, atol=1e-3 * float(before.abs().max()), equal_nan=True):
        raise ExportError(
            "energies: expected the same energies when an atom moves to another periodic image, got others. "
            "Use positions only as positions[dst] - positions[src] + shift."
        )


def _warn_of_a_jump(program: _ForceField, example: tuple[torch.Tensor, ...], cutoff: float) -> None:
    """Warn if the energy of a pair of atoms does not end at the cutoff."""
    positions, species, src, dst, *_ = example
    pair = torch.stack([species[src[0]], species[dst[0]]])

    def value(distance: float, edges: int) -> float:
        ends = torch.arange(2)[:edges]
        inputs = (
            positions.new_tensor([[0.0, 0.0, 0.0], [distance, 0.0, 0.0]]),
            pair,
            ends,
            1 - ends,
            positions.new_zeros(edges, 3),
        )
        return program(*inputs, positions.new_zeros(3, 3), positions.new_ones(2))[0].item()

    alone = value(cutoff, 0)
    jump, scale = abs(value(cutoff * (1 - 1e-5), 2) - alone), abs(value(cutoff / 2, 2) - alone)
    if jump > 1e-2 * scale:
        warnings.warn(
            f"cutoff: expected energies that are continuous at {cutoff:g}, got a jump of {jump:.2g} for two atoms. Give the cutoff of the model.",
            stacklevel=3,
        )


def _chain(example: tuple[torch.Tensor, ...], cutoff: float) -> tuple[torch.Tensor, ...]:
    """Return inputs for a zigzag of atoms, each with an edge to the next and back."""
    positions, species, *_ = example
    number = torch.arange(_MOST_LAYERS + 1)
    zigzag = torch.stack([0.5 * number, 0.2 * (number % 2), 0.1 * (number % 2)], 1) * cutoff
    src, dst = torch.cat([number[:-1], number[1:]]), torch.cat([number[1:], number[:-1]])
    rest = positions.new_zeros(len(src), 3), positions.new_zeros(3, 3), positions.new_ones(len(number))
    return (zigzag.to(positions), species[number % len(species)], src, dst, *rest)


def _check_ends(program: _ForceField, example: tuple[torch.Tensor, ...], cutoff: float, layers: int) -> None:
    """Raise :class:`ExportError` if an atom's energy needs other edges than those that begin at atoms less than
    ``layers`` edges away. LAMMPS passes only these on several ranks."""
    positions, species, src, dst, shift, *rest = _chain(example, cutoff)
    kept = src < layers
    whole = program(positions, species, src, dst, shift, *rest)[1]["energies"][0].detach()
    part = program(positions, species, src[kept], dst[kept], shift[kept], *rest)[1]["energies"][0].detach()
    if not torch.allclose(whole, part, rtol=1e-4, atol=1e-6 * float(whole.abs())):
        raise ExportError(
            "energies: expected atoms that collect from the edges where they are src, got atoms that collect where they are dst. "
            "Give the model dst in place of src, src in place of dst, and -shift."
        )


def _measured_layers(program: _ForceField, example: tuple[torch.Tensor, ...], cutoff: float) -> int:
    """Return how many edges away the energy of the first atom of a chain depends on others, at most
    ``_MOST_LAYERS``."""
    positions, species, src, dst, *rest = _chain(example, cutoff)
    positions.requires_grad_()
    first = program(positions, species, src, dst, *rest)[1]["energies"][0]
    if not first.requires_grad:
        raise ExportError(
            "energies: expected energies that depend on positions, got constants. Compute them from positions without detach()."
        )
    (gradient,) = torch.autograd.grad(first, positions)
    return max(1, *gradient.abs().sum(1).nonzero().flatten().tolist())
