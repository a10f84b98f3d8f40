"""The scenarios of ``tests/support/backward_passes/`` as compiled code: recorded once into one package, replayed and
compared with eager.

``test_tape.py`` compares the bits of all scenarios, interpreted. This file compares the scenarios that compilation
could break, within their dtype's tolerance.
"""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor

import aot_backward as ab

from ..support.backward_passes import SCENARIOS
from ..support.exports import shared

NAMES = (
    "autocast", "backward_in_a_backward", "broadcasting", "checkpointed", "checkpointed_reentrant", "copy_slices", "custom_everything",
    "custom_that_raises", "custom_undefined_gradients", "dropouts", "fan_in", "grad_of_intermediate", "grad_of_unused", "hook_that_raises",
    "hooks_come_and_go", "incoming_gradient_of_odd_strides", "inputs_non_leaf", "lstm", "mixed_dtypes", "module_hooks", "node_hooks",
    "post_accumulate_hooks", "queued_callbacks", "retained_gradients", "retained_graph", "same_gradient_tensor_kept", "saved_tensor_hooks",
    "several_roots", "tensor_hooks", "tied_weights", "transposed_leaf_gradient", "two_threads", "view_of_a_clone", "views",
)  # fmt: skip
INTERPRETED = {
    "custom_that_raises": "expected 5",  # a pass that raises is not recorded
    "hook_that_raises": "was not recorded",
    "node_hooks": "expected 2",  # unbind has as many gradients as rows, but a graph has a fixed number
}
"""Scenarios with a part outside the package, and the text of the miss."""
_NUMBER = re.compile(r"-?\d+\.\d+(?:e[+-]?\d+)?")


def run(name: str) -> list[dict[str, object]]:
    step = SCENARIOS[name]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [step(i) for i in range(3)]


@pytest.fixture(scope="module")
def package() -> Path:
    def make(path: Path) -> None:
        with ab.record(path, min_seen=1) as recording:
            for name in NAMES:
                run(name)
        assert not recording.skipped, list(recording.skipped)

    return shared("recorded-scenarios", make)


@pytest.mark.parametrize("name", NAMES)
def test_compiled_as_eager(name: str, package: Path) -> None:
    expected = run(name)
    with ab.replay(package) as replaying:
        actual = run(name)
    for e_step, a_step in zip(expected, actual, strict=True):
        assert e_step.keys() == a_step.keys()
        for key, e in e_step.items():
            assert close(e, a_step[key], name == "autocast"), f"{key}: eager {e}, replayed {a_step[key]}"
    assert [r for r in replaying.report.misses if name not in INTERPRETED or INTERPRETED[name] not in r] == []
    assert replaying.report.bindings + replaying.report.hits > 0


def close(expected: object, actual: object, reduced_precision: bool = False) -> bool:
    """Compare values. ``reduced_precision``: something was computed in bfloat16."""
    if isinstance(expected, Tensor) and isinstance(actual, Tensor):
        if (expected.shape, expected.dtype, expected.layout) != (actual.shape, actual.dtype, actual.layout):
            return False
        e, a = (t.to_dense() if t.layout is not torch.strided else t for t in (expected, actual))
        tolerance = 2e-2 if reduced_precision or expected.dtype in (torch.bfloat16, torch.float16) else 2e-5
        return torch.allclose(a, e, rtol=tolerance, atol=tolerance, equal_nan=True)
    if isinstance(expected, (list, tuple)) and isinstance(actual, (list, tuple)):
        return len(expected) == len(actual) and all(
            close(e, a, reduced_precision) for e, a in zip(expected, actual, strict=True)
        )
    if isinstance(expected, float) and isinstance(actual, float):
        return abs(expected - actual) <= 1e-4 * (1 + abs(expected))
    e_text, a_text = str(expected), str(actual)  # logs: equal words and close numbers
    numbers = zip(_NUMBER.findall(e_text), _NUMBER.findall(a_text), strict=False)
    return _NUMBER.sub("#", e_text) == _NUMBER.sub("#", a_text) and all(
        abs(float(e) - float(a)) <= 1e-4 * (1 + abs(float(e))) for e, a in numbers
    )
