"""examples/forcefields/train_mace.py: a MACE model trained by the compiled step equals one trained in eager, over
batches of other sizes.

The test needs the model's library, which CI does not install.
"""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import aot_backward as ab
from aot_backward_runtime import load

from .models import load_example

pytestmark = pytest.mark.filterwarnings("ignore")  # the libraries' own


def example(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    for library in ("ase", "mace", "e3nn"):
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is not installed")
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples" / "forcefields")  # it imports export_mace
    return load_example("train_mace")


def structures() -> list[Any]:
    """Return periodic boxes and free molecules, with energies, forces and, if periodic, stresses by EMT."""
    from ase.build import molecule
    from ase.calculators.emt import EMT
    from ase.calculators.singlepoint import SinglePointCalculator

    rng, out = np.random.default_rng(0), []
    for number in range(6):
        atoms = molecule("CH3CH2OH", cell=[7.0, 7.5, 8.0], pbc=True) if number % 3 else molecule("H2O")
        atoms = atoms * (1, 1, 1 + number // 4)
        atoms.positions += rng.normal(0, 0.05, atoms.positions.shape)
        atoms.calc = EMT()
        results = {"energy": atoms.get_potential_energy(), "forces": atoms.get_forces()}
        if atoms.pbc.all():
            results["stress"] = atoms.get_stress()
        atoms.calc = SinglePointCalculator(atoms, **results)
        out.append(atoms)
    return out


def test_a_training_equals_eagers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, data = example(monkeypatch), structures()
    model = made["random_model"](torch.float64)
    matching = made["Matching"](made["Energies"](made["without_torchscript"](model)))
    arrays = [made["arrays_of"](atoms, model.atomic_numbers.tolist(), float(model.r_max)) for atoms in data]
    batches = [made["batch"](arrays[i : i + 1 + i % 3], torch.float64) for i in range(len(data))]
    # Some without a stress
    assert len({len(b[0]) for b in batches}) > 3 and any(0 < (b[9] > 0).sum() < len(b[9]) for b in batches)

    eager = copy.deepcopy(matching)
    optimizer = made["optimizer_of"](eager, 1e-2)
    averaged = AveragedModel(eager, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    losses = []
    for arguments in batches:
        optimizer.zero_grad()
        loss = eager(*arguments)
        loss.backward()
        nn.utils.clip_grad_norm_(eager.parameters(), 10.0)
        optimizer.step()
        averaged.update_parameters(eager)
        losses.append(loss.item())

    ab.export(tmp_path / "step.pt2", {"fit": made["entry"](matching, batches[1], 1e-2)}, tune="none")
    step = load(tmp_path / "step.pt2").step()
    assert [step(*arguments).item() for arguments in batches] == pytest.approx(losses, rel=1e-8)
    torch.testing.assert_close(
        dict(step.averages), {n: p.detach() for n, p in averaged.module.named_parameters()}, rtol=0, atol=1e-8
    )


def test_the_loss_is_of_eagers_energies_forces_and_stresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stresses against finite differences of the energy, with the cell strained."""
    made, atoms = example(monkeypatch), structures()[1]
    from ase.calculators.singlepoint import SinglePointCalculator

    model = made["random_model"](torch.float64)
    potential = made["Energies"](made["without_torchscript"](model))

    def arguments_of(structure: Any) -> list[torch.Tensor]:
        return list(
            made["batch"](
                [made["arrays_of"](structure, model.atomic_numbers.tolist(), float(model.r_max))], torch.float64
            )
        )

    def energy(strain: np.ndarray[Any, Any]) -> float:
        strained = atoms.copy()
        strained.set_cell(atoms.cell @ (np.eye(3) + strain), scale_atoms=True)
        strained.calc = SinglePointCalculator(strained, energy=0.0, forces=np.zeros((len(atoms), 3)))
        return float(potential(*arguments_of(strained)[:5]).sum())

    stress = np.zeros((3, 3))
    for i in range(3):
        for j in range(3):
            step = np.zeros((3, 3))
            step[i, j] += 5e-6
            step[j, i] += 5e-6
            stress[i, j] = (energy(step) - energy(-step)) / 2e-5 / atoms.get_volume()
    arguments = arguments_of(atoms)
    positions = arguments[0].clone().requires_grad_()
    total = potential(positions, *arguments[1:5]).sum()
    arguments[6], arguments[7] = total.detach()[None], -torch.autograd.grad(total, positions)[0]
    arguments[8] = torch.from_numpy(stress)[None]
    assert float(made["Matching"](potential)(*arguments)) < 1e-12  # energies, forces and stresses are the model's own


def test_a_head_is_named_where_there_are_several(monkeypatch: pytest.MonkeyPatch) -> None:
    made = example(monkeypatch)
    import e3nn
    from ase.build import molecule
    from mace import modules
    from mace.calculators import MACECalculator

    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        blocks = modules.interaction_classes
        model = modules.ScaleShiftMACE(
            r_max=5.0,
            num_bessel=8,
            num_polynomial_cutoff=5,
            max_ell=2,
            interaction_cls=blocks["RealAgnosticResidualInteractionBlock"],
            interaction_cls_first=blocks["RealAgnosticInteractionBlock"],
            num_interactions=2,
            num_elements=3,
            hidden_irreps=e3nn.o3.Irreps("8x0e+8x1o"),
            MLP_irreps=e3nn.o3.Irreps("8x0e"),
            gate=nn.functional.silu,
            atomic_energies=np.array([[-1.0, -3.0, -5.0], [-10.0, -30.0, -50.0]]),
            avg_num_neighbors=8.0,
            atomic_numbers=[1, 6, 8],
            correlation=2,
            radial_type="bessel",
            atomic_inter_scale=[1.0, 1.0],
            atomic_inter_shift=[0.0, 0.0],
            heads=["pt_head", "Default"],
        ).eval()
        atoms = molecule("CO")
        energies = []
        for head in ("pt_head", "Default"):
            atoms.calc = MACECalculator(models=[model], device="cpu", default_dtype="float64", head=head)
            energies.append(atoms.get_potential_energy())
    finally:
        torch.set_default_dtype(default)
    assert abs(energies[0] - energies[1]) > 1
    plain = made["without_torchscript"](model)
    atoms.calc.results = {"energy": 0.0, "forces": np.zeros((2, 3))}
    arguments = made["batch"]([made["arrays_of"](atoms, [1, 6, 8], 5.0)], torch.float64)[:5]
    assert [made["Energies"](plain, head)(*arguments).sum().item() for head in ("pt_head", "Default")] == pytest.approx(
        energies
    )
    for head in (None, "default"):
        with pytest.raises(ValueError, match=f"head: expected one of pt_head, Default, got {head}"):
            made["Energies"](plain, head)


def test_what_a_file_may_hold(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = example(monkeypatch)
    from ase import Atoms
    from ase.constraints import FixAtoms
    from ase.io import write

    model, (box, molecule, *_) = made["random_model"](torch.float64), structures()[1::-1]
    forces, isolated = box.get_forces(), Atoms("H")
    box.set_constraint(FixAtoms([0, 1]))
    isolated.calc = type(molecule.calc)(isolated, energy=-1.0, forces=np.zeros((1, 3)))
    write(tmp_path / "data.xyz", [isolated, box, molecule])
    read = made["read"](str(tmp_path / "data.xyz"), model)
    assert [len(arrays[0]) for arrays in read] == [9, 3]  # not the atom on its own
    np.testing.assert_allclose(read[0][6], forces, atol=1e-7)  # also those of fixed atoms
    assert read[0][8] > 0 == read[1][8]  # only one has a volume
    bare = molecule.copy()
    write(tmp_path / "bare.xyz", [molecule, bare])
    with pytest.raises(
        ValueError, match=r"bare\.xyz, structure 2: expected energy and forces, got no energy and no forces"
    ):
        made["read"](str(tmp_path / "bare.xyz"), model)
    other = Atoms("HF", [[0, 0, 0], [0, 0, 1]])
    other.calc = type(molecule.calc)(other, energy=0.0, forces=np.zeros((2, 3)))
    write(tmp_path / "other.xyz", other)
    with pytest.raises(ValueError, match=r"structure 1: expected atomic numbers of the model, \[1, 6, 8\], got \[9\]"):
        made["read"](str(tmp_path / "other.xyz"), model)


def test_frozen_parameters_stay_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    made = example(monkeypatch)
    model = made["random_model"](torch.float64)
    for parameter in model.node_embedding.parameters():
        parameter.requires_grad_(False)
    frozen = {
        name for name, parameter in made["without_torchscript"](model).named_parameters() if not parameter.requires_grad
    }
    assert frozen == {f"node_embedding.{name}" for name, _ in model.node_embedding.named_parameters()} != set()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["data.xyz", "trained.model", "--batch", "0"], "argument --batch: invalid positive value: '0'"),
        (["data.xyz", "trained.model", "--epochs", "-1"], "argument --epochs: invalid positive value: '-1'"),
        (["data.xyz", "."], ".: expected the path of a file in a folder that exists"),
        (
            ["data.xyz", "missing/trained.model"],
            "missing/trained.model: expected the path of a file in a folder that exists",
        ),
        (["data.xyz", "trained.model"], "No such file or directory: 'data.xyz'"),
    ],
)
def test_wrong_arguments_are_named_before_exporting(
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    made = example(monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["train_mace.py", *arguments])
    with pytest.raises(SystemExit) as end:
        made["main"]()
    printed = capsys.readouterr()
    assert end.value.code == 2 and message in printed.err and "exporting" not in printed.out
