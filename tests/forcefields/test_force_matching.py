"""examples/forcefields/force_matching.py: training by energies and forces equals eager training, in both runtimes, over
batches of other sizes."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import aot_backward as ab
from aot_backward_runtime import load

from ..support.exports import shared

EXAMPLES = Path(__file__).parents[2] / "examples" / "forcefields"
BATCHES = 30


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / "force_matching.py"))


@pytest.fixture(scope="module")
def package(example: dict[str, Any]) -> Path:
    return shared(
        "force-matching", lambda path: ab.export(path, example["entries"](torch.float64), runtime="standalone")
    )


def batches() -> list[tuple[np.ndarray[Any, Any], ...]]:
    """Return batches of 1 to 5 structures of 4 to 9 atoms."""
    batch = runpy.run_path(str(EXAMPLES / "force_matching_train.py"))["batch"]
    return [batch(1 + i % 5, i, np.float64) for i in range(BATCHES)]


def eager_training(
    example: dict[str, Any],
) -> tuple[list[float], list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return losses, gradient norms, trained parameters and their averages."""
    module = example["matching"](torch.float64)
    optimizer = example["optimizer_of"](module)
    averaged = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    losses, norms = [], []
    for arguments in batches():
        optimizer.zero_grad()
        loss = module(*map(torch.from_numpy, arguments))
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(module.parameters(), 10.0).item())
        optimizer.step()
        averaged.update_parameters(module)
        losses.append(loss.item())
    return losses, norms, dict(module.named_parameters()), dict(averaged.module.named_parameters())


def test_thirty_batches_equal_eager(package: Path, example: dict[str, Any]) -> None:
    losses, norms, parameters, averages = eager_training(example)
    assert min(norms) < 10 < max(norms)  # some are clipped
    step = load(package).step()
    found = [step(*map(torch.from_numpy, b)).item() for b in batches()]
    assert found == pytest.approx(losses, rel=1e-9)
    torch.testing.assert_close(
        {n: p.detach() for n, p in step.parameters.items()},
        {n: p.detach() for n, p in parameters.items()},
        rtol=0,
        atol=1e-9,
    )
    torch.testing.assert_close(dict(step.averages), {n: p.detach() for n, p in averages.items()}, rtol=0, atol=1e-9)


def test_the_same_without_pytorch(package: Path, example: dict[str, Any], tmp_path: Path) -> None:
    abn = pytest.importorskip("aot_backward_native")
    losses, _, parameters, averages = eager_training(example)
    native = abn.load(package, unchecked=True).step()
    assert [float(native(*b)) for b in batches()] == pytest.approx(losses, rel=1e-9)
    native.save(tmp_path / "native.state")
    step = load(package).step()
    step.resume(tmp_path / "native.state")
    torch.testing.assert_close(
        {n: p.detach() for n, p in step.parameters.items()},
        {n: p.detach() for n, p in parameters.items()},
        rtol=0,
        atol=1e-9,
    )
    torch.testing.assert_close(dict(step.averages), {n: p.detach() for n, p in averages.items()}, rtol=0, atol=1e-9)
    for name, average in averages.items():
        np.testing.assert_array_equal(native.parameters[f"ema.{name}"], step.averages[name])
        assert abs(native.parameters[f"ema.{name}"] - average.detach().numpy()).max() < 1e-9


def test_the_truth_is_a_potential() -> None:
    train = runpy.run_path(str(EXAMPLES / "force_matching_train.py"))
    positions, species = train["cluster"](np.random.default_rng(1), 6)
    _, forces = train["truth"](positions, species)
    step = np.zeros_like(positions)
    step[2, 1] = 1e-5
    slope = (train["truth"](positions + step, species)[0] - train["truth"](positions - step, species)[0]) / 2e-5
    assert forces[2, 1] == pytest.approx(-slope, rel=1e-6)


def test_the_example_learns(tmp_path: Path) -> None:
    """Export and train by the two commands of the example. The second asserts that the loss falls, and that PyTorch was
    not imported."""
    pytest.importorskip("aot_backward_native")
    for argv in (["force_matching.py", "fit.pt2"], ["force_matching_train.py", "fit.pt2", "trained.safetensors"]):
        done = subprocess.run(
            [sys.executable, EXAMPLES / argv[0], *argv[1:]], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.endswith(f"wrote {argv[-1]}\n")
