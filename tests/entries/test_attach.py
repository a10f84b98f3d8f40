"""``load(path).module(name).attach(net)``: your module runs compiled code and is otherwise unchanged."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import os
import pickle
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

import aot_backward as ab
from aot_backward_runtime import ExecutionError, GradientError, InputError, WeightsError, load
from aot_backward_runtime.entries.module import LoadedModule

from ..support import exports
from ..support.oracle import assert_same, run


class Layers(nn.Module):
    """Dropout, BatchNorm, a tied weight, a buffer that counts calls, a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2))
        self.again, self.head = nn.Linear(6, 16), nn.Linear(16, 3)
        self.again.weight = self.body[0].weight
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("absent", None)
        self.plain, self.empty, self.pool = nn.Linear(3, 3, bias=False), nn.Sequential(), nn.AdaptiveAvgPool1d([2])
        self.pair = nn.ModuleDict({"a": nn.Tanh(), "b": nn.Sigmoid()})
        self.scale = 2.0

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        if self.training:
            self.calls += 1
        hidden = self.body(x) + self.again(x)
        if mask is not None:
            hidden = hidden * mask
        out = self.plain(self.frozen(self.head(hidden))) * self.scale
        for layer in self.pair.values():
            out = layer(out)
        return {"out": self.empty(out), "hidden": self.pool(hidden)}


def layers() -> Layers:
    torch.manual_seed(4)
    return Layers()


def make(path: Path) -> None:
    x = torch.randn(4, 6)
    rows = {"x": {0: Dim("rows", min=2)}}
    ab.export(
        path,
        {
            "net": ab.Module(
                layers(),
                [
                    ab.Variant((x,), dynamic_shapes=rows, requires_grad=["x", "parameters"], mode=m)
                    for m in ("train", "eval")
                ],
            )
        },
    )


@pytest.fixture(scope="module")
def path() -> Path:
    return exports.shared("attach", make)


@pytest.fixture
def loaded(path: Path) -> LoadedModule:
    return load(path).module("net")


@pytest.fixture
def x() -> torch.Tensor:
    torch.manual_seed(7)
    return torch.randn(5, 6)


def assert_served(net: nn.Module, eager: nn.Module, x: torch.Tensor) -> None:
    """Check that a call of ``net`` runs compiled code and equals eager."""
    attachment: Any = net.forward
    before = attachment.calls
    given = x.clone().requires_grad_()
    assert_same(run(net, (given,), 2), run(eager, (given,), 2))
    assert attachment.calls == before + 1


def test_both_modes(loaded: LoadedModule, x: torch.Tensor) -> None:
    net, eager = layers(), layers()
    loaded.attach(net)
    for mode in (True, False, True):
        assert_served(net.train(mode), eager.train(mode), x)
        with torch.no_grad():
            torch.manual_seed(0)
            mine = net(x)
            torch.manual_seed(0)
            torch.testing.assert_close(mine, eager(x))
    assert int(net.calls) == int(eager.calls) == 4


def test_an_optimizer_trains_the_modules_own_parameters(loaded: LoadedModule) -> None:
    net, eager = layers(), layers()
    before = {n: t.clone() for n, t in loaded.state_dict().items()}
    losses: list[list[float]] = []
    with loaded.attach(net) as attachment:
        for module in (net, eager):
            optimizer = torch.optim.SGD(module.parameters(), lr=1e-2, momentum=0.9)
            torch.manual_seed(9)
            curve = []
            for _ in range(20):
                batch = torch.randn(16, 6)
                optimizer.zero_grad()
                loss = module(batch)["out"].square().mean()
                loss.backward()
                optimizer.step()
                curve.append(loss.item())
            losses.append(curve)
    assert attachment.calls == 20
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(net.state_dict(), eager.state_dict(), rtol=1e-3, atol=1e-4)
    assert all(torch.equal(before[n], t) for n, t in loaded.state_dict().items())  # the package's own state


def test_two_modules_at_once(loaded: LoadedModule, x: torch.Tensor) -> None:
    first, second, eager = layers(), layers(), layers()
    with torch.no_grad():
        second.head.weight.mul_(3)
    other = copy.deepcopy(second)
    loaded.attach(first)
    loaded.attach(second)
    for _ in range(2):
        assert_served(first, eager, x)
        assert_served(second, other, x)


