"""``export_step``: whole training steps in one native call, compared with the same steps in eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aot_backward_runtime import InputError, load

from ..support.step_cases import (
    FAMILIES,
    SCHEDULES,
    WAITING,
    Eager,
    assert_equal,
    assert_same_change,
    batch,
    eager,
    everything,
    labelled,
    odd,
    odd_package,
    package,
    weighted,
    weighted_package,
    words,
)


def _ten(training: Any, schedule: Any, waiting: bool) -> list[float]:
    """Run ten steps of changing sizes, each followed by the schedule. With ``waiting``, the fourth has four
    micro-batches, and the eighth has two and ``step()``."""
    torch.manual_seed(5)
    losses = []
    for i in range(10):
        for part in range({3: 4, 7: 2}.get(i, 1) if waiting else 1):
            waits = waiting and ((i == 3 and part < 3) or i == 7)
            losses.append(float(training(*batch(10 * i + part, rows=4 + i % 3), update=not waits)))
        if waiting and i == 7:
            training.step()
        schedule.step()
    return losses


@pytest.mark.parametrize("name", FAMILIES)
def test_ten_steps_as_in_eager(name: str) -> None:
    """Two groups, momentum or betas and learning rate under a schedule, clipping, accumulation, dropout, BatchNorm,
    changing sizes."""
    step, other = load(package(name)).step(), eager(name)
    before = everything(other)
    assert_equal(everything(step), before)
    # Empty, except for Adagrad
    assert step.state_dict()["optimizer"]["state"].keys() == other.optimizer.state_dict()["state"].keys()
    waiting = name in WAITING
    ours, theirs = _ten(step, SCHEDULES[name](step), waiting), _ten(other, SCHEDULES[name](other.optimizer), waiting)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert_same_change(step, other, before)
    torch.testing.assert_close(step.grad_norm, other.grad_norm, rtol=1e-4, atol=0)
    assert step.count == 10 and step.skipped == 0 and step.accumulated == 0
    for mine, group in zip(step.param_groups, other.optimizer.param_groups, strict=True):
        numbers = {k: v for k, v in group.items() if k != "params"}
        assert {k: mine[k] for k in numbers} == numbers
        assert [step.state[p].keys() for p in mine["params"]] == [other.state[p].keys() for p in group["params"]]


def test_odd_modules_and_several_variants() -> None:
    """Tied, frozen, unused and 0-d parameters, one outside the groups; keywords; more than a loss; two sizes and eval
    mode with one state."""
    step = load(odd_package()).step()
    own, optimizer = odd()
    other = Eager(own, optimizer, None)
    before = everything(other)
    torch.manual_seed(6)
    ours = [step(*a, **k) for a, k in (words(n, i) for i, n in enumerate((4, 7, 4, 4)))]
    torch.manual_seed(6)
    theirs = [other(*a, **k) for a, k in (words(n, i) for i, n in enumerate((4, 7, 4, 4)))]
    step.eval()
    own.eval()
    for i in range(4, 7):
        args, kwargs = words(4, i)
        ours.append(step(*args, **kwargs))
        theirs.append(other(*args, **kwargs))
    for (loss, aux), (expected, more) in zip(ours, theirs, strict=True):
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(aux["logits"], more["logits"], rtol=1e-4, atol=1e-5)
        assert aux["rows"] == more["rows"] and not loss.requires_grad and not aux["logits"].requires_grad
    with torch.no_grad():
        own.outside.grad = None
    assert_same_change(step, other, before)
    after = everything(step)
    for name in ("unused", "outside", "frozen.weight"):
        assert torch.equal(after[f"parameter {name}"], before[f"parameter {name}"])
    assert step.parameters["tied.weight"] is step.parameters["table.weight"] and int(step.buffers["seen"]) == 7
    with pytest.raises(InputError):
        step(*words(7)[0], **words(7)[1])  # this size has no eval mode
    assert_equal(everything(step), after)


def test_a_loss_with_buffers_clipping_by_value_and_dampening() -> None:
    step, other = load(weighted_package()).step(), weighted()
    before = everything(other)
    for i in range(6):
        torch.testing.assert_close(step(*labelled(i)), other(*labelled(i)), rtol=1e-5, atol=1e-6)
    assert_same_change(step, other, before)


def test_gradients_that_are_not_finite_are_left_out() -> None:
    """The first step is skipped, so that the second is the optimizer's first; then one in between, and one of
    accumulated gradients."""
    step, other = load(weighted_package()).step(), weighted()
    before = everything(other)
    for i in range(5):
        x, label = labelled(i)
        if i in (0, 3):
            kept = everything(step)
            assert not step(x.index_fill(0, torch.tensor(2), torch.inf), label).isfinite()
            assert_equal(everything(step), kept)
            other.loss_fn.calls += 1  # type: ignore[union-attr]
        torch.testing.assert_close(step(x, label), other(x, label), rtol=1e-5, atol=1e-6)
    assert (step.count, step.skipped) == (5, 2)
    kept = everything(step)
    step(x, label, update=False)
    step(torch.full_like(x, torch.nan), label, update=False)
    step.step()
    other.loss_fn.calls += 2  # type: ignore[union-attr]
    assert_equal(everything(step), kept)
    assert (step.count, step.skipped, step.accumulated) == (5, 3, 0)
    torch.testing.assert_close(step(x, label), other(x, label), rtol=1e-5, atol=1e-6)
    assert_same_change(step, other, before)


def test_gradients_are_added_up_forgotten_or_used() -> None:
    step, other = load(package("SGD")).step().eval(), eager("SGD")
    with pytest.raises(InputError, match="eval"):
        step(*batch(0))
    step.train()
    with pytest.raises(InputError, match=r"no gradients have been accumulated: call step\(…, update=False\) first"):
        step.step()
    before = everything(other)
    assert step.gradients == {}
    for mine in (step, other):
        torch.manual_seed(7)
        mine(*batch(0), update=False)
        mine(*batch(1), update=False)
    for name, gradient in step.gradients.items():
        torch.testing.assert_close(gradient, other.parameters[name].grad, rtol=1e-4, atol=1e-6)
    assert step.accumulated == 2 and step.count == 0
    step.zero_grad()
    other.optimizer.zero_grad()
    assert step.gradients == {} and step.accumulated == 0
    for mine in (step, other):
        torch.manual_seed(8)
        for i in range(4):
            mine(*batch(i), update=i % 2 == 1)
        mine(*batch(5))
    assert_same_change(step, other, before)
    assert step.count == 3
