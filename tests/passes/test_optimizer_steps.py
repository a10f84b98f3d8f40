"""Optimizer steps of an unmodified script, recorded and replayed: parameters and state equal eager's, and unsupported
steps run in eager."""

from __future__ import annotations

import contextlib
import json
import re
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import aot_backward as ab
from aot_backward.recording.optimizer_steps import traced_step
from aot_backward_runtime import load
from aot_backward_runtime.optimizer_steps import interception

from ..commands.test_cli import called as aot_backward
from ..support import golden_files
from ..support.exports import shared
from ..support.golden_packages import momentum
from ..support.packages import python

pytestmark = pytest.mark.usefixtures("one_thread")
Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
KINDS: dict[str, Make] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "AdamW amsgrad fused": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2), amsgrad=True, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-2, nesterov=True),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, centered=True, momentum=0.5),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=1e-2),
    "Rprop": lambda p: torch.optim.Rprop(p),
}
SLOW: dict[str, Make] = {
    "Adam": lambda p: torch.optim.Adam(p, weight_decay=1e-2, maximize=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr_decay=0.1, initial_accumulator_value=0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adamax": lambda p: torch.optim.Adamax(p),
    "ASGD": lambda p: torch.optim.ASGD(p, t0=3.0),
}
ALWAYS_COMPILED = {"SGD", "Adagrad"}  # the others create their state in the first step


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2, bias=False))


def give_gradients(module: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for p in module.parameters():
        p.grad = torch.randn(p.shape, generator=generator) / 4


def trained(
    make: Make, steps: int, each: Callable[[int, torch.optim.Optimizer], object] = lambda step, optimizer: None
) -> Any:
    """Return the parameters and the optimizer after ``steps``; ``each`` is called before every step."""
    module = net()
    optimizer = make(module.parameters())
    for step in range(steps):
        give_gradients(module, step)
        each(step, optimizer)
        optimizer.step()
    return list(module.parameters()), optimizer


def same(ours: Any, eager: Any) -> None:
    """Compare parameters and the whole state."""
    for a, e in zip(ours[0], eager[0], strict=True):
        torch.testing.assert_close(a, e, rtol=2e-5, atol=1e-6)
    a_state, e_state = ours[1].state_dict(), eager[1].state_dict()
    assert a_state["param_groups"] == e_state["param_groups"]
    torch.testing.assert_close(a_state["state"], e_state["state"], rtol=2e-5, atol=1e-6)


def recorded(kinds: dict[str, Make], path: Path) -> None:
    with ab.record(path, tune="none") as recording:
        for make in kinds.values():
            trained(make, 3)
    assert not recording.skipped, recording.skipped


def package() -> Path:
    """Return the recorded package. Do not write to it."""
    return shared("optimizer-steps", lambda path: recorded(KINDS, path))


@pytest.mark.parametrize("name", KINDS)
def test_ten_steps_equal_eagers(name: str) -> None:
    with ab.replay(package()) as replaying:
        ours = trained(KINDS[name], 10)
    same(ours, trained(KINDS[name], 10))
    first = name not in ALWAYS_COMPILED
    assert (replaying.report.steps, dict(replaying.report.eager_steps)) == (
        10 - first,
        {"the optimizer has no state yet": 1} if first else {},
    )


def test_ten_steps_of_the_others(tmp_path: Path) -> None:
    recorded(SLOW, tmp_path / "slow.pt2")
    for name, make in SLOW.items():
        with ab.replay(tmp_path / "slow.pt2") as replaying:
            ours = trained(make, 10)
        same(ours, trained(make, 10))
        assert replaying.report.steps == 10 - (name not in ALWAYS_COMPILED), name


def test_a_parameter_with_gaps_in_memory(tmp_path: Path) -> None:
    """The parameter is some columns of a wider tensor, as ``torch.linalg.lstsq`` returns. The memory between its rows
    does not change."""

    def trained() -> list[torch.Tensor]:
        torch.manual_seed(0)
        whole = torch.randn(3, 20)
        part = nn.Parameter(whole[:, :6])
        optimizer = torch.optim.Adam([part])
        for _ in range(5):
            part.grad = part.detach().sin()
            optimizer.step()
        return [whole, *optimizer.state[part].values()]

    with ab.record(tmp_path / "gaps.pt2", tune="none") as recording:
        expected = trained()
    assert not recording.skipped, recording.skipped
    with ab.replay(tmp_path / "gaps.pt2") as replaying:
        found = trained()
    assert replaying.report.steps == 4, dict(replaying.report.eager_steps)
    torch.testing.assert_close(found, expected)


def test_an_expanded_gradient_is_left_to_eager(tmp_path: Path) -> None:
    with ab.record(tmp_path / "expanded.pt2", tune="none") as recording:
        part = nn.Parameter(torch.ones(3, 4))
        optimizer = torch.optim.SGD([part])
        for _ in range(3):
            part.grad = torch.ones(()).expand(3, 4)
            optimizer.step()
    assert "expanded" in str(recording.skipped) and not (tmp_path / "expanded.pt2").exists()


def test_numbers_are_those_of_the_moment() -> None:
    def schedule(step: int, optimizer: torch.optim.Optimizer) -> None:
        (group,) = optimizer.param_groups
        group["lr"], group["betas"] = 0.1 / (step + 1), (0.8 + step / 100, 0.99)
        group["initial_lr"] = 0.5  # schedulers add this

    with ab.replay(package()) as replaying:
        ours = trained(KINDS["AdamW"], 8, schedule)
    same(ours, trained(KINDS["AdamW"], 8, schedule))
    assert replaying.report.steps == 7

    with ab.replay(package()) as replaying:
        ours = scheduled()
    same(ours, scheduled())
    assert replaying.report.steps == 7


def scheduled() -> Any:
    module = net()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 8)
    for step in range(8):
        give_gradients(module, step)
        optimizer.step()
        scheduler.step()
    return list(module.parameters()), optimizer


