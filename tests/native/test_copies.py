"""Packages and functions of ``aot_backward_native`` are pickled and deep-copied, with what has changed in them."""

from __future__ import annotations

import copy
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aot_backward_native as abn
import numpy as np
import pytest

from ..support import golden_files
from ..support.golden_packages import arguments
from ..support.golden_packages import samples as step_samples
from .test_structure import PAIR, STEP, hosted, samples

pytestmark = golden_files.needed


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


WAYS = pytest.mark.parametrize("copied", [copy.deepcopy, pickled], ids=["deepcopy", "pickle"])


@WAYS
def test_a_gradient_function_keeps_its_options_and_changed_parameters(copied: Callable[[Any], Any]) -> None:
    loss, x = abn.load(PAIR, unchecked=True).grad(cast=True, scale={"x": -1}), np.ones((4, 3))
    loss.parameters["net.first.weight"][:] *= 2
    other, plain = copied(loss), abn.load(PAIR, unchecked=True).grad()
    plain.parameters["net.first.weight"][:] *= 2
    assert np.array_equal(other(x)[1]["x"], -plain(x.astype("f"))[1]["x"])
    assert type(other) is abn.Grad and other(x)[0] == loss(x)[0]
    assert np.array_equal(other(x)[1]["x"], loss(x)[1]["x"]) and other(x)[1]["x"].any()
    other.parameters["net.first.weight"][:] = 0
    assert loss.parameters["net.first.weight"].any()
    assert np.array_equal(copied(copied(other))(x)[1]["x"], other(x)[1]["x"])


@WAYS
def test_a_function_and_a_module(copied: Callable[[Any], Any]) -> None:
    positions, _ = samples(5)
    function = copied(abn.load(hosted()).function())
    assert np.array_equal(
        function(positions)["bonds"].lengths, abn.load(hosted()).function()(positions)["bonds"].lengths
    )
    module, (x, more) = abn.load(PAIR, unchecked=True).module().use_variant(0), arguments()
    module.forward(x.detach(), more["bias"])
    other = copied(module)
    assert other.state["calls"] == 1 and other._door.only == 0
    with pytest.raises(abn.InputError, match="expected a forward call before the backward"):
        other.backward(None, None)
    assert np.array_equal(other(x.detach(), more["bias"])["out"], module(x.detach(), more["bias"])["out"])
    module.eval()
    with pytest.raises(abn.InputError, match="mode 'eval'"):
        copied(module)(x.detach(), more["bias"])


@WAYS
def test_a_step_keeps_its_whole_state(copied: Callable[[Any], Any]) -> None:
    package = abn.load(STEP, unchecked=True)
    step = package.step()
    for rows in (8, 5):
        step(*step_samples(rows))
    step.param_groups[0]["lr"] = 0.02
    step(*step_samples(7), update=False)
    package.seed(3)
    other = copied(step)
    assert (other.count, other.accumulated, other.param_groups[0]["lr"]) == (2, 1, 0.02)
    for rows in (9, 6):
        assert other(*step_samples(rows)) == step(*step_samples(rows))
    assert all(np.array_equal(value, other.parameters[name]) for name, value in step.parameters.items())


def test_a_pickled_step_leaves_the_random_numbers_of_the_process(tmp_path: Path) -> None:
    package = abn.load(STEP, unchecked=True)
    step = package.step()
    package.seed(3)
    text = pickle.dumps(step)
    package.seed(4)
    step.save(tmp_path / "before.state")
    pickle.loads(text).save(tmp_path / "after.state")
    assert (tmp_path / "before.state").read_bytes() == (tmp_path / "after.state").read_bytes()


def test_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copyfile(PAIR, tmp_path / "x.pt2")
    monkeypatch.chdir(tmp_path)
    package = abn.load("x.pt2", unchecked=True, backend="standalone")
    assert copy.deepcopy(package) is package is copy.copy(package) and package.path == tmp_path / "x.pt2"
    text, functions = pickle.dumps(package), pickle.dumps([package.grad(), package.module()])
    monkeypatch.chdir("/")
    assert pickle.loads(text).entries == package.entries and pickle.loads(text).path == package.path
    one, other = pickle.loads(functions)
    assert one._package is other._package
    shutil.copyfile(STEP, tmp_path / "new.pt2")
    (tmp_path / "new.pt2").rename(tmp_path / "x.pt2")
    assert copy.deepcopy(package.grad())(np.ones((4, 3), "f"))[0] > 0  # from the open file
    with pytest.raises(
        abn.PackageError,
        match=r"x\.pt2: expected the file that was pickled, manifest SHA-256 \w{64}, got \w{64}\. Restore that file",
    ):
        pickle.loads(text)
    (tmp_path / "x.pt2").unlink()
    with pytest.raises(abn.PackageError, match="No such file"):
        pickle.loads(functions)


def test_in_another_process() -> None:
    loss = abn.load(PAIR, unchecked=True).grad()
    loss.parameters["net.first.bias"][:] = 3
    program = (
        "import pickle, sys\n"
        "f = pickle.load(sys.stdin.buffer)\n"
        "print(memoryview(f.parameters['net.first.bias']).tolist(), 'numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], input=pickle.dumps(loss), capture_output=True, check=True)
    assert done.stdout == b"[3.0, 3.0, 3.0] False\n"


def test_only_what_changed_is_pickled() -> None:
    loss = abn.load(PAIR, unchecked=True).grad()
    before = len(pickle.dumps(loss))
    loss.parameters["net.first.weight"][0, 0] += 1
    assert 36 <= len(pickle.dumps(loss)) - before < 36 * 4


def test_shallow_copies_are_refused() -> None:
    with pytest.raises(abn.AotBackwardError, match=r"copy\.copy of a Grad: .* Call copy\.deepcopy"):
        copy.copy(abn.load(PAIR, unchecked=True).grad())
