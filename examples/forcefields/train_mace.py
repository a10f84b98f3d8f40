"""Train a MACE model on energies, forces and stresses, by one compiled step. Needs mace-torch and ase.

    python examples/forcefields/train_mace.py data.xyz trained.model
    python examples/forcefields/train_mace.py data.xyz trained.model my.model --epochs 50

``data.xyz`` holds structures in extended XYZ, with energies, forces and perhaps stresses (eV and Å). Training starts
from ``my.model``, a file that ``mace_run_train`` wrote, or else from a small model for H, C and O with random weights.
``trained.model`` is a model of MACE again: export_mace.py takes it.
"""

import argparse
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

import ase.io
import numpy as np
import torch
from ase import Atoms
from ase.neighborlist import primitive_neighbor_list
from export_mace import Energies, load_model, random_model, without_torchscript
from torch import nn

import aot_backward as ab
import aot_backward_runtime

FORCES, STRESS = 100.0, 1.0
"""Weights of the squared errors in the loss, as in ``mace_run_train``. The energy of an atom has the weight 1."""


class Matching(nn.Module):
    """The loss of a batch of structures, which are one graph."""

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
        stress: torch.Tensor,
        per_volume: torch.Tensor,
    ) -> torch.Tensor:
        """``structure`` (atoms,): the structure of each atom, a place in ``energy`` (structures,). ``forces``: (atoms,
        3). ``stress``: (structures, 3, 3). ``per_volume`` (structures,): 1 / volume, or 0 for a structure without a
        stress."""
        positions = positions.detach().requires_grad_()
        strain = torch.zeros_like(stress).requires_grad_()
        symmetric = (strain + strain.transpose(1, 2)) / 2
        strained = positions + (positions[:, None] @ symmetric[structure])[:, 0]
        shift = shift + (shift[:, None] @ symmetric[structure[src]])[:, 0]
        each = self.potential(strained, species, src, dst, shift).to(energy.dtype)  # MACE adds up energies in float64
        predicted = torch.zeros_like(energy).index_add(0, structure, each)
        by_position, by_strain = torch.autograd.grad(predicted.sum(), [positions, strain], create_graph=True)
        atoms = torch.zeros_like(energy).index_add(0, structure, torch.ones_like(each))
        of_energy = (predicted - energy) / atoms.clamp(min=1)  # export also tries a structure without atoms
        of_forces = by_position + forces
        of_stress = by_strain * per_volume[:, None, None] - stress
        return of_energy.square().mean() + FORCES * of_forces.square().mean() + STRESS * of_stress.square().mean()


Arrays = tuple[np.ndarray, ...]


def arrays_of(atoms: Atoms, species: Sequence[int], cutoff: float) -> Arrays:
    """Return what the loss reads of a structure, with its neighbor list. ``species``: the model's atomic numbers, in
    its order."""
    cell = atoms.cell.complete()
    src, dst, images = primitive_neighbor_list("ijS", atoms.pbc, cell, atoms.positions, cutoff)
    known = {} if atoms.calc is None else atoms.calc.results
    if missing := {"energy", "forces"} - set(known):
        raise ValueError(f"expected energy and forces, got no {' and no '.join(sorted(missing))}")
    if unknown := {int(z) for z in atoms.numbers} - set(species):
        raise ValueError(f"expected atomic numbers of the model, {species}, got {sorted(unknown)}")
    stress, per_volume = np.zeros((3, 3)), 0.0
    if "stress" in known and atoms.cell.rank == 3:
        stress, per_volume = atoms.get_stress(voigt=False, apply_constraint=False), 1 / atoms.get_volume()
    kinds, forces = np.array([species.index(z) for z in atoms.numbers]), atoms.get_forces(apply_constraint=False)
    return (
        atoms.positions,
        kinds,
        src,
        dst,
        images @ cell,
        np.array([known["energy"]]),
        forces,
        stress[None],
        np.array([per_volume]),
    )


