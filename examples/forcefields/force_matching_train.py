"""Force matching, second half: train with NumPy, without PyTorch, on clusters of other sizes in each batch.

python examples/forcefields/force_matching_train.py fit.pt2 trained.safetensors
"""

import sys

import aot_backward_native as abn
import numpy as np

CUTOFF = 4.0  # of force_matching.py
# The truth: Morse's potential between atoms of two species
DEPTH, WIDTH, LENGTH = np.array([[1.0, 0.7], [0.7, 0.4]]), 1.3, 1.6


def cluster(rng: np.random.Generator, atoms: int) -> tuple[np.ndarray, np.ndarray]:
    """Return positions and species of a random cluster, no two atoms closer than 1.2."""
    positions: list[np.ndarray] = []
    while len(positions) < atoms:
        place = rng.uniform(0, 2.0 * atoms ** (1 / 3), 3)
        if all(np.linalg.norm(place - other) > 1.2 for other in positions):
            positions.append(place)
    return np.array(positions), rng.integers(0, 2, atoms)


def truth(positions: np.ndarray, species: np.ndarray) -> tuple[float, np.ndarray]:
    """Return energy and forces, of all pairs."""
    vectors = positions[None] - positions[:, None]
    distance = np.linalg.norm(vectors, axis=2) + np.eye(len(positions))
    depth = DEPTH[species[:, None], species[None]] * (1 - np.eye(len(positions)))
    decay = np.exp(-WIDTH * (distance - LENGTH))
    slope = depth * 2 * WIDTH * decay * (1 - decay)
    return float((depth * ((1 - decay) ** 2 - 1)).sum() / 2), ((slope / distance)[:, :, None] * vectors).sum(1)


def batch(structures: int, seed: int, dtype: type = np.float32) -> tuple[np.ndarray, ...]:
    """Return the arguments of the step: several clusters, one after another."""
    rng = np.random.default_rng(seed)
    parts, first = [], 0
    for number in range(structures):
        positions, species = cluster(rng, int(rng.integers(4, 10)))
        energy, forces = truth(positions, species)
        distance = np.linalg.norm(positions[None] - positions[:, None], axis=2)
        src, dst = np.nonzero((distance < CUTOFF) & (distance > 0))
        parts.append(
            (
                positions,
                species,
                src + first,
                dst + first,
                np.zeros((len(src), 3)),
                np.full(len(species), number),
                [energy],
                forces,
            )
        )
        first += len(species)
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    return tuple(c.astype(dtype if c.dtype.kind == "f" else np.int64) for c in columns)


def main(path: str, state: str) -> None:
    step = abn.load(path).step()
    losses = []
    for i in range(600):
        step.param_groups[0]["lr"] = 3e-3 * (1 + np.cos(np.pi * i / 600)) / 2
        losses.append(float(step(*batch(1 + i % 5, i))))
        if i % 100 == 99:
            print(f"step {i + 1}: loss {np.mean(losses[-100:]):.4f}")
    step.save(state)
    print(f"wrote {state}")
    assert np.mean(losses[-100:]) < np.mean(losses[:100]) / 4 and "torch" not in sys.modules


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["fit.pt2", "trained.safetensors"]))
