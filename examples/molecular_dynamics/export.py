"""Molecular dynamics in C, first half: export the energy of atoms with a list of neighbours, and its gradient, as one
native function.

    python examples/molecular_dynamics/export.py metal.pt2
    gcc -O2 examples/molecular_dynamics/md.c -o md -I runtime/native/include \
      -L build/native -laot_backward -lm -Wl,-rpath,build/native
    ./md metal.pt2

``make native`` builds the library. The program needs neither Python nor PyTorch: with ``runtime="standalone"`` the
export checks this or fails.
"""

import sys

import torch

import aot_backward as ab

CUTOFF = 2.2


def energy(pos: torch.Tensor, first: torch.Tensor, second: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """Return the energy of a metal with atoms at ``pos`` (atoms, 3), float64: the model of Finnis and Sinclair (1984),
    with exponentials and a smooth cutoff. ``first`` and ``second`` (pairs), int64, hold each pair of neighbours once.
    ``shift`` (pairs, 3) moves the second atom into the nearest image of the box."""
    distance = (pos[second] - pos[first] + shift).square().sum(1).sqrt()
    fade = torch.where(distance < CUTOFF, torch.cos(distance * (torch.pi / (2 * CUTOFF))).square(), 0.0)
    repulsion = 0.5 * torch.exp(-8 * (distance - 1)) * fade
    share = torch.exp(-3 * (distance - 1)) * fade
    density = torch.zeros_like(pos[:, 0]).index_add(0, first, share).index_add(0, second, share)
    return repulsion.sum() - (density + 1e-6).sqrt().sum()


def entries() -> dict[str, ab.Grad]:
    torch.manual_seed(0)
    pos = torch.cartesian_prod(*[torch.arange(3.0, dtype=torch.float64)] * 3) + 0.05 * torch.randn(
        27, 3, dtype=torch.float64
    )
    first, second = (t.clone() for t in torch.triu_indices(27, 27, 1))
    atoms, pairs = torch.export.Dim("atoms", min=2, max=1 << 20), torch.export.Dim("pairs", min=2, max=1 << 26)
    example = (pos, first, second, torch.zeros(len(first), 3, dtype=torch.float64))
    shapes = {"pos": {0: atoms}, "first": {0: pairs}, "second": {0: pairs}, "shift": {0: pairs}}
    return {"energy": ab.Grad(energy, [ab.Variant(example, dynamic_shapes=shapes)], wrt="pos")}


if __name__ == "__main__":
    (path,) = sys.argv[1:] or ["metal.pt2"]
    ab.export(path, entries(), runtime="standalone")
    print(f"wrote {path}")
