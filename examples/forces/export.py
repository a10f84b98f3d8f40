"""Forces on atoms, first half: export the energy of any number of atoms and its gradient as one native function.

    python examples/forces/export.py forces.pt2
    python examples/forces/load.py forces.pt2

The entry computes value and gradient in one graph: ``energy, gradient = f(pos)``. The forces are minus the gradient.
The number of atoms is dynamic. ``aot-backward export examples/forces/export.py:entries -o forces.pt2`` writes the same
package.
"""

import sys

import torch
from torch import nn

import aot_backward as ab

CUTOFF = 3.0


class Energy(nn.Module):
    """The energy of atoms at ``pos`` (atoms, 3). A network computes it from each atom's distances to the others.

    Its inputs are sums of Gaussians of the distance, faded out smoothly towards the cutoff (Behler and Parrinello,
    2007). A fixed repulsion keeps the atoms apart, because the network is untrained.
    """

    def __init__(self, features: int = 16, width: int = 32):
        super().__init__()
        self.register_buffer("centers", torch.linspace(0.5, CUTOFF, features))
        self.network = nn.Sequential(
            nn.Linear(features, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1)
        )

    def forward(self, pos: torch.Tensor) -> torch.Tensor:
        # 0 for an atom and itself: that distance is not differentiable
        apart = 1 - torch.eye(pos.shape[0], dtype=pos.dtype)
        difference = pos[:, None] - pos[None]
        distance = (difference.square().sum(-1) + (1 - apart)).sqrt()
        fade = torch.where(distance < CUTOFF, torch.cos(distance * (torch.pi / (2 * CUTOFF))).square(), 0.0) * apart
        surroundings = (torch.exp(-4 * (distance[..., None] - self.centers).square()) * fade[..., None]).sum(1)
        repulsion = (fade * torch.exp(-3 * (distance - 1))).sum() / 2
        return self.network(surroundings).sum() + repulsion


def energy() -> Energy:
    torch.manual_seed(0)
    return Energy().double()


def lattice(side: int) -> torch.Tensor:
    """Return ``side``³ atoms near the points of a cubic lattice."""
    points = torch.cartesian_prod(*[torch.arange(side, dtype=torch.float64)] * 3)
    return 1.2 * points.reshape(-1, 3) + 0.05 * torch.randn(
        side**3, 3, generator=torch.Generator().manual_seed(side), dtype=torch.float64
    )


def entries() -> dict[str, ab.Grad]:
    shapes = {"pos": {0: torch.export.Dim("atoms", min=2, max=4096)}}
    return {"energy": ab.Grad(energy(), [ab.Variant((lattice(2),), dynamic_shapes=shapes)], wrt="pos")}


if __name__ == "__main__":
    (path,) = sys.argv[1:] or ["forces.pt2"]
    ab.export(path, entries(), progress=lambda what, done, total: print(f"  {what} {done}/{total}", flush=True))
    print(f"wrote {path}")