def test_copies_and_pickles_have_their_own_forward(loaded: LoadedModule, x: torch.Tensor) -> None:
    net = layers()
    attachment = loaded.attach(net)
    stored = io.BytesIO()
    torch.save(net, stored)
    copies = [
        copy.deepcopy(net),
        pickle.loads(pickle.dumps(net)),
        torch.load(io.BytesIO(stored.getvalue()), weights_only=False),
    ]
    for made in copies:
        given, eager = x.clone().requires_grad_(), layers()
        assert_same(run(made, (given,), 2), run(eager, (given,), 2))
        assert attachment.calls == 0
        loaded.attach(made)
        assert_served(made, eager, x)
        loaded.detach(made)
        assert made.forward.__func__ is Layers.forward
    assert b"aot_backward" not in stored.getvalue()  # a reader of the file does not need this package


def test_detach(loaded: LoadedModule, x: torch.Tensor) -> None:
    net = layers()
    before = dict(vars(net))
    with pytest.raises(RuntimeError, match="in the block"), loaded.attach(net) as attachment:
        net(x)
        raise RuntimeError("in the block")
    assert vars(net) == before
    net(x)
    assert attachment.calls == 1
    loaded.attach(net)
    with pytest.raises(InputError, match="compiled code is attached to"):
        loaded.attach(net)
    loaded.detach(net)
    assert vars(net) == before
    with pytest.raises(InputError, match="Layers with its own forward"):
        loaded.detach(net)


def test_its_own_hooks_run_and_those_of_submodules_are_refused(loaded: LoadedModule, x: torch.Tensor) -> None:
    net, eager = layers().eval(), layers().eval()
    loaded.attach(net)
    seen = []
    net.register_forward_hook(lambda module, args, out: seen.append(out["out"].shape))
    assert_served(net, eager, x)
    assert seen == [(5, 3)]
    handle = net.body[1].register_forward_hook(lambda module, args, out: out * 2)
    with pytest.raises(InputError, match=r"body\.1: expected a submodule without hooks, got a forward hook"):
        net(x)
    handle.remove()
    assert_served(net, eager, x)
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, out: None)
    with pytest.raises(InputError, match="a hook of all modules"):
        net(x)
    handle.remove()
    net.head.register_full_backward_hook(lambda module, grads, out: None)
    loaded.detach(net)
    with pytest.raises(InputError, match="head: expected a submodule without hooks, got a backward hook"):
        loaded.attach(net)
    assert "forward" not in vars(net)


@pytest.mark.parametrize("how", ["data", "setattr", "assign", "parameter", "functional_call"])
def test_tensors_that_move_are_bound_again(how: str, loaded: LoadedModule, x: torch.Tensor) -> None:
    net, eager = layers().eval(), layers().eval()
    loaded.attach(net)
    net(x)
    value = torch.randn(3, 16)
    with torch.no_grad():
        eager.head.weight.copy_(value)
    if how == "data":
        net.head.weight.data = value
    elif how == "setattr":
        net.head.weight = nn.Parameter(value)
    elif how == "assign":
        net.load_state_dict({"head.weight": value}, strict=False, assign=True)
    elif how == "parameter":
        net.head = nn.Linear(16, 3).eval()
        net.head.load_state_dict(eager.head.state_dict())
    else:
        loose = value.clone().requires_grad_()
        outs = [torch.func.functional_call(module, {"head.weight": loose}, (x,))["out"] for module in (net, eager)]
        torch.testing.assert_close(*outs)
        torch.testing.assert_close(*(torch.autograd.grad(o.square().sum(), loose)[0] for o in outs))
        return
    assert_served(net, eager, x)


class ReLU(nn.ReLU):
    """A custom class with the name of PyTorch's."""


def rename(net: Layers) -> None:
    first, second = net.pair.pop("a"), net.pair.pop("b")
    net.pair["b"], net.pair["a"] = first, second


