"""The state of a loaded training step: exchanged with eager, kept over processes, and intact after every kind of
misuse."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import aot_backward as ab
from aot_backward_runtime import ExportError, InputError, StateError, WeightsError, load

from ..support.step_cases import (
    CLIP,
    FAMILIES,
    SCHEDULES,
    assert_equal,
    assert_same_change,
    batch,
    eager,
    everything,
    labelled,
    odd_package,
    package,
    weighted_package,
    words,
)


class _as_it_was:
    """Check that a module, an optimizer and the random state are unchanged: values, objects, modes, gradients,
    attributes."""

    def __init__(self, module: nn.Module, optimizer: Any, *more: nn.Module):
        self.modules, self.optimizer = (module, *more), optimizer

    def _look(self) -> list[Any]:
        out: list[Any] = [("random", torch.get_rng_state().tolist())]
        for module in self.modules:
            for name, m in module.named_modules():
                out.append((name, m.training, sorted(vars(m))))
            for name, t in (*module.named_parameters(), *module.named_buffers()):
                grad = None if t.grad is None else (id(t.grad), t.grad.tolist())
                out.append((name, id(t), t.data_ptr(), t.tolist(), t.requires_grad, grad))
        if isinstance(self.optimizer, torch.optim.Optimizer):
            for p, slots in self.optimizer.state.items():
                out.append(
                    (id(p), {k: (id(v), v.tolist() if isinstance(v, torch.Tensor) else v) for k, v in slots.items()})
                )
            for group in self.optimizer.param_groups:
                out.append({k: [id(p) for p in v] if k == "params" else v for k, v in group.items()})
            out.append({k: v for k, v in vars(self.optimizer).items() if k not in ("state", "param_groups", "_params")})
            out.append(
                (
                    id(self.optimizer.state),
                    id(self.optimizer.param_groups),
                    [id(g) for g in self.optimizer.param_groups],
                )
            )
        return copy.deepcopy(out)

    def __enter__(self) -> None:
        self.before = self._look()

    def __exit__(self, *_: object) -> None:
        for old, new in zip(self.before, self._look(), strict=True):
            assert old == new


def _train(training: Any, *numbers: int) -> list[float]:
    torch.manual_seed(9)
    return [float(training(*batch(i))) for i in numbers]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_state_goes_both_ways_in_the_middle_of_a_training(name: str) -> None:
    first, second, step = eager(name), eager(name), load(package(name)).step()
    _train(first, 0, 1, 2)
    step.load_state_dict(first.state_dict())
    assert_equal(everything(step), everything(first))
    before = everything(first)
    torch.testing.assert_close(_train(step, 3, 4, 5), _train(first, 3, 4, 5), rtol=1e-4, atol=1e-5)
    assert_same_change(step, first, before)
    state = step.state_dict()
    second.load_state_dict(copy.deepcopy(state))  # eager keeps the given tensors
    assert_equal(everything(second), everything(step))
    before = everything(second)
    torch.testing.assert_close(_train(second, 6, 7), _train(step, 6, 7), rtol=1e-4, atol=1e-5)
    assert_same_change(step, second, before)
    step.load_state_dict(state)  # a copy that neither training has changed
    assert_equal(everything(step), before)
    tensors = [t for s in state["optimizer"]["state"].values() for t in s.values()]
    assert len({t.data_ptr() for t in tensors}) == len(tensors)  # eager increments them in place


def test_states_as_older_versions_of_torch_wrote_them() -> None:
    """``step`` is a Python number, groups are lists, and a step starts over."""
    step, other = load(package("Adam")).step(), eager("Adam")
    fresh = copy.deepcopy(other.state_dict())
    _train(other, 0, 1)
    state = copy.deepcopy(other.state_dict())
    for slots in state["optimizer"]["state"].values():
        slots["step"] = int(slots["step"])
    for group in state["optimizer"]["param_groups"]:
        group["betas"] = list(group["betas"])
    step.load_state_dict(state)
    assert_equal(everything(step), everything(other))
    assert isinstance(step.param_groups[0]["betas"], tuple)
    step.load_state_dict(fresh)
    assert step.state == {} and step.state_dict()["optimizer"]["state"] == {}
    torch.testing.assert_close(_train(step, 0, 1), _train(eager("Adam"), 0, 1), rtol=1e-4, atol=1e-5)


SCRIPT = """
import sys, torch
base = set(sys.modules)
from aot_backward_runtime import load
step = load(sys.argv[1]).step()
schedule = torch.optim.lr_scheduler.OneCycleLR(step, [0.02, 0.01], total_steps=12)
imported = set(sys.modules) - base
schedule.load_state_dict(step.resume(sys.argv[2]))
assert (step.count, step.accumulated) == (5, 2)
batches = torch.load(sys.argv[3], weights_only=True)
losses = []
for i, (x, y) in enumerate(batches):
    losses.append(step(x, y))
    schedule.step()
