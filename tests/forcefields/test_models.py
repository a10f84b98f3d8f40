"""examples/forcefields: public models with random weights. Their compiled forces are as exact as eager's, in both
runtimes, at other sizes.

Each test needs the model's library, which CI does not install.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import aot_backward as ab
from aot_backward_runtime import load

from .models import errors, in_eager, load_example, system, with_dtype

pytestmark = pytest.mark.filterwarnings("ignore")  # the libraries' own


def example(name: str, *libraries: str) -> dict[str, Any]:
    for library in ("ase", *libraries):
        # Some libraries can be imported only after what the example prepares
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"{library} is not installed")
    return load_example(name)


def check(made: dict[str, Any], path: Path, *kind: str) -> None:
    """Export in float32, and compare with eager in float64: at most 10 times the error of eager in float32."""
    single, double = made["random_model"](torch.float32, *kind), made["random_model"](torch.float64, *kind)
    double.load_state_dict(single.state_dict())
    entry, reference = made["entry"](single), made["entry"](double).fn
    ab.export(path, {"energy": entry})
    cutoff = entry.metadata["cutoff"]
    compiled, abn = load(path).grad(), pytest.importorskip("aot_backward_native")
    native = abn.load(path, unchecked=True).grad()
    for atoms, box in ((2, 3.0), (20, 7.0), (60, 10.0)):
        inputs = system(atoms, box, cutoff, seed=atoms)
        exact, low = in_eager(reference, inputs), with_dtype(inputs, torch.float32)
        allowed = {name: max(10 * e, 1e-6) for name, e in errors(in_eager(entry.fn, low), exact).items()}
        (_, aux), gradients = compiled(*low)
        found = errors({"energies": aux["energies"].double(), **{n: g.double() for n, g in gradients.items()}}, exact)
        assert all(found[n] <= a for n, a in allowed.items()), (atoms, found, allowed)
        (_, aux), gradients = native(*(t.numpy() for t in low))
        found = errors(
            {n: torch.from_numpy(np.array(t)).double() for n, t in {"energies": aux["energies"], **gradients}.items()},
            exact,
        )
        assert all(found[n] <= a for n, a in allowed.items()), (atoms, found, allowed)


def test_mace(tmp_path: Path) -> None:
    check(example("export_mace", "mace", "e3nn"), tmp_path / "mace.pt2")


def test_nequip(tmp_path: Path) -> None:
    check(example("export_nequip", "nequip"), tmp_path / "nequip.pt2")


@pytest.mark.parametrize("kind", ["SchNet", "PaiNN"])
def test_schnetpack(tmp_path: Path, kind: str) -> None:
    check(example("export_schnetpack", "schnetpack"), tmp_path / "schnetpack.pt2", kind)


def test_schnet_of_torch_geometric(tmp_path: Path) -> None:
    check(example("export_schnet_of_torch_geometric", "torch_geometric"), tmp_path / "schnet.pt2")


def test_ani(tmp_path: Path) -> None:
    """Compare with TorchANI itself, which makes its own lists."""
    made = example("export_ani", "torchani")
    single, double = made["random_model"](torch.float32), made["random_model"](torch.float64)
    double.load_state_dict(single.state_dict())
    ab.export(tmp_path / "ani.pt2", {"energy": made["entry"](single)})
    compiled, abn = load(tmp_path / "ani.pt2").grad(), pytest.importorskip("aot_backward_native")
    native = abn.load(tmp_path / "ani.pt2", unchecked=True).grad()
    for atoms, box in ((2, 3.0), (3, 3.0), (20, 7.0)):
        positions, species, *_ = system(atoms, box, 1.0, seed=atoms)

        def whole(model: nn.Module, leaf: torch.Tensor, kinds: torch.Tensor = species) -> dict[str, torch.Tensor]:
            energy = model((torch.tensor([1, 6, 8])[kinds][None], leaf[None])).energies.sum()
            return {"energy": energy.detach().double(), "positions": torch.autograd.grad(energy, leaf)[0].double()}

        exact = whole(double, positions.clone().requires_grad_())
        low = positions.float()
        allowed = {n: max(10 * e, 1e-6) for n, e in errors(whole(single, low.clone().requires_grad_()), exact).items()}
        arguments = [low.numpy(), *made["lists"](low.numpy(), species.numpy(), *made["cutoffs"](single))]
        energy, gradient = compiled(*map(torch.from_numpy, arguments))
        found = errors({"energy": energy.double(), "positions": gradient.double()}, exact)
        assert all(found[n] <= a for n, a in allowed.items()), (atoms, found, allowed)
        energy, gradient = native(*arguments)
        found = errors(
            {
                "energy": torch.tensor(float(energy)).double(),
                "positions": torch.from_numpy(np.array(gradient)).double(),
            },
            exact,
        )
        assert all(found[n] <= a for n, a in allowed.items()), (atoms, found, allowed)
