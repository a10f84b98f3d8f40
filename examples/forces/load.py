"""Forces on atoms, second half: compare native forces with eager's, then move the atoms with them.

    python examples/forces/load.py forces.pt2

Molecular dynamics calls one small gradient thousands of times, and each call needs the result of the one before. Eager
spends most of its time on dispatching some forty operators and their backward one by one.
"""

import sys
import time

import torch
from export import energy, lattice

import aot_backward_runtime

STEPS, STEP = 1000, 0.005


def main(path: str) -> None:
    gradient = aot_backward_runtime.load(path).grad()
    eager = energy()

    print("atoms   largest force   largest difference from eager   native       eager")
    for side in (2, 3, 4, 5):
        pos = lattice(side)
        _, dpos = gradient(pos)
        leaf = pos.clone().requires_grad_()
        (expected,) = torch.autograd.grad(eager(leaf), leaf)
        difference = (dpos - expected).abs().max()
        native_time = seconds(lambda: gradient(pos))  # noqa: B023
        eager_time = seconds(lambda: torch.autograd.grad(eager(leaf), leaf))  # noqa: B023
        print(
            f"{len(pos):5}   {dpos.abs().max():13.4f}   {difference:29.1e}   {native_time * 1e6:6.0f} µs   {eager_time * 1e6:6.0f} µs"
        )
        assert difference < 1e-10

    pos = lattice(3)
    velocity = torch.zeros_like(pos)
    potential, dpos = gradient(pos)
    first, drift = potential.item(), 0.0
    began = time.perf_counter()
    for _ in range(STEPS):  # velocity Verlet, unit masses
        velocity -= STEP / 2 * dpos
        pos += STEP * velocity
        potential, dpos = gradient(pos)
        velocity -= STEP / 2 * dpos
        kinetic = velocity.square().sum().item() / 2
        drift = max(drift, abs(potential.item() + kinetic - first))
    took = time.perf_counter() - began
    print(f"{STEPS} steps of molecular dynamics of {len(pos)} atoms: {took:.2f} s")
    print(f"energy {first:.6f}; {kinetic:.6f} of it became motion; the sum drifted by {drift:.1e} at most")
    assert kinetic > 0.01 and drift < 1e-3
    assert not {"torch._dynamo", "torch._inductor"} & sys.modules.keys()


def seconds(call) -> float:
    """Return the time of a call in the fastest of five rounds."""
    rounds = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(20):
            call()
        rounds.append((time.perf_counter() - began) / 20)
    return min(rounds)


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["forces.pt2"]))
