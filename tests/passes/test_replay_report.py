"""The text of a report: three lines where nothing was missed, against what time was saved, and a few reasons where something was."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import aot_backward as ab

from .test_pass_speed import passes, recorded, small
from .test_record import mlp, recorded_mlp

pytestmark = pytest.mark.usefixtures("one_thread")
EAGER = r"\d+\.\d{3} s (saved|lost) against eager, as it was timed when they were recorded"
TAPES = r"\d+\.\d{3} s (saved|lost) against their tapes interpreted, as no eager was timed"


@pytest.mark.parametrize(
    ("package", "run", "against"),
    [
        (lambda: recorded("compiled"), lambda: passes(small(), [3] * 20), EAGER),
        (recorded_mlp, lambda: mlp((4,) * 20), TAPES),
    ],
    ids=["eager was timed", "nothing was timed"],
)
def test_a_good_replay_takes_three_lines_and_says_against_what_time_was_saved(
    package: Callable[[], Path], run: Callable[[], object], against: str
) -> None:
    with ab.replay(package()) as replaying:
        run()
    ran, *more = str(replaying.report).splitlines()
    assert ran == "20 of 20 backward passes (1 binding, 19 hits) ran compiled"
    assert len(more) == 1 and re.fullmatch(against, more[0])
    report = replaying.report.to_json()
    assert report["engine"] and (report["passes"], report["compiled"]) == (20, 20)
    saved = report["seconds_saved_against"]
    assert [name for name, seconds in saved.items() if seconds] == ["eager" if against == EAGER else "interpreted"]
    assert report["seconds_saved"] == pytest.approx(sum(saved.values()), abs=2e-6)


def test_what_went_to_eager_for_its_speed_is_a_line_of_its_own() -> None:
    with ab.replay(recorded("eager")) as replaying:
        passes(small(), [3] * 40)
    ran, slower, saved = str(replaying.report).splitlines()
    assert ran == "3 of 40 backward passes (1 binding, 2 hits) ran compiled"
    assert slower.startswith("37 not faster compiled: ") and re.fullmatch(EAGER, saved)


def test_the_most_frequent_reasons_are_shown_and_few() -> None:
    x = torch.linspace(0.1, 1, 3, requires_grad=True)
    with ab.replay(recorded("compiled")) as replaying:
        for function, times in ((torch.sin, 2), (torch.cos, 5), (torch.exp, 3), (torch.log, 2), (torch.sqrt, 1)):
            for _ in range(times):
                torch.autograd.grad(function(x).sum(), x)
        torch.autograd.grad((x**2).sum(), x, create_graph=True)
    ran, *reasons = str(replaying.report).splitlines()
    assert ran == "0 of 14 backward passes ran compiled"
    starts = ["  miss x5: ", "  miss x3: ", "  miss x2: ", "  miss x3: (other reasons)", "  eager x1: create_graph=True"]
    assert len(reasons) == 5 and all(reason.startswith(start) for reason, start in zip(reasons, starts, strict=True)), reasons
    assert len(replaying.report.to_json()["misses"]) == 5