def between(step: int, begin: int, end: int) -> bool:
    return begin <= step < end


def no_weight_decay(step: int, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["weight_decay"] = 0.0 if between(step, 3, 5) else 1e-2


def absent(step: int, optimizer: torch.optim.Optimizer) -> None:
    if between(step, 3, 5):
        optimizer.param_groups[0]["params"][1].grad = None


def transposed(step: int, optimizer: torch.optim.Optimizer) -> None:
    if between(step, 3, 5):
        p = optimizer.param_groups[0]["params"][0]
        p.grad = p.grad.t().contiguous().t()


def sparse(step: int, optimizer: torch.optim.Optimizer) -> None:
    if between(step, 3, 5):
        p = optimizer.param_groups[0]["params"][0]
        p.grad = p.grad.to_sparse(1)


def flipped(step: int, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["maximize"] = between(step, 3, 5)


def own_gradient(step: int, optimizer: torch.optim.Optimizer) -> None:
    if between(step, 3, 5):
        p = optimizer.param_groups[0]["params"][0]
        p.grad = p.detach()


def forgotten(step: int, optimizer: torch.optim.Optimizer) -> None:
    if step == 3:
        optimizer.state.clear()


@pytest.mark.parametrize(
    ("name", "each", "steps", "words"),
    [
        ("AdamW", no_weight_decay, 7, "param_groups[0]['weight_decay'] is 0; the code was compiled for"),
        ("AdamW", absent, 7, "the gradient of parameter 0.1 is None"),
        ("AdamW", transposed, 7, "param_groups[0]['params'][0].grad has other strides"),
        ("SGD", sparse, 8, "param_groups[0]['params'][0].grad has layout torch.sparse_coo"),
        ("AdamW", flipped, 7, "param_groups[0]['maximize'] is True; False was recorded"),
        ("SGD momentum", own_gradient, 7, "a gradient shares memory with param_groups[0]['params'][0]"),
        ("AdamW", forgotten, 8, "the optimizer has no state yet"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_what_does_not_fit_goes_to_eager_and_comes_back(
    name: str, each: Callable[[int, torch.optim.Optimizer], object], steps: int, words: str
) -> None:
    with ab.replay(package()) as replaying:
        ours = trained(KINDS[name], 10, each)
    same(ours, trained(KINDS[name], 10, each))
    assert any(words in reason for reason in replaying.report.eager_steps), replaying.report.eager_steps
    assert 5 <= replaying.report.steps <= steps


def halved(step: int, optimizer: torch.optim.Optimizer) -> None:
    if step == 4:
        own = optimizer.state[optimizer.param_groups[0]["params"][1]]
        own["exp_avg"] = own["exp_avg"] / 2


def exchanged(step: int, optimizer: torch.optim.Optimizer) -> None:
    """Exchange two tensors between their keys, in the same order."""
    if step == 4:
        p = optimizer.param_groups[0]["params"][1]
        own = optimizer.state[p]
        optimizer.state[p] = {"step": own["step"], "exp_avg_sq": own["exp_avg"].abs_(), "exp_avg": own["exp_avg_sq"]}


@pytest.mark.parametrize("each", [halved, exchanged])
def test_state_that_a_script_puts_in_the_place_of_the_optimizers(
    each: Callable[[int, torch.optim.Optimizer], object],
) -> None:
    with ab.replay(package()) as replaying:
        ours = trained(KINDS["AdamW"], 8, each)
    same(ours, trained(KINDS["AdamW"], 8, each))
    assert replaying.report.steps == 7


def spoilt(step: int, optimizer: torch.optim.Optimizer) -> None:
    if step == 4:
        del optimizer.param_groups[0]["lr"]


def no_number(step: int, optimizer: torch.optim.Optimizer) -> None:
    if step == 4:
        optimizer.param_groups[0]["eps"] = "small"


@pytest.mark.parametrize("each", [spoilt, no_number])
def test_errors_of_eager_are_its_own(each: Callable[[int, torch.optim.Optimizer], object]) -> None:
    with pytest.raises(Exception) as expected:
        trained(KINDS["AdamW"], 8, each)
    with ab.replay(package()) as replaying, pytest.raises(expected.type, match=re.escape(str(expected.value))):
        trained(KINDS["AdamW"], 8, each)
    assert replaying.report.steps == 3 and any("cannot be read" in reason for reason in replaying.report.eager_steps)


@golden_files.needed
def test_a_gradient_that_was_not_there_when_it_was_recorded() -> None:
    def run() -> list[torch.Tensor]:
        _, optimizer = momentum(3)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for p in parameters:
            p.grad = torch.ones_like(p)
        optimizer.step()
        return parameters

    with ab.replay(golden_files.FOLDER / "1.11-updates.pt2") as replaying:
        ours = run()
    torch.testing.assert_close(ours, run(), rtol=1e-5, atol=1e-6)
    assert (
        replaying.report.steps == 2
        and "a parameter has a gradient, and had none when it was recorded" in replaying.report.eager_steps
    )


def test_hooks_and_closures() -> None:
    def run() -> Any:
        seen: list[Any] = []
        module = net()
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        optimizer.register_step_pre_hook(lambda o, args, kwargs: seen.append(("before", module[0].weight.sum().item())))
        optimizer.register_step_post_hook(lambda o, args, kwargs: seen.append(("after", module[0].weight.sum().item())))
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = module(x).square().mean()
            loss.backward()
            return loss

        losses = [optimizer.step(closure) for _ in range(5)]
        return (list(module.parameters()), optimizer), seen, losses

    with ab.replay(package()) as replaying:
        ours, seen, losses = run()
    eager, expected, wanted = run()
    same(ours, eager)
    assert replaying.report.steps == 4 and [w for w, _ in seen] == [w for w, _ in expected]
    torch.testing.assert_close([v for _, v in seen], [v for _, v in expected], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.stack(losses), torch.stack(wanted), rtol=1e-4, atol=1e-6)


def test_profilers_and_hooks_of_all_optimizers_see_each_step() -> None:
    calls = []
    path = package()
    handles = [
        register_optimizer_step_pre_hook(lambda *args: calls.append("before")),
        register_optimizer_step_post_hook(lambda *args: calls.append("after")),
    ]
    with ab.replay(path) as replaying:
        ours = trained(KINDS["AdamW"], 3)
        for handle in handles:
            handle.remove()
        assert calls == 3 * ["before", "after"]
        with torch.autograd.profiler.profile() as profile:
            trained(KINDS["AdamW"], 2)
            torch.optim.AdamW(ours[0]).zero_grad()
        names = [event.name for event in profile.function_events]
        assert names.count("Optimizer.step#AdamW.step") == 2 and "Optimizer.zero_grad#AdamW.zero_grad" in names
    same(ours, trained(KINDS["AdamW"], 3))
    assert len(calls) == 6 and replaying.report.steps == 3


def test_hooks_of_all_optimizers_are_not_called_for_what_is_compiled(tmp_path: Path) -> None:
    calls = []
    handle = register_optimizer_step_post_hook(lambda *args: calls.append(1))
    try:
        with ab.record(tmp_path / "hooked.pt2", tune="none"):
            trained(KINDS["SGD"], 3)
    finally:
        handle.remove()
    assert len(calls) == 3 and (tmp_path / "hooked.pt2").exists()


def test_hooks_of_an_optimizer_that_was_made_within_the_context() -> None:
    script = """
import torch, sys
import aot_backward as ab
with ab.replay(sys.argv[1]):
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([p], lr=0.1)
p.grad = torch.ones(2)
optimizer.register_step_post_hook(lambda *args: print("called"))
optimizer.step()
"""
    assert python(script, package()).stdout == "called\n"


def test_zero_grad() -> None:
    """The result equals eager's, also if gradients become zeros."""
    results = []
    for context in (lambda: ab.replay(package()), contextlib.nullcontext):
        first, second = nn.Linear(2, 2), nn.Linear(2, 2)
        optimizer = torch.optim.SGD(
            [{"params": first.parameters()}, {"params": second.parameters(), "lr": 0.1}], lr=0.5
        )
        with context():
            give_gradients(first, 0)
            kept = first.weight.grad
            optimizer.zero_grad()
            gone = [p.grad for p in (*first.parameters(), *second.parameters())]
            give_gradients(second, 1)
            stays = second.weight.grad
            optimizer.zero_grad(set_to_none=False)
            assert second.weight.grad is stays
        results.append((gone, kept, stays, first.weight.grad))
    (gone, kept, stays, absent), expected = results
    assert gone == [None] * 4 == expected[0] and absent is expected[3] is None
    torch.testing.assert_close((kept, stays), expected[1:3], rtol=0, atol=0)
    assert torch.count_nonzero(kept) and not torch.count_nonzero(stays)


class Doubling(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        super().step(closure)
        return super().step()


def test_a_class_of_ones_own_runs_in_eager(tmp_path: Path) -> None:
    with ab.replay(package()) as replaying:
        ours = trained(lambda p: Doubling(p, lr=0.1), 3)
    same(ours, trained(lambda p: Doubling(p, lr=0.1), 3))
    assert replaying.report.steps == 0 and sum(replaying.report.eager_steps.values()) == 6
    with ab.record(tmp_path / "own.pt2", tune="none") as recording:
        trained(lambda p: Doubling(p, lr=0.1), 3)
    assert any("Doubling is not a supported optimizer of torch.optim" in reason for reason in recording.skipped)
    assert not (tmp_path / "own.pt2").exists()


def test_a_run_goes_on_without_replay_and_with_it() -> None:
    """This includes a checkpoint, and moments that move to other memory."""
    make = KINDS["AdamW"]

    def run(context: Callable[[], Any]) -> Any:
        module = net()
        optimizer = make(module.parameters())
        for part in range(4):
            with context() if part != 1 else warnings.catch_warnings():
                for step in range(3):
                    give_gradients(module, 10 * part + step)
                    optimizer.step()
            if part == 1:
                state = optimizer.state_dict()
                optimizer = make(module.parameters())
                optimizer.load_state_dict(state)
            if part == 2:
                for p in module.parameters():
                    optimizer.state[p]["exp_avg"] = optimizer.state[p]["exp_avg"].clone()
                    p.data = p.data.clone()
        return list(module.parameters()), optimizer

    counts = []

    def replay() -> Any:
        counts.append(ab.replay(package()))
        return counts[-1]

    ours = run(replay)
    same(ours, run(warnings.catch_warnings))
    assert [c.report.steps for c in counts] == [2, 3, 3]


def test_gradients_scaled_by_a_grad_scaler() -> None:
    def run() -> Any:
        module = net()
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(6):
            x = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            scaler.scale(module(x).square().mean() * (float("inf") if step == 3 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
        return list(module.parameters()), optimizer

    with ab.replay(package()) as replaying:
        ours = run()
    same(ours, run())
    assert replaying.report.steps == 4  # one created the state, one was skipped


def test_two_optimizers_of_one_kind_and_parameters_that_share_memory() -> None:
    def run() -> list[Any]:
        modules = [net(), net()]
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in modules]
        for step in range(5):
            for i, (module, optimizer) in enumerate(zip(modules, optimizers, strict=True)):
                give_gradients(module, 2 * step + i)
                optimizer.step()
        return [(list(m.parameters()), o) for m, o in zip(modules, optimizers, strict=True)]

    with ab.replay(package()) as replaying:
        ours = run()
    for a, e in zip(ours, run(), strict=True):
        same(a, e)
    assert replaying.report.steps == 8

    def overlapping() -> Any:
        module = net()
        flat = torch.randn(8 * 4 + 8 + 2 * 8 - 4, generator=torch.Generator().manual_seed(5))
        for p, start in zip(module.parameters(), (0, 28, 36), strict=True):  # the bias begins inside the weight
            p.data = flat[start : start + p.numel()].view(p.shape)
        optimizer = KINDS["SGD"](module.parameters())
        for step in range(4):
            give_gradients(module, step)
            optimizer.step()
        return list(module.parameters()), optimizer

    with ab.replay(package()) as replaying:
        ours = overlapping()
    same(ours, overlapping())
    assert replaying.report.steps == 0 and any("share memory" in reason for reason in replaying.report.eager_steps)


def test_autograd_sees_that_parameters_were_written() -> None:
    with ab.replay(package()):
        module = net()
        optimizer = KINDS["AdamW"](module.parameters())
        for step in range(3):
            give_gradients(module, step)
            loss = module(torch.ones(1, 4)).sum()
            optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_what_eager_makes_faster_is_left_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "slow.pt2"
    measured = traced_step._speed
    said: list[Any] = []

    def slower(*args: Any) -> Any:
        speed = measured(*args)
        assert speed is not None and [t.name for t in speed.timings] == ["eager", "compiled"]
        said.append(speed)
        return traced_step.dataclasses.replace(speed, chosen="eager")

    monkeypatch.setattr(traced_step, "_speed", slower)
    with ab.record(path, tune="quick") as recording:
        trained(KINDS["SGD"], 3)
    assert len(said) == 1 and any("the optimizer step of SGD: eager" in words for words in recording.slower)
    assert not recording.compiled_steps and not path.exists()


def test_a_wrong_step_is_not_shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = traced_step.optimizer_graph.trace

    def wrong(*args: Any) -> Any:
        update = right(*args)
        for node in update.graph.graph.find_nodes(op="call_function", target=torch.ops.aten.sub.Tensor):
            node.target = torch.ops.aten.add.Tensor
        for node in update.graph.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor):
            node.update_arg(1, node.args[0])
        update.graph.recompile()
        return update

    monkeypatch.setattr(traced_step.optimizer_graph, "trace", wrong)
    with ab.record(tmp_path / "wrong.pt2", tune="none") as recording:
        trained(KINDS["SGD"], 3)
    assert any("is wrong:" in reason and "it differs from eager's step by" in reason for reason in recording.skipped), (
        recording.skipped
    )
    assert not (tmp_path / "wrong.pt2").exists()


def test_classes_have_their_own_step_afterwards() -> None:
    for kind in interception.SERVED:
        # The first instance of a class makes PyTorch put hooks around the class's step
        kind([nn.Parameter(torch.ones(2, 2))])
    before = {kind: vars(kind).get("step") for kind in interception.SERVED}
    with pytest.raises(KeyError), ab.replay(package()):
        assert vars(torch.optim.SGD)["step"] is not before[torch.optim.SGD]
        with ab.replay(package(), optimizer=False):
            pass
        raise KeyError
    assert {kind: vars(kind).get("step") for kind in interception.SERVED} == before
    with ab.replay(package()):
        module = net()
        optimizer = KINDS["SGD"](module.parameters())
        kept = optimizer.step
    give_gradients(module, 0)
    kept()
    expected, _ = trained(KINDS["SGD"], 1)
    torch.testing.assert_close(list(module.parameters()), expected)


SCRIPT = """
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
for step in range(12):
    optimizer.zero_grad()
    net(torch.randn(4 + step % 2, 8)).square().mean().backward()
    optimizer.step()
print(sum(p.double().sum().item() for p in net.parameters()))
"""


def test_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    recording = aot_backward("record", "-o", "bw.pt2", "--tune", "none", "--", "train.py")
    assert recording.stderr.endswith("1 structure compiled and steps of AdamW\n"), recording.stderr
    text = aot_backward("inspect", "bw.pt2").stdout
    assert (
        "Steps of torch.optim.adamw.AdamW\n    Parameters: 4 with a gradient; state: exp_avg, exp_avg_sq, step\n"
        in text
    )
    (update,) = json.loads(aot_backward("inspect", "--json", "bw.pt2").stdout)["entries"]["backward"]["updates"]
    assert (update["optimizer"], update["trained"], update["verdict"]["status"]) == (
        "torch.optim.adamw.AdamW",
        4,
        "verified",
    )
    replayed = aot_backward("replay", "--json", "bw.pt2", "--", "train.py")
    assert json.loads(replayed.stderr)["optimizer_steps"] == 11
    assert (
        aot_backward("replay", "bw.pt2", "--", "train.py").stderr
        == "12 of 12 backward passes (1 binding, 11 hits) and 11 of 12 optimizer steps (1 made the state, in eager) ran compiled\n"
    )
    alone = aot_backward("replay", "--json", "--no-optimizer", "bw.pt2", "--", "train.py")
    assert json.loads(alone.stderr)["optimizer_steps"] == 0
    assert (
        float(replayed.stdout)
        == pytest.approx(float(alone.stdout), rel=1e-5)
        == pytest.approx(float(recording.stdout), rel=1e-5)
    )
    rebuilt = aot_backward("rebuild", "bw.pt2", "-o", "other.pt2", "--target", "cpu:sse4")
    assert rebuilt.exit_code == 0 and load("other.pt2").recorded_updates()[0][0].verdict.status == "verified"
    again = aot_backward("replay", "--json", "other.pt2", "--", "train.py")
    assert json.loads(again.stderr)["optimizer_steps"] == 11
    assert "and 1 optimizer step:" in aot_backward("verify", "bw.pt2").stdout


def test_kinds_of_steps_that_take_turns_are_all_compiled(tmp_path: Path) -> None:
    """Every second step omits a layer."""

    def steps(count: int) -> list[torch.Tensor]:
        torch.manual_seed(0)
        first, second = nn.Linear(4, 4), nn.Linear(4, 4)
        optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.01, momentum=0.9)
        for step in range(count):
            x = torch.tanh(first(torch.linspace(-1, 1, 8).view(2, 4) + step / 10))
            optimizer.zero_grad()
            (second(x) if step % 2 else x).square().sum().backward()
            optimizer.step()
        return [p.detach() for p in (*first.parameters(), *second.parameters())]

    with ab.record(tmp_path / "turns.pt2", tune="none"):
        steps(10)
    with ab.replay(tmp_path / "turns.pt2") as session:
        ours = steps(20)
    torch.testing.assert_close(ours, steps(20), rtol=1e-5, atol=1e-6)
    assert session.report.steps >= 16, str(session.report)  # the first of each kind creates its state
