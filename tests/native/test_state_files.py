"""Training states: C and Python resume each other's files bit for bit; a file that does not fit changes nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from aot_backward_runtime import load
from aot_backward_runtime.training.checkpoint import read_state, write_state

from ..support import c_library, golden_files
from ..support.c_library import INPUT, STATE, Failed, Function
from ..support.golden_packages import samples

pytestmark = golden_files.needed
STEP = golden_files.FOLDER / "1.2-step.pt2"


@pytest.fixture
def fit() -> Iterator[Function]:
    with c_library.function(STEP, "fit") as called:
        yield called


def train(step: object, updates: int, seed: int = 0) -> list[float]:
    out = []
    for i in range(updates):
        x, y = samples(8 + i + seed)
        found = step.run(x, y)[0] if isinstance(step, Function) else step(x, y)  # type: ignore[operator]
        out.append(float(found))
    return out


def test_c_saves_and_python_resumes(fit: Function, tmp_path: Path) -> None:
    fit.number(1, "lr", 0.02)
    train(fit, 3)
    fit.accumulate(*samples(9))
    fit.save(tmp_path / "c.state", '{"epoch": 3, "name": "\\u00e9\\"\\\\", "none": null}')
    step = load(STEP).step("fit")
    assert step.resume(tmp_path / "c.state") == {"epoch": 3, "name": 'é"\\', "none": None}
    assert (step.count, step.accumulated, step.param_groups[1]["lr"]) == (3, 1, 0.02)
    assert train(step, 4, 5) == train(fit, 4, 5)
    for name, tensor in step.parameters.items():
        assert torch.equal(fit.state(name), tensor)


def test_python_saves_and_c_resumes(fit: Function, tmp_path: Path) -> None:
    step = load(STEP).step("fit")
    step.param_groups[0]["lr"] = 1e-4
    train(step, 2)
    step(*samples(7), update=False)
    step.save(tmp_path / "p.state", extra={"loss": float("nan"), "large": 10**30, "text": "ü"})
    extra = json.loads(fit.resume(tmp_path / "p.state"))
    assert extra["large"] == 10**30 and extra["text"] == "ü" and extra["loss"] != extra["loss"]
    progress = fit.progress()
    assert (progress.updates, progress.accumulated) == (2, 1)
    assert train(fit, 4, 3) == train(step, 4, 3)
    fit.save(tmp_path / "again.state")
    step.save(tmp_path / "python.state")
    mine, theirs = read_state(tmp_path / "again.state"), read_state(tmp_path / "python.state")
    assert {n: t.dtype for n, t in mine[0].items()} == {n: t.dtype for n, t in theirs[0].items()}
    assert all(torch.equal(mine[0][n], t) for n, t in theirs[0].items()) and mine[1] == theirs[1]


def test_the_random_numbers_go_on(fit: Function, tmp_path: Path) -> None:
    torch.manual_seed(11)
    torch.rand(3)
    fit.save(tmp_path / "c.state")
    expected = torch.rand(4)
    torch.manual_seed(0)
    fit.resume(tmp_path / "c.state")
    assert torch.equal(torch.rand(4), expected)


def test_a_seed_is_that_of_torch(fit: Function) -> None:
    with c_library.opened(STEP) as package:
        c_library.check(c_library.library().aotb_seed(package.handle, 123))
    drawn = torch.rand(5)
    torch.manual_seed(123)
    assert torch.equal(torch.rand(5), drawn)


def spoil(path: Path, out: Path, tensors: dict[str, object], **about: object) -> None:
    """Write the state of ``path`` with other tensors (None: left out) and other metadata."""
    kept, said = read_state(path)
    merged = {n: t for n, t in {**kept, **tensors}.items() if t is not None}
    write_state(out, merged, {**said, **about})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tensors", "about", "words"),
    [
        ({"module/0.weight": None}, {}, "module/0.weight"),
        ({"module/0.weight": torch.zeros(8, 5)}, {}, "module/0.weight"),
        ({"module/0.weight": torch.zeros(8, 4, dtype=torch.float64)}, {}, "module/0.weight"),
        ({"module/more": torch.zeros(1)}, {}, "tensors"),
        ({"random/cpu": torch.zeros(5056, dtype=torch.uint8)}, {}, "random state"),
        ({"random/cpu": torch.zeros(3, dtype=torch.uint8)}, {}, "random state"),
        ({}, {"optimizer": "torch.optim.sgd.SGD"}, "SGD"),
        ({}, {"groups": []}, "parameter groups"),
        ({}, {"groups": 3}, "groups"),
        ({}, {"count": -1}, "count"),
        ({}, {"count": 1.5}, "count"),
        ({}, {"fresh": 1}, "fresh"),
        ({}, {"scaler": {"scale": 2.0}}, "loss scale"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_a_state_that_does_not_fit_changes_nothing(
    fit: Function, tmp_path: Path, tensors: dict[str, object], about: dict[str, object], words: str
) -> None:
    train(fit, 2)
    fit.save(tmp_path / "good.state")
    spoil(tmp_path / "good.state", tmp_path / "bad.state", tensors, **about)
    train(fit, 1)
    before = {n: fit.state(n) for n, _ in fit.describe(c_library.STATES)}
    with pytest.raises(Failed, match=words) as caught:
        fit.resume(tmp_path / "bad.state")
    assert caught.value.status == STATE and fit.progress().updates == 3
    assert all(torch.equal(fit.state(n), t) for n, t in before.items())


def test_options_that_are_fixed_or_out_of_range(fit: Function, tmp_path: Path) -> None:
    fit.save(tmp_path / "good.state")
    about = read_state(tmp_path / "good.state")[1]
    for key, value in (("amsgrad", True), ("lr", "fast"), ("betas", [1.8, 0.9]), ("betas", [0.9])):
        groups = json.loads(json.dumps(about["groups"]))
        groups[0]["options"][key] = value
        spoil(tmp_path / "good.state", tmp_path / "bad.state", {}, groups=groups)
        with pytest.raises(Failed, match=key) as caught:
            fit.resume(tmp_path / "bad.state")
        assert caught.value.status == STATE


def test_damaged_files(fit: Function, tmp_path: Path) -> None:
    """Files cut short, files with flipped bits, and other files."""
    fit.save(tmp_path / "good.state")
    good, bad = (tmp_path / "good.state").read_bytes(), tmp_path / "bad.state"
    for cut in (0, 7, 8, 100, len(good) // 2, len(good) - 1):
        bad.write_bytes(good[:cut])
        with pytest.raises(Failed) as caught:
            fit.resume(bad)
        assert caught.value.status == STATE
    for place in range(0, len(good), 97):
        bad.write_bytes(good[:place] + bytes([good[place] ^ 4]) + good[place + 1 :])
        with pytest.raises(Failed) as caught:
            fit.resume(bad)
        assert caught.value.status == STATE, place
    for path in (tmp_path / "nonsuch", tmp_path, Path("/dev/null"), STEP):
        with pytest.raises(Failed) as caught:
            fit.resume(path)
        assert caught.value.status == STATE


def test_places_that_cannot_be_written(fit: Function, tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "no" / "folder", Path("/dev/null")):
        with pytest.raises(Failed, match="cannot save") as caught:
            fit.save(path)
        assert caught.value.status == STATE
    with pytest.raises(Failed, match="extra is not JSON") as caught:
        fit.save(tmp_path / "x.state", "{epoch: 3}")
    assert caught.value.status == INPUT and not list(tmp_path.iterdir())


def test_a_link_is_followed_and_nothing_is_left_beside(fit: Function, tmp_path: Path) -> None:
    (tmp_path / "real.state").write_bytes(b"old")
    (tmp_path / "link.state").symlink_to(tmp_path / "real.state")
    fit.save(tmp_path / "link.state")
    assert (tmp_path / "link.state").is_symlink() and read_state(tmp_path / "real.state")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link.state", "real.state"]
