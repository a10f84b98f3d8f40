"""``clip_grad_norm_`` and ``clip_grad_value_`` of an unmodified script, recorded and replayed: results equal eager's,
and unsupported calls run in eager."""

from __future__ import annotations

import contextlib
import json
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import aot_backward as ab
from aot_backward.recording.optimizer_steps import traced_clipping
from aot_backward_runtime import load
from aot_backward_runtime.optimizer_steps import interception

from ..commands.test_cli import called as aot_backward
from ..support.exports import shared

pytestmark = pytest.mark.usefixtures("one_thread")
SHAPES = ((8, 4), (8,), (2, 8), ())
Clip = Callable[[Sequence[nn.Parameter]], Any]
CLIPS: dict[str, Clip] = {
    "norm": lambda p: clip_grad_norm_(p, 1.5),
    "largest": lambda p: clip_grad_norm_(p, 0.5, norm_type=math.inf),
    "sum": lambda p: clip_grad_norm_(iter(p), max_norm=torch.tensor(2.0), norm_type=1),
    "value": lambda p: clip_grad_value_(p, 0.25),
}


def parameters(
    step: int, scale: float = 1.0, dtype: torch.dtype = torch.float32, shapes: Sequence[tuple[int, ...]] = SHAPES
) -> list[nn.Parameter]:
    """Return parameters with gradients and one without."""
    generator = torch.Generator().manual_seed(step)
    made = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
    for p in made:
        p.grad = (scale * torch.randn(p.shape, generator=generator)).to(dtype)
    return [*made[:1], nn.Parameter(torch.zeros(3)), *made[1:]]


def package() -> Path:
    return shared("clippings.pt2", _record)


def _record(path: Path) -> None:
    with ab.record(path, tune="none") as recording:
        for step in range(3):
            for clip in CLIPS.values():
                clip(parameters(step))
            clip_grad_norm_(parameters(step, dtype=torch.float64, shapes=((4, 3), (5,))), 1.0)
            clip_grad_norm_(parameters(step, dtype=torch.bfloat16, shapes=((4, 3), (5,))), 1.0)
    assert not recording.skipped and len(recording.compiled_steps) == 6


def gradients(given: Sequence[nn.Parameter]) -> list[torch.Tensor | None]:
    return [p.grad for p in given]


def same(ours: Any, eager: Any) -> None:
    torch.testing.assert_close(ours, eager, rtol=1e-5, atol=1e-7, equal_nan=True)


@contextlib.contextmanager
def unintercepted(replaying: Any) -> Iterator[None]:
    interception.leave(replaying.steps)
    yield
    interception.enter(replaying.steps)