CHANGES: dict[str, tuple[Callable[[Layers], object], type[Exception], str]] = {
    "dtype": (lambda net: net.double(), WeightsError, "has dtype torch.float64"),
    "shape": (
        lambda net: setattr(net.head, "weight", nn.Parameter(torch.ones(4, 16))),
        WeightsError,
        r"head\.weight has shape \(4, 16\)",
    ),
    "untied": (
        lambda net: setattr(net.again, "weight", nn.Parameter(torch.ones(16, 6))),
        WeightsError,
        "were one tensor",
    ),
    "new tensor": (lambda net: net.register_buffer("late", torch.ones(1)), InputError, "got also late"),
    "deleted": (lambda net: delattr(net.head, "bias"), InputError, r"got no (head\.)?bias"),
    "class": (lambda net: net.body.__setitem__(2, nn.Tanh()), InputError, r"body\.2 is a Tanh, and was a ReLU"),
    "new layer": (lambda net: net.body.append(nn.ReLU()), InputError, r"body\.4 is new"),
    "setting": (lambda net: setattr(net.body[3], "p", 0.5), InputError, r"p of body\.3 is 0\.5, and was 0\.2"),
    "momentum": (
        lambda net: setattr(net.body[1], "momentum", None),
        InputError,
        r"momentum of body\.1 is None, and was 0\.1",
    ),
    "new buffer": (lambda net: setattr(net, "absent", torch.ones(3)), InputError, "got also absent"),
    "new parameter": (
        lambda net: setattr(net.plain, "bias", nn.Parameter(torch.ones(3))),
        InputError,
        r"got also plain\.bias",
    ),
    "layer in an empty one": (lambda net: net.empty.append(nn.ReLU()), InputError, r"empty\.0 is new"),
    "other names": (rename, InputError, r"pair\.\w is a "),
    "other forward": (
        lambda net: setattr(net.head, "forward", lambda x: x),
        InputError,
        "the forward of head is replaced on the instance",
    ),
    "list": (
        lambda net: setattr(net.pool, "output_size", [3]),
        InputError,
        r"output_size of pool is \[3\], and was \[2\]",
    ),
    "list in place": (lambda net: net.pool.output_size.append(3), InputError, r"output_size of pool is \[2, 3\]"),
    "deleted setting": (lambda net: delattr(net.body[3], "p"), InputError, r"p of body\.3 is nothing"),
    "own class of the same name": (
        lambda net: setattr(net.body[2], "__class__", ReLU),
        InputError,
        r"body\.2 is a ReLU, and was a torch",
    ),
    "mode": (lambda net: net.body[1].eval(), InputError, r"body\.1: expected train mode, .* got eval mode"),
    "thawed": (lambda net: net.frozen.requires_grad_(), GradientError, r"frozen\.(weight|bias)"),
}


@pytest.mark.parametrize("attached", [True, False], ids=["after it was attached", "before"])
@pytest.mark.parametrize("what", CHANGES)
def test_a_module_that_is_another_one_is_refused(
    what: str, attached: bool, loaded: LoadedModule, x: torch.Tensor
) -> None:
    change, error, message = CHANGES[what]
    net = layers()
    if attached:
        loaded.attach(net)
        net(x)
    change(net)
    for _ in range(2):  # a refused call leaves no cached decision
        with pytest.raises(error, match=message):
            net(x) if attached else loaded.attach(net)
    assert attached or "forward" not in vars(net)


def test_fewer_trained_parameters_are_served(loaded: LoadedModule, x: torch.Tensor) -> None:
    net, eager = layers(), layers()
    for module in (net, eager):
        module.body.requires_grad_(False)
    loaded.attach(net)
    assert_served(net, eager, x)
    for module in (net, eager):
        module.requires_grad_(False)
    assert_served(net, eager, x)


def test_settings_that_are_put_back_are_served(loaded: LoadedModule, x: torch.Tensor) -> None:
    net = layers()
    loaded.attach(net)
    net.body[3].p = 0.0
    with pytest.raises(InputError, match="p of body"):
        net(x)
    net.body[3].p = 0.2
    net.body[1].eval()
    with pytest.raises(InputError, match="expected train mode"):
        net(x)
    net.train()
    assert_served(net, layers(), x)


def test_otherwise_eager(loaded: LoadedModule, x: torch.Tensor) -> None:
    net, eager = layers(), layers()
    with pytest.raises(InputError, match="otherwise: expected 'error' or 'eager', got 'egaer'"):
        loaded.attach(net, otherwise="egaer")  # type: ignore[arg-type]
    attachment = loaded.attach(net, otherwise="eager")
    mask = torch.ones(16)
    mask[3:] = 0
    given = x.clone().requires_grad_()
    for _ in range(2):
        assert_same(run(net, (given, mask), 2), run(eager, (given, mask), 2))
    assert_served(net, eager, x)
    net.double()
    eager.double()
    wide = given.detach().double()
    assert_same(run(net, (wide,), 2), run(eager, (wide,), 2), 3e-5)
    assert attachment.calls == 1
    assert sorted(attachment.in_eager.values()) == [1, 2]
    assert any("float64" in reason for reason in attachment.in_eager)
    loaded.detach(net)
    loaded.attach(net.float())
    with pytest.raises(InputError, match="2 positional"):
        net(x, mask)


