"""Loaded packages and entries are pickled by the path and digest of their package, with their tensors."""

from __future__ import annotations

import copy
import io
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import aot_backward as ab
from aot_backward_runtime import AotBackwardError, PackageError, load

from ..support import exports
from ..support.packages import python

X, Y = torch.linspace(-1, 1, 12).reshape(4, 3), torch.linspace(0, 1, 8).reshape(4, 2)


def make(path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    net[3].bias.requires_grad_(False)
    args, both = [ab.Variant((X,))], [ab.Variant((X,), mode="train"), ab.Variant((X,), mode="eval")]

    def loss(x: torch.Tensor) -> torch.Tensor:
        return net(x).square().mean()

    def means(x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"mean": net[0](x).mean()}

    step = ab.Step(
        net,
        [ab.Variant((X, Y))],
        torch.optim.Adam(net.parameters(), lr=0.01),
        loss_fn=nn.functional.mse_loss,
        accumulate=True,
    )
    ab.export(
        path,
        {
            "net": ab.Module(net, both),
            "loss": ab.Grad(loss, args, wrt="x"),
            "means": ab.Function(means, args),
            "fit": step,
        },
        metadata={"by": "us"},
    )


@pytest.fixture
def package() -> Any:
    return load(exports.shared("pickling", make))


def _pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def _saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


@pytest.mark.parametrize("again", [_pickled, _saved, copy.deepcopy])
def test_a_module(again: Any, package: Any) -> None:
    net = package.module()
    net.note = {"epoch": 3}
    net.add_module("after", nn.Linear(2, 2))
    net.eval()
    with torch.no_grad():
        net.get_parameter("0.weight").mul_(2)
    net.get_parameter("0.bias").requires_grad_(False)
    net(X).sum().backward()
    other = again(net)
    assert other.note == {"epoch": 3} and other.after is not net.after and not other.training and other.metadata == {}
    assert other.state_dict().keys() == net.state_dict().keys()
    for (name, a), (_, b) in zip(net.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(a, b) and a.requires_grad == b.requires_grad and a is not b
        assert (a.grad is None) == (b.grad is None) and (a.grad is None or torch.equal(a.grad, b.grad)), name
    assert torch.equal(other(X), net(X))
    with torch.no_grad():
        other.get_parameter("3.weight").zero_()
    assert not torch.equal(other(X), net(X))


@pytest.mark.parametrize("again", [_pickled, _saved, copy.deepcopy])
def test_functions(again: Any, package: Any) -> None:
    loss, means = package.grad(), package.function()
    with torch.no_grad():
        loss.parameters["net.0.bias"].add_(1)
    torch.manual_seed(1)
    value, gradient = loss(X)
    torch.manual_seed(1)
    other_value, other_gradient = again(loss)(X)
    assert torch.equal(value, other_value) and torch.equal(gradient, other_gradient)
    assert torch.equal(again(means)(X)["mean"], means(X)["mean"])


@pytest.mark.parametrize("again", [_pickled, _saved, copy.deepcopy])
def test_a_step_in_the_middle_of_its_training(again: Any, package: Any) -> None:
    step = package.step()
    for _ in range(3):
        step(X, Y)
    step.param_groups[0]["lr"] = 0.2
    step(X, Y, update=False)
    other = again(step)
    assert other.count == 3 and other.accumulated == 1 and other.param_groups[0]["lr"] == 0.2
    results = []
    for each in (step, other):
        torch.manual_seed(2)
        each.step()
        results.append([each(X, Y) for _ in range(3)])
    assert torch.equal(torch.stack(results[0]), torch.stack(results[1]))
    for name, tensor in step.parameters.items():
        assert torch.equal(tensor, other.parameters[name]), name


@pytest.mark.parametrize("again", [_pickled, copy.deepcopy])
def test_a_package_with_changed_weights(again: Any, package: Any) -> None:
    with torch.no_grad():
        package.module().get_parameter("0.weight").fill_(0.5)
    package.module().load_state_dict({n: t + 1 for n, t in package.module().state_dict().items()}, assign=True)
    other = again(package)
    assert other.path == package.path and other.metadata == {"by": "us"} and other.entries == package.entries
    for name, tensor in package.module().state_dict().items():
        assert torch.equal(other.module().state_dict()[name], tensor), name
    assert other.module() is not package.module()


def test_in_another_process_with_another_working_directory(
    package: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(package.path.parent)
    loaded = load(package.path.name).function()
    (tmp_path / "means.pickle").write_bytes(pickle.dumps(loaded))
    program = "import pickle, sys, torch; print(pickle.load(open(sys.argv[1], 'rb'))(torch.linspace(-1, 1, 12).reshape(4, 3))['mean'].item())"
    done = python(program, tmp_path / "means.pickle", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == loaded(X)["mean"].item()


def test_another_file_in_its_place_is_refused(package: Any, tmp_path: Path) -> None:
    path = Path(shutil.copy(package.path, tmp_path / "a.pt2"))
    data = pickle.dumps(load(path).function())
    shutil.copy(exports.module("mlp", dynamic=False), path)
    with pytest.raises(
        PackageError,
        match=r"a.pt2: expected the file that was pickled, manifest SHA-256 \w{64}, got \w{64}\. Restore that file",
    ):
        pickle.loads(data)
    path.unlink()
    with pytest.raises(PackageError, match=r"a\.pt2"):
        pickle.loads(data)


def test_without_stored_weights(tmp_path: Path) -> None:
    net = nn.Linear(3, 2)
    path = ab.export(tmp_path / "bare.pt2", {"net": ab.Module(net, [ab.Variant((X,))])}, weights=False)
    package = load(path, weights=net.state_dict())
    for again in (_pickled, copy.deepcopy):
        assert torch.equal(again(package).module()(X), net(X))
        assert torch.equal(again(package.module())(X), net(X))


def test_shallow_copies_are_refused(package: Any) -> None:
    for loaded in (package, package.module(), package.grad(), package.function(), package.step()):
        with pytest.raises(AotBackwardError, match=rf"copy\.copy of a {type(loaded).__name__}: .* Call copy\.deepcopy"):
            copy.copy(loaded)