@pytest.mark.parametrize("name", CLIPS)
def test_gradients_and_norm_are_eagers(name: str) -> None:
    clip = CLIPS[name]
    with ab.replay(package()) as replaying:
        for step, scale in enumerate((1.0, 1e-3, 1e4, 0.0, math.inf, math.nan)):
            ours, eager = parameters(step, scale), parameters(step, scale)
            before = gradients(ours)
            versions = [g._version for g in before if g is not None]
            norm = clip(ours)
            assert [g._version for g in before if g is not None] == [v + 1 for v in versions]
            assert replaying.report.clippings == step + 1
            assert all(a is b for a, b in zip(gradients(ours), before, strict=True))  # in place
            with unintercepted(replaying):
                expected = clip(eager)
            same(gradients(ours), gradients(eager))
            assert (norm is None) == (expected is None)
            if norm is not None:
                same(norm, expected)
                assert (norm.dtype, norm.shape, norm.requires_grad) == (expected.dtype, expected.shape, False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    shapes = ((4, 3), (5,))
    expected = parameters(7, dtype=dtype, shapes=shapes)
    wanted = clip_grad_norm_(expected, 1.0)
    with ab.replay(package()) as replaying:
        ours = parameters(7, dtype=dtype, shapes=shapes)
        norm = clip_grad_norm_(ours, 1.0)
    tolerance = {"rtol": 1e-12, "atol": 0.0} if dtype is torch.float64 else {"rtol": 2e-2, "atol": 1e-3}
    torch.testing.assert_close((norm, gradients(ours)), (wanted, gradients(expected)), **tolerance)  # type: ignore[arg-type]
    assert replaying.report.clippings == 1


def test_gradients_that_are_transposed_or_empty(tmp_path: Path) -> None:
    def given(step: int, *, empty: bool) -> list[nn.Parameter]:
        made = parameters(step, shapes=((0, 4), (0,)) if empty else SHAPES)
        transposed(made)
        return made

    with ab.record(tmp_path / "odd.pt2", tune="none") as recording:
        for step in range(2):
            for empty in (False, True):
                clip_grad_norm_(given(step, empty=empty), 1.5)
    assert not recording.skipped
    with ab.replay(tmp_path / "odd.pt2") as replaying:
        ours = [given(5, empty=empty) for empty in (False, True)]
        norms = [clip_grad_norm_(p, 1.5) for p in ours]
    for norm, found, empty in zip(norms, ours, (False, True), strict=True):
        eager = given(5, empty=empty)
        same((norm, gradients(found)), (clip_grad_norm_(eager, 1.5), gradients(eager)))
        assert [g.stride() for g in gradients(found) if g is not None] == [
            g.stride() for g in gradients(eager) if g is not None
        ]
    assert replaying.report.clippings == 2


def test_error_if_nonfinite() -> None:
    with ab.replay(package()) as replaying:
        good, bad = parameters(0), parameters(0, math.inf)
        kept = [g if g is None else g.clone() for g in gradients(bad)]
        norm = clip_grad_norm_(good, 1.5, error_if_nonfinite=True)
        with pytest.raises(
            RuntimeError, match=r"total norm of order 2\.0 for gradients from `parameters` is non-finite"
        ):
            clip_grad_norm_(bad, 1.5, error_if_nonfinite=True)
    torch.testing.assert_close(gradients(bad), kept, rtol=0, atol=0, equal_nan=True)
    eager = parameters(0)
    same((norm, gradients(good)), (clip_grad_norm_(eager, 1.5), gradients(eager)))
    assert replaying.report.clippings == 2


def transposed(given: list[nn.Parameter]) -> None:
    given[0].grad = given[0].grad.t().contiguous().t()  # type: ignore[union-attr]


def absent(given: list[nn.Parameter]) -> None:
    given[2].grad = None


def overlapping(given: list[nn.Parameter]) -> None:
    flat = torch.randn(100, generator=torch.Generator().manual_seed(3))
    given[0].grad, given[2].grad = flat[:32].view(8, 4), flat[28:36]


def twice(given: list[nn.Parameter]) -> None:
    given[4] = given[0]


def sparse(given: list[nn.Parameter]) -> None:
    given[0].grad = given[0].grad.to_sparse()  # type: ignore[union-attr]


def of_a_graph(given: list[nn.Parameter]) -> None:
    given[0].grad = (2 * torch.ones(8, 4, requires_grad=True)).square()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (transposed, "gradient 0 has other strides"),
        (absent, "the parameters have 3 gradients; 4 were recorded"),
        (overlapping, "gradient 0 and gradient 1 share memory"),
        (twice, "gradient 3 has 2 dimensions"),
        (sparse, "gradient 0 has layout torch.sparse_coo"),
        (of_a_graph, ""),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_does_not_fit_goes_to_eager_and_comes_back(
    spoil: Callable[[list[nn.Parameter]], None], words: str
) -> None:
    def run() -> list[Any]:
        found: list[Any] = []
        for step in range(6):
            given = parameters(step)
            if step in (2, 3):
                spoil(given)
            try:
                norm = clip_grad_norm_(given, 1.5)
            except RuntimeError as error:
                norm = str(error)  # type: ignore[assignment]
            found.append((norm, [g.to_dense() if g is not None else None for g in gradients(given)]))
        return found

    with ab.replay(package()) as replaying:
        ours = run()
    for (norm, grads), (wanted, expected) in zip(ours, run(), strict=True):
        same(grads, expected)
        assert norm == wanted if isinstance(wanted, str) else math.isclose(norm, wanted, rel_tol=1e-5)
    reasons = replaying.report.eager_clippings
    assert any(words in reason for reason in reasons) if words else not reasons, reasons
    assert replaying.report.clippings == (6 if not words else 3 if "share memory" in words else 4), reasons


def test_autograd_sees_that_gradients_were_written() -> None:
    with ab.replay(package()) as replaying:
        given = parameters(0)
        x = torch.ones(8, 4, requires_grad=True)
        loss = (x * given[0].grad).sum()
        clip_grad_norm_(given, 1.5)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    assert replaying.report.clippings == 1


@pytest.mark.parametrize(
    "wrong",
    [lambda: clip_grad_norm_(parameters(0), "much"), lambda: clip_grad_value_([1.0], 1.0)],
    ids=["limit", "parameters"],
)
def test_errors_of_eager_are_its_own(wrong: Callable[[], Any]) -> None:
    with pytest.raises(Exception) as expected:
        wrong()
    with ab.replay(package()), pytest.raises(expected.type) as error:
        wrong()
    assert str(error.value) == str(expected.value)


def test_no_gradients() -> None:
    def nothing() -> Iterator[nn.Parameter]:
        yield from ()

    with ab.replay(package()) as replaying:
        assert clip_grad_norm_([nn.Parameter(torch.ones(2))], 1.0).item() == 0.0
        with pytest.warns(UserWarning, match="empty generator"):
            clip_grad_norm_(nothing(), 1.0)
    assert replaying.report.clippings == 0


def test_threads_that_clip_side_by_side() -> None:
    limits = (0.5, 1.5, 4.0)
    made = {(limit, step): parameters(step) for limit in limits for step in range(30)}

    def run(limit: float) -> None:
        for step in range(30):
            clip_grad_norm_(made[limit, step], limit)

    with ab.replay(package()) as replaying:
        threads = [threading.Thread(target=run, args=(limit,)) for limit in limits]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert (
        replaying.report.clippings + sum(replaying.report.eager_clippings.values()) == 90 and replaying.report.clippings
    )
    for (limit, step), ours in made.items():
        eager = parameters(step)
        clip_grad_norm_(eager, limit)
        same(gradients(ours), gradients(eager))


def test_functions_are_torchs_own_afterwards() -> None:
    held = [(f, [c.cell_contents for c in f.__closure__ or ()]) for f in (clip_grad_norm_, clip_grad_value_)]  # type: ignore[attr-defined]
    with pytest.raises(KeyError), ab.replay(package()):
        assert held[0][0].__closure__[0].cell_contents is not held[0][1][0]  # type: ignore[attr-defined]
        raise KeyError
    assert all([c.cell_contents for c in f.__closure__ or ()] == contents for f, contents in held)  # type: ignore[attr-defined]


def test_what_cannot_be_compiled_is_left_out(tmp_path: Path) -> None:
    with ab.record(tmp_path / "odd.pt2", tune="none") as recording:
        for step in range(3):
            clip_grad_norm_(parameters(step, dtype=torch.complex64), 1.0)
            with torch.autocast("cpu"):
                clip_grad_value_(parameters(step), 1.0)
    reasons = sorted(recording.skipped)
    assert (
        len(reasons) == 2
        and "clip_grad_norm_ called at" in reasons[0]
        and "a gradient has dtype torch.complex64" in reasons[0]
    )
    assert "clip_grad_value_ called at" in reasons[1] and reasons[1].endswith("it is called under autocast")
    assert not (tmp_path / "odd.pt2").exists()


def test_a_wrong_clipping_is_not_shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traced_clipping, "_NORM_EPSILON", 0.5)
    with ab.record(tmp_path / "wrong.pt2", tune="none") as recording:
        for step in range(3):
            clip_grad_norm_(parameters(step), 1.5)
    (reason,) = recording.skipped
    assert "is wrong:" in reason and "times the tolerance, with the limit 1.5" in reason
    assert not (tmp_path / "wrong.pt2").exists()