def batch(structures: Sequence[Arrays], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Return the arguments of the loss."""
    counts = [len(positions) for positions, *_ in structures]
    first = np.cumsum([0, *counts])
    positions, kinds, src, dst, shift, energy, forces, stress, per_volume = zip(*structures, strict=True)
    edges = ([ends + first[i] for i, ends in enumerate(column)] for column in (src, dst))
    structure = [np.full(count, i) for i, count in enumerate(counts)]
    columns = positions, kinds, *edges, shift, structure, energy, forces, stress, per_volume
    tensors = (torch.from_numpy(np.concatenate(column)) for column in columns)
    return tuple(t.to(dtype) if t.is_floating_point() else t for t in tensors)


def optimizer_of(matching: Matching, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(matching.parameters(), lr=lr, weight_decay=5e-7, amsgrad=True)


def entry(matching: Matching, example: tuple[torch.Tensor, ...], lr: float) -> ab.Step:
    structures, atoms, edges = ({0: torch.export.Dim(name, min=1)} for name in ("structures", "atoms", "edges"))
    sizes = (atoms, atoms, edges, edges, edges, atoms, structures, atoms, structures, structures)
    variant = ab.Variant(example, dynamic_shapes=sizes, mode="train")
    return ab.Step(matching, [variant], optimizer_of(matching, lr), clip_norm=10.0, ema=0.99)


def read(path: str, model: nn.Module) -> list[Arrays]:
    """Return the structures of a file, without those that have no two atoms within the cutoff: they do not train the
    network."""
    structures = []
    for number, atoms in enumerate(ase.io.read(path, ":"), 1):
        try:
            structures.append(arrays_of(atoms, model.atomic_numbers.tolist(), float(model.r_max)))
        except ValueError as error:
            raise ValueError(f"{path}, structure {number}: {error}") from error
    return [arrays for arrays in structures if len(arrays[2])]


def positive(text: str) -> int:
    if int(text) < 1:
        raise ValueError
    return int(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("data", help="structures in extended XYZ, with energies, forces and perhaps stresses")
    parser.add_argument("output", help="the model to write, such as trained.model")
    parser.add_argument("model", nargs="?", help="a file that mace_run_train wrote, to start from")
    parser.add_argument("--head", help="the name of the head to train, if the model has several")
    parser.add_argument("--epochs", type=positive, default=10)
    parser.add_argument("--batch", type=positive, default=4, help="structures in a batch")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--float32", action="store_true", help="train in float32. The default is the model's own dtype")
    options = parser.parse_args()
    output = Path(options.output).absolute()
    if output.is_dir() or not output.parent.is_dir():
        parser.error(f"{options.output}: expected the path of a file in a folder that exists. Name another one.")
    warnings.filterwarnings("ignore", message=r".*(torch\.jit|TorchScript)")  # of e3nn and MACE, which use it
    model = load_model(options.model) if options.model else random_model()
    model = model.float() if options.float32 else model
    dtype = next(model.parameters()).dtype
    try:
        matching, structures = Matching(Energies(without_torchscript(model), options.head)), read(options.data, model)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if not structures:
        parser.error(
            f"{options.data}: expected structures with atoms within the model's cutoff of {float(model.r_max):g} Å, got none."
        )
    random = np.random.default_rng(0)

    with tempfile.TemporaryDirectory() as folder:
        print("exporting takes about two minutes", flush=True)
        example = batch((structures * 2)[:2], dtype)  # a file may have one structure
        path = ab.export(Path(folder) / "step.pt2", {"fit": entry(matching, example, options.lr)})
        step = aot_backward_runtime.load(path).step()
    for epoch in range(options.epochs):
        order = random.permutation(len(structures))
        chosen = ([structures[i] for i in order[k : k + options.batch]] for k in range(0, len(order), options.batch))
        losses = []
        for part in chosen:
            # Averages of a short training, too, as in mace_run_train --ema
            step.ema = min(0.99, (2 + step.count) / (11 + step.count))
            losses.append(float(step(*batch(part, dtype))))
        print(f"epoch {epoch + 1}: loss {np.mean(losses):.4g}", flush=True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if (key := f"potential.model.{name}") in step.averages:  # a frozen parameter has no average
                parameter.copy_(step.averages[key])
    torch.save(model, options.output)
    print(f"wrote {options.output}")


if __name__ == "__main__":
    main()