@pytest.mark.parametrize("kinds", ["mask plain", "plain mask", "mask plain mask"])
def test_compiled_calls_and_eagers_in_one_backward(kinds: str, loaded: LoadedModule, x: torch.Tensor) -> None:
    """Eager batch normalization saves its averages for the backward. The next call writes them, and autograd does not
    see it."""
    net, eager = layers(), layers()
    attachment = loaded.attach(net, otherwise="eager")
    for module in (net, eager):
        torch.manual_seed(3)
        outs = [module(x, torch.ones(16)) if kind == "mask" else module(x) for kind in kinds.split()]
        sum(out["out"].square().mean() for out in outs).backward()
    for mine, theirs in zip(net.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-6)
    assert attachment.calls == kinds.split().count("plain")


def test_compare(loaded: LoadedModule, x: torch.Tensor) -> None:
    net, eager = layers(), layers()
    torch.manual_seed(1)
    attachment = loaded.attach(net, compare=2)
    state = torch.get_rng_state()
    for _ in range(3):
        assert_served(net, eager, x)
    assert not torch.equal(state, torch.get_rng_state())
    assert attachment.calls == 3
    loaded.detach(net)

    loaded.attach(net, compare=1)
    net.scale = 3.0  # attributes of a class outside PyTorch are not checked
    before, state = [*map(torch.clone, net.state_dict().values())], torch.get_rng_state()
    gradients = {n: p.grad.clone() for n, p in net.named_parameters() if p.grad is not None}
    with pytest.raises(ExecutionError, match=r"result \d is off by"):
        net(x)
    assert torch.equal(state, torch.get_rng_state())
    assert all(map(torch.equal, before, net.state_dict().values()))
    assert gradients and all(torch.equal(g, net.get_parameter(n).grad) for n, g in gradients.items())


def test_calls_that_are_not_served_are_not_counted_as_compared(loaded: LoadedModule, x: torch.Tensor) -> None:
    net = layers()
    loaded.attach(net, compare=1)
    with pytest.raises(InputError, match="2 positional"):
        net(x, torch.ones(16))
    net.scale = 3.0
    with pytest.raises(ExecutionError, match=r"result \d is off by"):
        net(x)
    loaded.detach(net)
    net.scale, net.lock = 2.0, threading.Lock()
    loaded.attach(net, compare=1)
    with pytest.raises(ExecutionError, match=r"expected a module that copy\.deepcopy can copy"):
        net(x)
    loaded.detach(net)
    for wrong in (-1, "3", True):
        with pytest.raises(InputError, match="compare: expected a number of calls"):
            loaded.attach(net, compare=wrong)  # type: ignore[arg-type]


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * float(os.environ.get("AOTB_TEST_SLOPE", "1"))


class Signs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Straight.apply(self.lin(x))


def test_compare_finds_another_gradient_of_the_same_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = Signs(), torch.randn(4, 3)
    ab.export_module(net, (x,), path=tmp_path / "signs.pt2")
    monkeypatch.setenv("AOTB_TEST_SLOPE", "2")
    load(tmp_path / "signs.pt2").module().attach(net, compare=1)
    with pytest.raises(ExecutionError, match=r"the gradient of lin\.weight is off by"):
        net(x)
    net(x).sum().backward()


def test_attributes_that_differ_are_warned_of(loaded: LoadedModule) -> None:
    net = layers()
    net.scale = 3.0
    with pytest.warns(UserWarning, match=r"scale of the module is 3\.0, and was 2\.0 when it was exported"):
        loaded.attach(net)
    with warnings.catch_warnings():  # the warning comes once, not in each mode
        warnings.simplefilter("error")
        for mode in (True, False, True):
            net.train(mode)(torch.ones(2, 6))
    loaded.detach(net)
    with pytest.raises(InputError, match=r"scale of the module is 3\.0"):
        loaded.attach(net, strict=True)
    assert "forward" not in vars(net)


@pytest.fixture
def written(tmp_path: Path) -> Iterator[Callable[[str], ModuleType]]:
    """Return a function that makes a module with a class ``Net`` whose forward returns the given expression."""
    count = iter(range(9))

    def write(expression: str) -> ModuleType:
        name = f"attach_test_{next(count)}"
        text = f"class Net(torch.nn.Linear):\n    def forward(self, x):\n        return {expression}\n"
        (tmp_path / f"{name}.py").write_text(f"import torch\n\n\n{text}")
        made = ModuleType(name)
        made.__file__ = str(tmp_path / f"{name}.py")
        sys.modules[name] = made
        exec(compile(Path(made.__file__).read_text(), made.__file__, "exec"), vars(made))
        return made

    yield write
    for i in range(9):
        sys.modules.pop(f"attach_test_{i}", None)