def test_what_eager_makes_faster_is_left_to_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = traced_clipping.timed

    def slower(*args: Any) -> Any:
        speed = measured(*args)
        assert speed is not None and [t.name for t in speed.timings] == ["eager", "compiled"]
        return traced_clipping.dataclasses.replace(speed, chosen="eager")

    monkeypatch.setattr(traced_clipping, "timed", slower)
    with ab.record(tmp_path / "slow.pt2", tune="quick") as recording:
        for step in range(3):
            clip_grad_value_(parameters(step), 0.1)
    assert any(words.startswith("clip_grad_value_: eager ") for words in recording.slower)
    assert not (tmp_path / "slow.pt2").exists() and not recording.compiled_steps


SCRIPT = """
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
for step in range(12):
    optimizer.zero_grad()
    net(torch.randn(4 + step % 2, 8)).square().mean().backward()
    clip_grad_norm_(net.parameters(), 0.05)
    optimizer.step()
print(sum(p.double().sum().item() for p in net.parameters()))
"""


def test_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    recording = aot_backward("record", "-o", "bw.pt2", "--tune", "none", "--", "train.py")
    assert recording.stderr.endswith("1 structure compiled and steps of AdamW and clip_grad_norm_\n"), recording.stderr
    text = aot_backward("inspect", "bw.pt2").stdout
    assert "Calls of torch.nn.utils.clip_grad_norm_\n    Gradients: 4, by their norm of order 2.0\n" in text
    (clipping,) = json.loads(aot_backward("inspect", "--json", "bw.pt2").stdout)["entries"]["backward"]["clippings"]
    assert (clipping["function"], clipping["norm_type"], clipping["verdict"]["status"]) == (
        "clip_grad_norm_",
        "2.0",
        "verified",
    )
    ran, *_ = aot_backward("replay", "bw.pt2", "--", "train.py").stderr.splitlines()
    assert ran == (
        "12 of 12 backward passes (1 binding, 11 hits), 11 of 12 optimizer steps (1 made the state, in eager) and 12 of 12 clippings of gradients "
        "ran compiled"
    )
    replayed = aot_backward("replay", "--json", "bw.pt2", "--", "train.py")
    alone = aot_backward("replay", "--json", "--no-optimizer", "bw.pt2", "--", "train.py")
    assert (json.loads(replayed.stderr)["clippings"], json.loads(alone.stderr)["clippings"]) == (12, 0)
    assert (
        float(replayed.stdout)
        == pytest.approx(float(alone.stdout), rel=1e-5)
        == pytest.approx(float(recording.stdout), rel=1e-5)
    )
    assert "and 1 clipping of gradients:" in aot_backward("verify", "bw.pt2").stdout
    page = aot_backward("inspect", "bw.pt2", "--html", "page.html")
    assert page.exit_code == 0 and "torch.nn.utils.clip_grad_norm_" in Path("page.html").read_text()
    again = aot_backward("record", "-o", "bw.pt2", "--tune", "none", "--", "train.py")
    assert "nothing is new" in again.stderr
    rebuilt = aot_backward("rebuild", "bw.pt2", "-o", "other.pt2", "--target", "cpu:sse4")
    assert rebuilt.exit_code == 0 and load("other.pt2").recorded_clippings()[0][0].verdict.status == "verified"
    assert json.loads(aot_backward("replay", "--json", "other.pt2", "--", "train.py").stderr)["clippings"] == 12