state = {str(i): {k: t.clone() for k, t in s.items()} for i, s in enumerate(step.state.values())}
torch.save([losses, dict(step.parameters), dict(step.buffers), state, torch.get_rng_state(), schedule.get_last_lr()], sys.argv[4])
step.save(sys.argv[2] + ".again")
imported = set(sys.modules) - base
forbidden = ("torch._dynamo", "torch._inductor", "sympy", "onnx", "click", "aot_backward", "aot_backward_exporters", "safetensors")
bad = sorted(m for m in imported if any(m == f or m.startswith(f + ".") for f in forbidden))
assert not bad, f"imported {bad[:5]}"
print("thin")
"""


def test_stopped_and_resumed_in_a_new_process_bit_for_bit(tmp_path: Path) -> None:
    """Losses, parameters, buffers, state, dropout masks and the schedule continue, with gradients of two calls
    accumulated. The new process has no compiler and imports no tracer."""
    step = load(package("Adam")).step()
    schedule = SCHEDULES["Adam"](step)
    torch.manual_seed(10)
    for i in range(5):
        step(*batch(i))
        schedule.step()
    step(*batch(5), update=False)
    step(*batch(6), update=False)
    step.save(tmp_path / "state", extra=schedule.state_dict())
    torch.save([batch(i) for i in range(7, 12)], tmp_path / "batches")
    losses = []
    for i in range(7, 12):
        losses.append(step(*batch(i)))
        schedule.step()
    (empty := tmp_path / "empty").mkdir()
    environment = {
        "PATH": str(empty),
        "HOME": str(empty),
        "AOT_BACKWARD_CACHE": str(empty / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    command = [
        sys.executable,
        "-c",
        SCRIPT,
        str(package("Adam")),
        *(str(tmp_path / n) for n in ("state", "batches", "out")),
    ]
    done = subprocess.run(command, capture_output=True, text=True, env={**environment}, timeout=900)
    assert done.returncode == 0 and done.stdout == "thin\n", done.stderr
    theirs = torch.load(tmp_path / "out", weights_only=True)
    assert [float(v) for v in losses] == [float(v) for v in theirs[0]]
    assert_equal(theirs[1], step.parameters)
    assert_equal(theirs[2], step.buffers)
    assert len(theirs[3]) == 5
    for slots, own in zip(theirs[3].values(), step.state.values(), strict=True):
        assert_equal(slots, own)
    assert torch.equal(theirs[4], torch.get_rng_state()) and theirs[5] == schedule.get_last_lr()
    count = step.count
    assert step.resume(tmp_path / "state.again") is None
    assert step.count == count == 10
    assert_equal(theirs[1], step.parameters)


@pytest.fixture
def adam() -> Any:
    step = load(package("Adam")).step()
    step(*batch(0))
    return step


def _untouched(
    step: Any, misuse: Callable[[], Any], error: Any, message: str, next_call: Callable[[], Any] | None = None
) -> None:
    """Check that ``misuse`` raises and changes nothing, and that the next call is unaffected."""
    twin = copy.deepcopy(step)
    kept, options = everything(step), [{k: v for k, v in g.items() if k != "params"} for g in step.param_groups]
    counts = (step.count, step.skipped, step.accumulated)
    with pytest.raises(error, match=message):
        misuse()
    assert_equal(everything(step), kept)
    assert options == [{k: v for k, v in g.items() if k != "params"} for g in step.param_groups]
    assert counts == (step.count, step.skipped, step.accumulated)
    if next_call is None:
        assert _train(step, 3, 4) == _train(twin, 3, 4)
        assert_equal(everything(step), everything(twin))


X, Y = batch(1)


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((X.double(), Y), {}, r"x has dtype torch\.float64"),
        ((X, Y.long()), {}, r"target has dtype torch\.int64"),
        ((X[0], Y), {}, "x has 1 dim"),
        ((X, Y[:, :2]), {}, "target has size 2 in dimension 1; expected 3"),
        ((X, Y[:4]), {}, r"target has size 4 in dimension 0; expected 5 \(rows, as x\.shape\[0\] says\)"),
        ((X[:1], Y[:1]), {}, r"rows \(x\.shape\[0\]\) is 1; expected at least 2"),
        ((X,), {}, "target"),
        ((X, Y, Y), {}, "3"),
        ((X, Y), {"weight": 1}, "weight"),
        ((X, None), {}, "target"),
        ((X, Y.numpy()), {}, "target"),
        ((X.to("meta"), Y), {}, "x"),
        ((X.to_sparse(), Y), {}, "x"),
        ((torch.nn.Parameter(X), Y), {"update": None, "mask": X}, "mask"),
    ],
)
def test_a_wrong_argument_is_named_and_changes_nothing(adam: Any, args: Any, kwargs: Any, message: str) -> None:
    _untouched(adam, lambda: adam(*args, **kwargs), InputError, message)


def test_numbers_that_the_code_does_not_hold_for(adam: Any) -> None:
    first, second = adam.param_groups
    for misuse, message in (
        (
            lambda: first.update(weight_decay=0.0),
            r"param_groups\[0\]\['weight_decay'\] = 0: Adam computes differently for this value; compiled for any but 0",
        ),
        (
            lambda: second.update(weight_decay=0.1),
            r"param_groups\[1\]\['weight_decay'\] = 0.1: Adam .*; compiled for 0 alone",
        ),
        (lambda: second.update(lr=0.5, weight_decay=0.1), "weight_decay"),
        (
            lambda: first.update(amsgrad=True),
            r"param_groups\[0\]\['amsgrad'\] is fixed in the compiled step at False, got True",
        ),
        (lambda: first.update(maximize=1), "maximize"),
        (lambda: first.update(betas=0.9), r"betas'\] is 0.9; expected 2 numbers"),
        (lambda: first.update(betas=(0.9,)), "expected 2 numbers"),
        (lambda: first.update(betas=(0.8, "high")), r"betas'\]\[1\] is 'high'; expected a number"),
        (lambda: first.update(lr="fast"), r"param_groups\[0\]\['lr'\] is 'fast'; expected a number"),
        (lambda: first.update(lr=None), "expected a number"),
        (lambda: first.update(lr=torch.ones(2)), "expected a number"),
        (lambda: first.update(params=[]), "the parameters of a group are fixed"),
        (lambda: first.pop("lr"), "cannot be removed"),
        (lambda: first.pop("amsgrad"), "cannot be removed"),
        (first.clear, "cannot be cleared"),
        (first.popitem, "by its name"),
        (lambda: adam.add_param_group({"params": []}), "parameter groups of a compiled step are fixed"),
        (lambda: adam.register_step_post_hook(print), "does not call hooks"),
        (lambda: adam.step(lambda: 1.0), "takes no closure"),
        (adam.step, "no gradients have been accumulated"),
    ):
        _untouched(adam, misuse, InputError, message, lambda: None)
    _untouched(adam, adam.step, InputError, "no gradients have been accumulated")
    twin = copy.deepcopy(adam)
    for group, value in ((adam.param_groups[0], torch.tensor(0.125)), (twin.param_groups[0], 0.125)):
        group["lr"] = value
        group["mine"] = group.setdefault("initial_lr", 1)
    assert adam.param_groups[0]["lr"] == 0.125 and adam.param_groups[0].pop("mine") == 1
    assert _train(adam, 1, 2, 3) == _train(twin, 1, 2, 3)


def test_gradients_that_cannot_wait() -> None:
    step = load(package("RMSprop")).step()
    _train(step, 0)
    _untouched(
        step,
        lambda: step(*batch(1), update=False),
        InputError,
        "exported without gradient accumulation: export it with accumulate=True",
    )


def _changed(*path: Any, to: Any = ...) -> Callable[[Any], None]:
    """Return a function that deletes the item at ``path`` of a state, sets it to ``to``, or applies ``to`` to it."""

    def change(state: Any) -> None:
        for key in path[:-1]:
            state = state[key]
        if to is ...:
            del state[path[-1]]
        else:
            state[path[-1]] = to(state[path[-1]]) if callable(to) else to

    return change


MISFITS = {
    "no optimizer": (_changed("optimizer"), 'expected {"module"'),
    "no groups": (_changed("optimizer", "param_groups"), "needs 'state' and 'param_groups'"),
    "a parameter missing": (_changed("module", "first.weight"), r"missing \['first.weight'\]"),
    "a parameter more": (_changed("module", "other", to=X), r"unexpected \['other'\]"),
    "state missing": (_changed("optimizer", "state", 4, "exp_avg"), "'last.bias' has no 'exp_avg'"),
    "state of one missing": (_changed("optimizer", "state", 4), "'last.bias' has no"),
    "state more": (_changed("optimizer", "state", 0, "momentum_buffer", to=X), "momentum_buffer"),
    "state of one more": (_changed("optimizer", "state", 9, to={}), "9"),
    "state of another shape": (
        _changed("optimizer", "state", 0, "exp_avg_sq", to=torch.ones(8)),
        r"'exp_avg_sq' of 'last.weight' has shape",
    ),
    "unequal counts": (
        _changed("optimizer", "state", 1, "step", to=torch.tensor(7.0)),
        "'step' is 2 for .* and 7 for 'first.weight'",
    ),
    "another layout": (
        _changed("optimizer", "param_groups", 0, "params", to=[0]),
        r"groups have \[1, 3\] parameters; .* \[2, 3\]",
    ),
    "a group missing": (_changed("optimizer", "param_groups", 1), r"groups have \[2\] parameters"),
    "a group without params": (_changed("optimizer", "param_groups", 1, "params"), "params"),
    "an option that is fixed": (
        _changed("optimizer", "param_groups", 0, "amsgrad", to=True),
        "is fixed in the compiled step",
    ),
    "a number that is not held for": (
        _changed("optimizer", "param_groups", 1, "weight_decay", to=0.1),
        "computes differently",
    ),
    "a number missing": (_changed("optimizer", "param_groups", 1, "lr"), "lr"),
    "an option missing": (_changed("optimizer", "param_groups", 1, "amsgrad"), "amsgrad"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_state_that_does_not_fit_changes_nothing(name: str, adam: Any) -> None:
    change, message = MISFITS[name]
    step = load(package("Adam")).step()
    _train(step, 5, 6)
    state = step.state_dict()
    change(state)
    _untouched(adam, lambda: adam.load_state_dict(state), (StateError, InputError), message)


def test_a_momentum_that_is_none() -> None:
    """Eager has it before the first step of a momentum: that step has no dampening."""
    step = load(weighted_package()).step()
    first = [float(step(*labelled(i))) for i in range(3)]
    other = load(weighted_package()).step()
    start = other.state_dict()
    start["optimizer"]["state"] = {0: {"momentum_buffer": None}, 1: {"momentum_buffer": None}}
    other.load_state_dict(start)
    assert [float(other(*labelled(i))) for i in range(3)] == first


def test_files_that_do_not_fit(adam: Any, tmp_path: Path) -> None:
    other = load(package("AdamW")).step()
    other.save(tmp_path / "adamw")
    load(odd_package()).step().save(tmp_path / "odd")
    load(weighted_package()).step().save(tmp_path / "weighted")
    adam.save(tmp_path / "good", extra={"epoch": 3})
    data = (tmp_path / "good").read_bytes()
    (tmp_path / "damaged").write_bytes(data[:-3] + bytes([data[-3] ^ 1]) + data[-2:])
    (tmp_path / "short").write_bytes(data[:-1])
    for name, message in {
        "adamw": "saved by torch.optim.adamw.AdamW, this is torch.optim.adam.Adam",
        "odd": "does not fit this step: it was saved by",
        "weighted": "does not fit this step",
        "damaged": "corrupt",
        "short": "cut short",
        "nowhere": "No such file",
    }.items():
        _untouched(adam, lambda name=name: adam.resume(tmp_path / name), StateError, message)
    with pytest.raises(StateError, match="cannot save training state"):
        adam.save(tmp_path / "no" / "folder")
    with pytest.raises(StateError, match="cannot save training state"):
        adam.save(tmp_path / "good", extra=object())
    assert adam.resume(tmp_path / "good") == {"epoch": 3} and adam.count == 1


def test_all_buffers_and_the_loss_are_saved(tmp_path: Path) -> None:
    """The forward changes a buffer that is not persistent and one of the loss function."""
    for path, call in (
        (odd_package(), lambda s, i: s(*words(4, i)[0], **words(4, i)[1])[0]),
        (weighted_package(), lambda s, i: s(*labelled(i))),
    ):
        step, again = load(path).step(), load(path).step()
        torch.manual_seed(11)
        for i in range(3):
            call(step, i)
        step.save(tmp_path / "state")
        expected = [float(call(step, i)) for i in range(3, 6)]
        again.resume(tmp_path / "state")
        assert [float(call(again, i)) for i in range(3, 6)] == expected
        assert_equal(everything(again), everything(step))


def test_a_copy_is_a_training_of_its_own(adam: Any) -> None:
    adam(*batch(7), update=False)
    adam.param_groups[0]["lr"] = 0.3
    other = copy.deepcopy(adam)
    kept = everything(other)
    ours = _train(adam, 1, 2)
    assert_equal(everything(other), kept)
    assert other.accumulated == 1 and _train(other, 1, 2) == ours
    assert_equal(everything(other), everything(adam))
    assert (
        copy.deepcopy(load(odd_package()).step().eval())(*words(4)[0], **words(4)[1])[0]
        == copy.deepcopy(load(odd_package()).step()).eval()(*words(4)[0], **words(4)[1])[0]
    )
    assert pickle.loads(pickle.dumps(adam.state_dict()))["count"] == adam.count


def test_parameters_are_written_in_place_or_bound_anew(adam: Any) -> None:
    twin = copy.deepcopy(adam)
    assert _train(adam, 1, 2) == _train(twin, 1, 2)
    with torch.no_grad():
        adam.parameters["last.weight"].mul_(2)
        twin.parameters["last.weight"].data = twin.parameters["last.weight"] * 2
        adam.buffers["norm.running_mean"].add_(1)
        twin.buffers["norm.running_mean"].add_(1)
    assert _train(adam, 1, 2, 3) == _train(twin, 1, 2, 3)
    assert_equal(everything(adam), everything(twin))
    next(iter(adam.state.values()))["exp_avg"].zero_()
    average = next(iter(twin.state.values()))["exp_avg"]
    average.data = torch.zeros_like(average)
    assert _train(adam, 1, 2, 3) == _train(twin, 1, 2, 3)
    assert_equal(everything(adam), everything(twin))
    good = adam.parameters["last.weight"].data
    for wrong, message in (
        (good.double(), r"last\.weight has dtype torch\.float64"),
        (good[:2], r"last\.weight has shape \(2, 8\)"),
    ):
        adam.parameters["last.weight"].data = wrong
        with pytest.raises(WeightsError, match=message):
            adam(*batch(4))
    adam.parameters["last.weight"].data = good
    assert _train(adam, 5) == _train(twin, 5) and adam.count == twin.count
    with pytest.raises(TypeError):
        adam.parameters["last.weight"] = good
    with pytest.raises(TypeError):
        next(iter(adam.state.values()))["exp_avg"] = good


def test_threads_take_turns() -> None:
    """Calls run one after another, in any order of threads. Equal batches give equal training."""
    step, alone = load(package("AdamW")).step().train(), load(package("AdamW")).step()
    for mine in (step, alone):
        torch.manual_seed(12)
        mine(*batch(1))
    threads = [threading.Thread(target=lambda: [step(*batch(1)) for _ in range(25)]) for _ in range(4)]
    torch.manual_seed(13)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.manual_seed(13)
    for _ in range(100):
        alone(*batch(1))
    assert step.count == alone.count == 101
    assert_equal(everything(step), everything(alone))


class Closure(torch.optim.SGD):
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            closure()
        return super().step()


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).abs()[:, :3]


class Empty(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 3)
        self.nothing = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.nothing.sum(0)


def _hooked() -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(nn.Linear(6, 3).parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


REFUSED_AT_EXPORT: dict[str, tuple[Callable[[nn.Module], Any], dict[str, Any], str]] = {
    "closures": (lambda m: Closure(m.parameters(), lr=0.1), {}, r"Closure\.step .*closure"),
    "hooks": (lambda _: _hooked(), {}, "the SGD has step hooks, which a compiled step would not call; remove them"),
    "another module": (
        lambda _: torch.optim.SGD(nn.Linear(6, 3).parameters(), lr=0.1),
        {},
        r"param_groups\[0\]\['params'\]\[0\], of shape \(3, 6\), is not a parameter of the module",
    ),
    "no optimizer": (lambda _: "SGD", {}, "optimizer is a builtins.str; expected a torch.optim.Optimizer"),
    "no scalar": (lambda m: torch.optim.SGD(m.parameters(), lr=0.1), {"loss_fn": lambda a, b: a - b}, "scalar"),
    "no gradient": (lambda m: torch.optim.SGD(m.parameters(), lr=0.1), {"loss_fn": lambda a, b: b.sum()}, "gradient"),
    "no module": (
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
        {"module": lambda x: x},
        "a training step needs a torch.nn.Module",
    ),
    "sparse gradients": (
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
        {"module": nn.Embedding(6, 3, sparse=True), "args": (torch.tensor([1, 2, 2]), torch.randn(3, 3))},
        "the gradient of 'weight': expected a dense tensor, got a sparse one.* sparse=False",
    ),
    "a complex parameter": (
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
        {"module": Complex()},
        "'weight' is complex, .*train its real view",
    ),
    "an empty parameter": (
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
        {"module": Empty()},
        "'nothing' has no elements; leave it out",
    ),
    "an infinite limit": (
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
        {"clip_norm": float("inf")},
        "clip_norm: expected a finite number from 0 on, got inf",
    ),
    "no target": (
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
        {"args": ()},
        "the last positional argument is its target",
    ),
}


@pytest.mark.parametrize("name", REFUSED_AT_EXPORT)
def test_what_cannot_be_exported_is_refused_and_left_as_it_was(name: str, tmp_path: Path) -> None:
    make, options, message = REFUSED_AT_EXPORT[name]
    module = options.get("module", nn.Linear(6, 3))
    optimizer = make(module if isinstance(module, nn.Module) else nn.Linear(6, 3))
    options = {"module": module, "args": batch(0), "loss_fn": nn.functional.mse_loss, **options}
    with (
        _as_it_was(module if isinstance(module, nn.Module) else nn.Module(), optimizer),
        pytest.raises(ExportError, match=message),
    ):
        ab.export_step(**options, optimizer=optimizer, path=tmp_path / "no.pt2")
    assert not list(tmp_path.iterdir())


def test_hooks_of_all_optimizers_are_refused(tmp_path: Path) -> None:
    net = nn.Linear(6, 3)
    with register_optimizer_step_pre_hook(lambda *_: None), pytest.raises(ExportError, match="has step hooks"):
        ab.export_step(
            net, batch(0), loss_fn=nn.MSELoss(), optimizer=torch.optim.SGD(net.parameters()), path=tmp_path / "no.pt2"
        )


def test_an_export_in_the_middle_of_a_training_starts_there_and_leaves_it(tmp_path: Path) -> None:
    """Export keeps existing gradients, a submodule in eval mode, and a loss with buffers. The graph is that of the
    shared package."""
    other = eager("AdamW")
    _train(other, 0, 1, 2)
    schedule = SCHEDULES["AdamW"](other.optimizer)
    for p in other.module.parameters():
        p.grad = torch.full_like(p, 7.0)
    other.module.drop.eval()
    rows = {0: torch.export.Dim("rows", min=2)}
    options: dict[str, Any] = {"loss_fn": nn.functional.mse_loss, "optimizer": other.optimizer, "clip_norm": CLIP}
    with _as_it_was(other.module, other.optimizer):
        path = ab.export_step(
            other.module, batch(0), dynamic_shapes={"x": rows, "target": rows}, path=tmp_path / "s.pt2", **options
        )
    step = load(path).step()
    assert_equal(everything(step), everything(other))
    assert step.param_groups[0]["initial_lr"] == 0.01
    other.optimizer.zero_grad()
    before = everything(other)
    torch.testing.assert_close(_train(step, 3, 4, 5), _train(other, 3, 4, 5), rtol=1e-4, atol=1e-5)
    schedule.step()
    assert_same_change(step, other, before)
    with pytest.raises(StateError, match="exported in the middle of a training: it has no initial state"):
        step.load_state_dict(eager("AdamW").state_dict())
