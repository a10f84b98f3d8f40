"""A network from Fortran, first half: export a gradient, a module and a training step.

    python examples/fortran/export.py network.pt2
    gfortran -O2 examples/fortran/aot_backward.f90 examples/fortran/network.f90 -o network \
      -L build/native -laot_backward -Wl,-rpath,build/native
    ./network network.pt2

``make native`` builds the library. The program needs neither Python nor PyTorch: with ``runtime="standalone"`` the
export checks this or fails.
"""

import sys

import torch
from torch import nn

import aot_backward as ab


def network() -> nn.Sequential:
    """Return a network from points (batch, 2) to one value each, (batch, 1), float64."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1)).double()


def energy(positions: torch.Tensor) -> torch.Tensor:
    """Return the energy of charges at ``positions`` (atoms, 3), float64, which repel each other."""
    square = (positions[:, None] - positions[None]).square().sum(2)
    return (1 / (1 + square)).sum() / 2


def entries() -> dict[str, ab.Grad | ab.Module | ab.Step]:
    net = network()
    points = torch.rand(8, 2, dtype=torch.float64)
    asked = points.clone().requires_grad_()
    atoms, batch = {0: torch.export.Dim("atoms", min=2)}, {0: torch.export.Dim("batch", min=2)}
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    return {
        "energy": ab.Grad(
            energy,
            [ab.Variant((torch.rand(5, 3, dtype=torch.float64),), dynamic_shapes=(atoms,))],
            metadata={"length": "Bohr"},
        ),
        "network": ab.Module(net, [ab.Variant((asked,), dynamic_shapes=(batch,))]),
        "step": ab.Step(
            net,
            [ab.Variant((points, points[:, :1]), dynamic_shapes=(batch, batch))],
            optimizer,
            loss_fn=nn.functional.mse_loss,
        ),
    }


if __name__ == "__main__":
    (path,) = sys.argv[1:] or ["network.pt2"]
    ab.export(path, entries(), runtime="standalone")
    print(f"wrote {path}")
