"""Errors for a missing entry list the entries that exist and how to call them."""

from __future__ import annotations

import pytest

from aot_backward_runtime import AotBackwardError, load, replay

from ..commands.test_cli import called, fails
from ..support import golden_files

pytestmark = golden_files.needed
PAIR, PASSES = (golden_files.FOLDER / name for name in ("1.0-pair.pt2", "1.1-passes.pt2"))


def test_a_missing_entry_is_answered_with_those_there_are() -> None:
    pair, passes = load(PAIR), load(PASSES)
    there = "got module 'pair', grad 'loss'. Call "
    for call, words in (
        (
            lambda: pair.step(),
            f"{PAIR}: expected a step entry, {there}load(path).module('pair') or load(path).grad('loss').",
        ),
        (
            lambda: pair.step("loss"),
            f"{PAIR}: expected a step entry 'loss', {there}load(path).module('pair') or load(path).grad('loss').",
        ),
        (
            lambda: pair.grad("pair"),
            f"{PAIR}: expected a grad entry 'pair', {there}load(path).module('pair') or load(path).grad('loss').",
        ),
        (lambda: pair.grad("other"), f"{PAIR}: expected a grad entry 'other', {there}load(path).grad('loss')."),
        (
            lambda: replay(PAIR),
            f"{PAIR}: expected a replay entry, {there}load(path).module('pair') or load(path).grad('loss').",
        ),
        (
            lambda: passes.grad(),
            f"{PASSES}: expected a grad entry, got replay 'backward'. Call replay(path, entry='backward').",
        ),
    ):
        with pytest.raises(AotBackwardError) as caught:
            call()
        assert str(caught.value) == words


def test_the_command_line_says_so_too(tmp_path: object) -> None:
    fails(called("replay", PAIR, "--", __file__), 1, f"{PAIR}: expected a replay entry, got module 'pair', grad 'loss'")
