"""Export a MACE model as a force field for ASE, LAMMPS and OpenMM. Needs mace-torch and ase.

    python examples/forcefields/export_mace.py mace.pt2
    python examples/forcefields/export_mace.py mace.pt2 my.model --float32

Without a model, it exports a small one with random weights.
"""

import argparse
import sys
import warnings

import e3nn
import numpy as np
import torch
from ase import Atoms
from ase.data import chemical_symbols
from mace import modules
from mace.tools.scripts_utils import extract_config_mace_model
from torch import nn

import aot_backward as ab


def random_model(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return modules.ScaleShiftMACE(
            r_max=5.0,
            num_bessel=8,
            num_polynomial_cutoff=5,
            max_ell=2,
            interaction_cls=modules.interaction_classes["RealAgnosticResidualInteractionBlock"],
            interaction_cls_first=modules.interaction_classes["RealAgnosticInteractionBlock"],
            num_interactions=2,
            num_elements=3,
            hidden_irreps=e3nn.o3.Irreps("8x0e+8x1o"),
            MLP_irreps=e3nn.o3.Irreps("8x0e"),
            gate=nn.functional.silu,
            atomic_energies=np.array([-1.0, -3.0, -5.0]),
            avg_num_neighbors=8.0,
            atomic_numbers=[1, 6, 8],
            correlation=2,
            radial_type="bessel",
            atomic_inter_scale=1.0,
            atomic_inter_shift=0.0,
        ).eval()
    finally:
        torch.set_default_dtype(default)


def without_torchscript(model: nn.Module) -> nn.Module:
    """Return the same model with Python modules. e3nn compiles parts of a new model by TorchScript, which cannot be
    exported."""
    dtype, default = next(model.parameters()).dtype, torch.get_default_dtype()
    e3nn.set_optimization_defaults(jit_script_fx=False)
    torch.set_default_dtype(dtype)
    try:
        rebuilt = type(model)(**extract_config_mace_model(model))
    finally:
        torch.set_default_dtype(default)
    missing = rebuilt.load_state_dict(model.state_dict(), strict=False).missing_keys
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    for name, parameter in rebuilt.named_parameters():
        if name in missing:
            raise ValueError(
                f"model: expected weights for {name}, got none. Rebuild this model as it was made, without TorchScript."
            )
        parameter.requires_grad_(trained[name])
    return rebuilt.eval()


class Energies(nn.Module):
    """The energy of each atom, with the arguments of ``ab.forcefield``. ``head``: the name of one of the model's heads,
    if it has several."""

    def __init__(self, model: nn.Module, head: str | None = None):
        super().__init__()
        heads = list(getattr(model, "heads", None) or ["Default"])
        if head not in heads and (head is not None or len(heads) > 1):
            raise ValueError(
                f"head: expected one of {', '.join(heads)}, got {head}. Name the head that was trained on your data, by --head."
            )
        self.model = model
        self.kinds = len(model.atomic_numbers)
        self.head = heads.index(head) if head else 0

    def forward(
        self, positions: torch.Tensor, species: torch.Tensor, src: torch.Tensor, dst: torch.Tensor, shift: torch.Tensor
    ) -> torch.Tensor:
        zeros = torch.zeros_like(species)
        graph = {
            "positions": positions,
            "node_attrs": nn.functional.one_hot(species, self.kinds).to(positions.dtype),
            "edge_index": torch.stack([dst, src]),
            "shifts": -shift,  # MACE collects at the second row, along vectors to it
            "unit_shifts": torch.zeros_like(shift),
            "cell": torch.zeros(3, 3, dtype=positions.dtype),
            "batch": zeros,
            "ptr": torch.zeros(2, dtype=torch.int64),
            "head": torch.full((1,), self.head),
        }
        return self.model(graph, training=False, compute_force=False)["node_energy"]


def entry(model: nn.Module, head: str | None = None) -> ab.Grad:
    symbols = [chemical_symbols[z] for z in model.atomic_numbers.tolist()]
    rng = np.random.default_rng(0)
    sites = np.stack(np.meshgrid(*[range(2)] * 3), -1).reshape(-1, 3) * 3.0
    atoms = Atoms(
        [symbols[i % len(symbols)] for i in range(8)],
        sites + 0.2 * rng.standard_normal((8, 3)),
        cell=[6.0] * 3,
        pbc=True,
    )
    plain = without_torchscript(model)
    return ab.forcefield(
        Energies(plain, head), atoms, cutoff=float(model.r_max), species=symbols, layers=int(model.num_interactions)
    )


def load_model(path: str) -> nn.Module:
    model = torch.load(path, map_location="cpu", weights_only=False)
    if isinstance(model, torch.jit.ScriptModule):
        sys.exit(
            f"{path}: expected a model of Python modules, got TorchScript. Give the file without _compiled in its name."
        )
    return model.eval()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("package", help="the file to write, such as mace.pt2")
    parser.add_argument("model", nargs="?", help="a file that mace_run_train wrote")
    parser.add_argument(
        "--float32",
        action="store_true",
        help="compute in float32: faster, 7 digits. The default is the model's own dtype",
    )
    parser.add_argument("--head", help="the name of the head to use, if the model has several")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message=r".*(torch\.jit|TorchScript)")  # of e3nn and MACE, which use it
    model = load_model(options.model) if options.model else random_model()
    print("exporting takes about a minute", flush=True)
    ab.export(options.package, {"mace": entry(model.float() if options.float32 else model, options.head)})
    print(f"wrote {options.package}")
