"""A loaded module behaves as a module does."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

import aot_backward as ab
from aot_backward_runtime import InputError, WeightsError, load

from ..support import exports, zoo
from ..support.oracle import assert_same, run


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2))
        self.head = nn.Linear(16, 3)
        self.register_buffer("table", torch.arange(3.0), persistent=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
        return self.head(self.body(x)) + self.table


def small() -> Small:
    torch.manual_seed(4)
    return Small()


@pytest.fixture(scope="module")
def package() -> Path:
    """Return a package with both modes, and a gradient function of the same module that shares its weights."""

    def make(path: Path) -> None:
        net = small()
        x, y = torch.randn(4, 6), torch.randn(4, 3)
        rows = {0: Dim("rows", min=2)}

        def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return nn.functional.mse_loss(net(x), y)

        entries = {
            "net": ab.Module(
                net,
                [
                    ab.Variant((x,), dynamic_shapes={"x": rows}, requires_grad=["x", "parameters"], mode=m)
                    for m in ("train", "eval")
                ],
            ),
            "fit": ab.Grad(loss, [ab.Variant((x, y), dynamic_shapes={"x": rows, "y": rows})], wrt="parameters"),
        }
        ab.export(path, entries)

    return exports.shared("small", make)


@pytest.fixture
def model(package: Path) -> nn.Module:
    return load(package).module("net")


def test_both_modes(model: nn.Module) -> None:
    eager = small()
    for mode in (True, False, True):
        model.train(mode)
        eager.train(mode)
        x = torch.randn(5, 6, requires_grad=True)
        assert_same(run(model, (x,), 2), run(eager, (x,), 2))
        with torch.no_grad():
            torch.manual_seed(0)
            mine = model(x)
            torch.manual_seed(0)
            torch.testing.assert_close(mine, eager(x))
    assert int(model.calls) == int(eager.calls) == 4


def test_names_shapes_and_state(model: nn.Module) -> None:
    eager = small()
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in eager.named_parameters()]
    assert [n for n, _ in model.named_modules()] == [n for n, _ in eager.named_modules()]
    assert list(model.state_dict()) == list(eager.state_dict())
    for name, value in eager.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value)
    with torch.no_grad():
        for parameter in eager.parameters():
            parameter.normal_()
    assert model.load_state_dict(eager.state_dict()).missing_keys == []
    x = torch.randn(3, 6)
    torch.testing.assert_close(model.eval()(x), eager.eval()(x))
    eager.load_state_dict(model.state_dict())


def test_an_ordinary_optimizer_trains_it(model: nn.Module) -> None:
    eager = small()
    x, y = torch.randn(16, 6), torch.randn(16, 3)
    losses: list[list[float]] = [[], []]
    for module, curve in zip((model, eager), losses, strict=True):
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        torch.manual_seed(9)
        for _ in range(20):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(module(x), y)
            loss.backward()
            optimizer.step()
            curve.append(loss.item())
    assert losses[0][-1] < 0.8 * losses[0][0]
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=1e-3, atol=1e-4)


def test_between_eager_modules(model: nn.Module) -> None:
    eager = small().eval()
    model.eval()
    torch.manual_seed(0)
    before, after = nn.Linear(2, 6), nn.Linear(3, 1)
    x = torch.randn(4, 2)
    gradients = []
    for module in (model, eager):
        before.zero_grad()
        after.zero_grad()
        after(torch.tanh(module(before(x)))).sum().backward()
        gradients.append([p.grad.clone() for p in (*before.parameters(), *after.parameters())])
    torch.testing.assert_close(gradients[0], gradients[1])


@pytest.mark.parametrize("how", ["data", "setattr", "assign", "to", "functional_call", "delete"])
def test_storage_that_moves_never_goes_stale(how: str, model: nn.Module) -> None:
    model.eval()
    eager = small().eval()
    x = torch.randn(3, 6)
    model(x)
    torch.manual_seed(5)
    value = torch.randn(3, 16)
    with torch.no_grad():
        eager.head.weight.copy_(value)
    if how == "data":
        model.head.weight.data = value
    elif how == "setattr":
        model.head.weight = nn.Parameter(value)
    elif how == "assign":
        model.load_state_dict(eager.state_dict(), assign=True)
    elif how == "to":
        with pytest.raises(WeightsError, match=r"head\.weight|body\.0\.weight"):
            model.double()(x)
        model.float()
        model.load_state_dict(eager.state_dict())
    elif how == "functional_call":
        loose = value.clone().requires_grad_()
        out = torch.func.functional_call(model, {"head.weight": loose}, (x,))
        expected = torch.func.functional_call(eager, {"head.weight": loose}, (x,))
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(*(torch.autograd.grad(o.square().sum(), loose)[0] for o in (out, expected)))
        torch.testing.assert_close(model(x), small().eval()(x))
        return
    else:
        del model.head.weight
        with pytest.raises(WeightsError, match="'weight' was deleted"):
            model(x)
        return
    torch.testing.assert_close(model(x), eager(x))


def test_moved_between_forward_and_backward(model: nn.Module) -> None:
    """The backward uses the weights that the forward used."""
    model.eval()
    eager = small().eval()
    x = torch.randn(3, 6, requires_grad=True)
    out = model(x)
    model.head.weight = nn.Parameter(torch.randn(3, 16))
    model(x)
    (mine,) = torch.autograd.grad(out.sum(), x)
    (theirs,) = torch.autograd.grad(eager(x).sum(), x)
    torch.testing.assert_close(mine, theirs)


def test_weights_that_do_not_fit_leave_the_old_ones(model: nn.Module) -> None:
    model.eval()
    x = torch.randn(3, 6)
    expected = model(x).detach().clone()
    old = model.head.weight
    for wrong, message in (
        (torch.randn(3, 15), r"head\.weight has shape \(3, 15\); the package was compiled for \(3, 16\)"),
        (torch.randn(3, 16).double(), r"head\.weight has dtype torch\.float64"),
        (torch.randn(16, 3).t(), r"head\.weight has strides \(1, 3\); the package was compiled for \(16, 1\)"),
    ):
        model.head.weight = nn.Parameter(wrong)
        with pytest.raises(WeightsError, match=message):
            model(x)
    model.head.weight = old
    torch.testing.assert_close(model(x), expected)


def test_copies_have_weights_of_their_own(model: nn.Module) -> None:
    model.eval()
    twin = copy.deepcopy(model)
    x = torch.randn(3, 6)
    with torch.no_grad():
        twin.head.bias += 1
    torch.testing.assert_close(twin(x), model(x) + 1)
    twin(x).sum().backward()
    assert twin.head.weight.grad is not None and model.head.weight.grad is None


def test_entries_of_a_package_share_weights(package: Path) -> None:
    loaded = load(package)
    assert loaded.entries == {"net": "module", "fit": "grad"}
    net, fit = loaded.module(), loaded.grad()
    assert loaded.module("net") is net
    x, y = torch.randn(4, 6), torch.randn(4, 3)
    eager = small()
    for _ in range(3):
        torch.manual_seed(1)
        value, gradients = fit(x, y)
        torch.manual_seed(1)
        expected = nn.functional.mse_loss(eager(x), y)
        eager.zero_grad()
        expected.backward()
        torch.testing.assert_close(value, expected.detach())
        for name, parameter in eager.named_parameters():
            torch.testing.assert_close(gradients[f"net.{name}"], parameter.grad, rtol=1e-4, atol=1e-6)
            with torch.no_grad():
                net.get_parameter(name).sub_(gradients[f"net.{name}"], alpha=0.1)
                parameter.sub_(parameter.grad, alpha=0.1)
    torch.testing.assert_close(dict(net.named_buffers()), dict(eager.named_buffers()))


def test_a_buffer_that_native_code_wrote_has_a_new_version(model: nn.Module) -> None:
    """If the buffer was saved for a backward, eager's error is raised. Autograd does not see a write through a
    pointer."""
    scale = torch.ones(16, requires_grad=True)
    product = scale * model.get_buffer("body.1.running_mean")
    model(torch.randn(4, 6))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_the_mode_that_is_missing(package: Path) -> None:
    only = load(exports.module("two", dynamic=True)).module()
    x, y = zoo.make("two").args(4)
    with pytest.raises(InputError, match=r"is in mode 'eval' and was exported for 'train': call \.train\(\) on it"):
        only.eval()(x, y)


def test_under_torch_compile(model: nn.Module) -> None:
    model.eval()
    x = torch.randn(4, 6)
    wrapped = torch.compile(nn.Sequential(model), backend="eager")
    torch.testing.assert_close(wrapped(x), small().eval()(x))
    wrapped(x).sum().backward()
    assert model.head.weight.grad is not None


def test_under_distributed_data_parallel(model: nn.Module) -> None:
    distributed = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        eager = small()
        x = torch.randn(4, 6)
        assert_same(
            run(nn.parallel.DistributedDataParallel(model), (x,), 2),
            run(nn.parallel.DistributedDataParallel(eager), (x,), 2),
        )
    finally:
        distributed.destroy_process_group()


def test_no_tensor_is_compared_in_a_call(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """``None in gradients`` is such a comparison; it took 26 µs of a backward."""

    def compare(tensor: torch.Tensor, other: Any) -> bool:
        raise AssertionError(f"a tensor was compared with {other}")

    monkeypatch.setattr(torch.Tensor, "__eq__", compare)
    x = torch.randn(4, 6, requires_grad=True)
    for _ in range(2):
        model(x).backward(torch.ones(4, 3))
    assert x.grad is not None


def test_within_a_transform_that_does_not_reach_it(model: nn.Module) -> None:
    """It is refused like any ``autograd.Function``, even with plain arguments."""
    x = torch.randn(4, 6)
    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.func.vmap(lambda row: model(x).sum() * row)(torch.randn(3))
    assert model(x).requires_grad


def test_bound_by_pointer_not_by_value(tmp_path: Path) -> None:
    """Export with every weight at one and every bias at zero, then run at random values: a folded constant would
    show."""
    net = nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    random = copy.deepcopy(net).state_dict()
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
    x = torch.randn(3, 5, requires_grad=True)
    path = ab.export_module(net, (x,), path=tmp_path / "ones.pt2")
    loaded = load(path).module()
    for values in (random, {n: torch.randn_like(v) for n, v in random.items()}):
        loaded.load_state_dict(values)
        net.load_state_dict(values)
        assert_same(run(loaded, (x,), 3), run(net, (x,), 3))