def test_another_source_is_warned_of(written: Callable[[str], ModuleType], tmp_path: Path) -> None:
    here = tmp_path / "net.pt2"
    ab.export_module(written("super().forward(x) * 2").Net(3, 2), (torch.ones(2, 3),), path=here)
    same, other = written("super().forward(x) * 2").Net(3, 2), written("super().forward(x) * 4").Net(3, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(here).module().attach(same, strict=True)
    with pytest.warns(
        UserWarning, match="the source of Net, the class of the module, is not the one that was exported"
    ):
        load(here).module().attach(other)
    load(here).module().detach(other)
    with pytest.raises(InputError, match="the source of Net"):
        load(here).module().attach(other, strict=True)


def test_a_forward_that_was_replaced_is_refused(loaded: LoadedModule, x: torch.Tensor) -> None:
    net = layers()
    net.forward = lambda x: x  # type: ignore[method-assign]
    with pytest.raises(InputError, match="got one with a replaced forward"):
        loaded.attach(net)
    with pytest.raises(InputError, match=r"expected an nn\.Module to attach to, got a function"):
        loaded.attach(lambda x: x)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="is a LoadedModule, and was a Layers"):
        loaded.attach(copy.deepcopy(loaded))
    with pytest.raises(InputError, match="is a DataParallel, and was a Layers"):
        loaded.attach(nn.DataParallel(layers()))


def test_a_submodule_of_ones_own_that_is_swapped_is_compared_again(tmp_path: Path) -> None:
    """Its attributes differ from the exported ones, so attach warns about them."""
    net, x = nn.Sequential(Scaled(2.0), nn.Linear(3, 3)), torch.ones(2, 3)
    ab.export_module(net, (x,), path=tmp_path / "net.pt2")
    for strict, check in (
        (True, pytest.raises(InputError, match=r"by of 0 is 7\.0")),
        (False, pytest.warns(UserWarning, match=r"by of 0 is 7\.0")),
    ):
        live = nn.Sequential(Scaled(2.0), nn.Linear(3, 3))
        load(tmp_path / "net.pt2").module().attach(live, strict=strict)
        live(x)
        live[0] = Scaled(7.0)
        with check:
            live(x)


class Scaled(nn.Module):
    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.by


def test_a_trace_of_the_call_is_refused(loaded: LoadedModule, x: torch.Tensor) -> None:
    """A trace would store the results as constants."""
    net = layers().eval()
    loaded.attach(net)
    net(x)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(InputError, match=r"called during torch\.jit\.trace"):
            torch.jit.trace(net, (x,), strict=False)
        with pytest.raises(InputError, match="expected a module with a forward in Python code, got TorchScript"):
            loaded.attach(torch.jit.script(nn.Linear(2, 2)))


def test_a_module_made_in_inference_mode_is_refused(loaded: LoadedModule) -> None:
    with torch.inference_mode():
        net = layers()
    with pytest.raises(InputError, match=r"got one made under torch\.inference_mode"):
        loaded.attach(net)


def test_it_is_freed_with_the_module(loaded: LoadedModule, x: torch.Tensor) -> None:
    net = layers()
    attachment = loaded.attach(net)
    net(x)["out"].sum().backward()
    gone = weakref.ref(net)
    gc.disable()
    try:
        del net
        assert gone() is None
    finally:
        gc.enable()
    with pytest.raises(InputError, match="no longer exists"):
        attachment(x)


def test_the_signature_is_the_modules(loaded: LoadedModule) -> None:
    net = layers()
    expected = inspect.signature(net.forward)
    loaded.attach(net)
    assert inspect.signature(net.forward) == expected


def test_within_a_compiled_caller(loaded: LoadedModule, x: torch.Tensor) -> None:
    net, eager = layers().eval(), layers().eval()
    attachment = loaded.attach(net)
    compiled = torch.compile(lambda x: net(x * 2)["out"] + 1, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), eager(x * 2)["out"] + 1)
    assert attachment.calls == 1


def test_under_data_parallel(loaded: LoadedModule, x: torch.Tensor, tmp_path: Path) -> None:
    net, eager = layers(), layers()
    loaded.attach(net)
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(net)
        for module in (wrapped, eager):
            torch.manual_seed(3)
            module(x)["out"].sum().backward()
        del wrapped
    finally:
        torch.distributed.destroy_process_group()
    for mine, theirs in zip(net.parameters(), eager.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad)


def test_threads(loaded: LoadedModule, x: torch.Tensor) -> None:
    net, eager = layers().eval(), layers().eval()
    expected = eager(x)
    loaded.attach(net)
    wrong: list[object] = []

    def call() -> None:
        try:
            for _ in range(50):
                torch.testing.assert_close(net(x), expected)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
