"""A replay runs compiled code only if it was the fastest choice when recorded: timing, passes in eager, and the
report."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import aot_backward as ab
from aot_backward.recording import pass_speed
from aot_backward.recording.recorded_structure import PassTimes
from aot_backward_runtime import load
from aot_backward_runtime.errors import MissError
from aot_backward_runtime.format.manifest import PassSpec, Speed, Timing
from aot_backward_runtime.passes.engine import UNSERVED

from ..commands.test_cli import called
from ..support.exports import shared

Grads = list[list[torch.Tensor]]
pytestmark = pytest.mark.usefixtures("one_thread")


def small(width: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2))


def passes(net: nn.Module, batches: Sequence[int]) -> Grads:
    """Return the gradients of each pass; one line calls all passes."""
    out = []
    for i, n in enumerate(batches):
        x = torch.randn(n, 4, generator=torch.Generator().manual_seed(i))
        for p in net.parameters():
            p.grad = None
        net(x).square().mean().backward()
        out.append([p.grad.clone() for p in net.parameters() if p.grad is not None])
    return out


def same(expected: Grads, actual: Grads) -> None:
    for e_step, a_step in zip(expected, actual, strict=True):
        for e, a in zip(e_step, a_step, strict=True):
            torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-7)


def the_pass(path: Path) -> PassSpec:
    (structure,) = load(path).manifest.entries["backward"].structures
    (variant,) = structure.variants
    return variant


def said(chosen: str, *sizes: str) -> Callable[..., Speed]:
    """Replace the measurement: return that ``chosen`` was ten times as fast at each of ``sizes``."""
    labels = sizes or ("s0=3",)
    timings = tuple(
        Timing(name, tuple(10.0 if name == chosen else 100.0 for _ in labels)) for name in ("eager", "compiled")
    )
    return lambda *_: Speed(chosen, timings, labels, 1, "a processor", "quick", "cpu", torch.__version__, 0)


def measured_by(patch: pytest.MonkeyPatch, measure: Callable[..., Speed | None]) -> None:
    """Time every compiled pass by ``measure``, however few passes of the script were timed."""
    patch.setattr(pass_speed, "measure", measure)
    patch.setattr(PassTimes, "enough", True)


def recorded() -> Path:
    """Return a package of :func:`passes` of :func:`small` that says compiled code is faster. Do not write to it."""

    def make(path: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            measured_by(patch, said("compiled"))
            with ab.record(path, tune="quick") as recording:
                passes(small(), (3, 3, 5))
        assert not recording.skipped and not recording.slower

    return shared("pass-speed", make)


def unserved() -> nn.Sequential:
    """Return a network whose passes :func:`recorded` does not contain."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 3), nn.Sigmoid())


def test_what_a_pass_takes_is_measured_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While recording, every gradient equals eager's however a pass runs, and each hook is called once."""
    path, batches, net, called = tmp_path / "bw.pt2", (3, 5, *[6] * 40), small(), []
    expected = passes(net, batches)
    net[2].weight.register_hook(lambda g: called.append(tuple(g.shape)))
    seen: list[Any] = []
    measure = pass_speed.measure
    monkeypatch.setattr(pass_speed, "measure", lambda *args: seen.append(measure(*args)) or seen[-1])
    with ab.record(path, tune="quick") as recording:
        same(expected, passes(net, batches))
    assert called == [(2, 8)] * len(batches)
    assert recording.in_eager >= 20 and recording.in_eager + recording.recorded == 42 and not recording.skipped
    speed = seen[0]
    assert [t.name for t in speed.timings] == ["eager", "compiled"]
    assert speed.chosen in speed.means and min(speed.means.values()) > 1
    assert speed.sizes == ("s0=6",) and speed.tune == "quick" and speed.threads == torch.get_num_threads()
    if speed.chosen == "compiled":
        assert the_pass(path).speed == speed and not recording.slower
    else:
        assert not path.exists() and [words.startswith("pass.") for words in recording.slower] == [True]


def test_nothing_is_timed_where_it_is_not_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "bw.pt2"
    with ab.record(path, tune="none") as recording:
        passes(small(), (3, 5, *[6] * 20))
    assert recording.in_eager == 0 and recording.recorded == 22 and the_pass(path).speed is None
    with pytest.raises(ab.ExportError, match="tune is 'much'; expected one of 'none', 'quick'"):
        ab.record(path, tune="much")


def test_passes_that_look_alike_and_are_not_are_all_recorded(tmp_path: Path) -> None:
    """A clamp's limit is in no shape and no name. Each limit is a separate structure, and none is timed as another."""
    weight = torch.ones(3, requires_grad=True)
    with ab.record(tmp_path / "bw.pt2", tune="quick") as recording:
        for i in range(12):
            (weight * 2).clamp(max=1 + i % 3).sum().backward()
    assert recording.in_eager == 0 and recording.recorded == 12 and len(recording.structures) == 3


def test_what_eager_does_as_fast_is_left_out_and_goes_to_eager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, net, other = tmp_path / "bw.pt2", small(), unserved()
    measured_by(
        monkeypatch,
        lambda program, *_: said("eager" if "Sigmoid" in str(program.structure.tape.nodes) else "compiled")(),
    )
    with ab.record(path, tune="quick") as recording:
        for each in (net, other):
            passes(each, (3, 3, 5))
    (words,) = recording.slower
    assert "eager 10 µs, compiled 100 µs" in words and "backward called at" in words and not recording.skipped
    assert len(load(path).manifest.entries["backward"].structures) == 1
    with ab.replay(path) as replaying:
        for each in (net, other):
            expected = passes(each, [3] * 40)
            same(expected, passes(each, [3] * 40))
    report = replaying.report
    assert report.compiled > 0 and sum(report.misses.values()) <= 8 and sum(report.eager.values()) >= 60
    assert "called from a place where the package had no code for the last passes" in str(report)

    measured_by(monkeypatch, said("eager"))
    with ab.record(tmp_path / "none.pt2", tune="quick"):
        passes(net, (3, 3, 5))
    assert not (tmp_path / "none.pt2").exists()


def test_what_is_fastest_compiled_is_a_hit_each_time() -> None:
    path, batches, net = recorded(), [3] * 20, small()
    expected = passes(net, batches)
    with ab.replay(path) as replaying:
        same(expected, passes(net, batches))
    assert replaying.report.hits == 19 and not replaying.report.eager


def test_where_structures_take_turns_each_is_looked_at() -> None:
    """Three of four passes from one line are not served. The fourth nearly always is."""
    path, net, other = recorded(), small(), unserved()

    def run() -> Grads:
        return [grads for i in range(400) for grads in passes(net if i % 4 == 3 else other, [3])]

    expected = run()
    with ab.replay(path) as replaying:
        same(expected, run())
    assert replaying.report.compiled > 60, str(replaying.report)


def test_functions_of_one_file_are_places_of_their_own() -> None:
    """This holds even if they call backward at the same instruction."""
    path, net, other = recorded(), small(), unserved()

    def one(loss: torch.Tensor) -> None:
        loss.backward()

    def two(loss: torch.Tensor) -> None:
        loss.backward()

    with ab.replay(path) as replaying:
        for _ in range(20):
            for call, model in ((one, net), (two, other)):
                call(model(torch.ones(3, 4)).square().mean())
    assert replaying.report.compiled == 20 and sum(replaying.report.eager.values()) >= 15


def test_a_replay_whose_passes_nothing_serves_leaves_the_engine() -> None:
    path, net = recorded(), unserved()
    for count in (UNSERVED + 2, UNSERVED + 200):
        expected = passes(net, [3] * count)
        with ab.replay(path) as replaying:
            same(expected, passes(net, [3] * count))
        report = replaying.report
        assert report.passes == count == sum(report.misses.values()) + sum(report.eager.values())
        assert report.eager[f"after {UNSERVED} passes in a row without compiled code"] == count - UNSERVED
        same(expected, passes(net, [3] * count))
    with ab.replay(recorded(), strict=True) as replaying:  # the engine's setting is restored
        passes(small(), [3] * 20)
    assert replaying.report.hits == 19


def test_a_pass_that_is_served_begins_the_count_anew() -> None:
    path, net, other = recorded(), small(), unserved()
    most = [3] * (UNSERVED - 50)
    with ab.replay(path) as outer:
        for _ in range(2):
            passes(net, [3])
            passes_at_another_place(other, most)
        with ab.replay(path) as inner:
            passes_at_another_place(other, [3] * (UNSERVED + 50))
        assert inner.engine.has_left and inner.report.compiled == 0
        same(passes(net, [3]), passes(net, [3]))
    assert not outer.engine.has_left and outer.report.compiled == 4
    assert sum(outer.report.misses.values()) < 50  # the others ran in eager from their place of call, without a lookup


def passes_at_another_place(net: nn.Module, batches: Sequence[int]) -> None:
    for n in batches:
        net(torch.ones(n, 4)).square().mean().backward()


def test_a_package_without_faster_passes_does_not_ask_the_engine(tmp_path: Path) -> None:
    """The package of format 1.9 has code that was slower than eager."""
    with ab.replay(Path(__file__).parents[1] / "golden" / "1.9-passes.pt2") as replaying:
        assert replaying.engine.has_left
        same(passes(small(), [3] * 3), passes(small(), [3] * 3))
    assert replaying.report.eager == {"the package has no backward pass that is faster than eager's": 6}


def test_a_place_that_goes_on_to_another_structure_is_noticed() -> None:
    """While a place's passes run in eager, about one in 64 is looked up."""
    path, net, other = recorded(), small(), unserved()
    with ab.replay(path) as replaying:
        passes(other, [3] * 8)
        batches = [3] * 300
        same(passes(net, batches), passes(net, batches))
    assert replaying.report.compiled > 200
    with ab.replay(path, strict=True), pytest.raises(MissError, match="SigmoidBackward0"):
        passes(net, [3] * 8)
        passes(other, [3])


def test_another_place_is_judged_by_itself() -> None:
    """If a line calls backward on several structures and one of them is served, the engine is still used."""
    path, net, other = recorded(), small(), unserved()
    with ab.replay(path) as replaying:
        for _ in range(10):
            for each in (net, other):
                passes(each, [3])
    assert replaying.report.hits == 9 and sum(replaying.report.misses.values()) == 10


def test_eager_is_preferred_in_threads_too() -> None:
    """A hook of a pass in eager waits for another thread's pass."""
    path, nets = recorded(), [unserved(), unserved()]
    expected = passes(unserved(), [3] * 10)
    got: list[Grads] = []
    done = threading.Event()

    def other() -> None:
        got.append(passes(nets[1], [3] * 10))
        done.set()

    with ab.replay(path):
        passes(nets[0], [3] * 10)
        thread = threading.Thread(target=other)

        def hook(grad: torch.Tensor) -> None:
            if not thread.is_alive() and not done.is_set():
                thread.start()
                assert done.wait(30)

        nets[0][0].weight.register_hook(hook)
        same(expected, passes(nets[0], [3] * 10))
        thread.join()
    same(expected, got[0])


@pytest.mark.parametrize("chosen", ["compiled", "eager"])
def test_the_command_line_says_it(chosen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, path = tmp_path / "train.py", tmp_path / "bw.pt2"
    script.write_text(
        "import torch\n"
        "net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))\n"
        "for i in range(40):\n"
        "    net(torch.randn(3, 4)).square().mean().backward()\n"
    )
    monkeypatch.setattr(pass_speed, "_fastest", lambda times: chosen)
    done = called("record", "-o", path, "--tune", "quick", "--", script)
    counted = re.search(r"(\d+) backward passes of 1 structure recorded, (\d+) timed in eager", done.stderr)
    assert counted is not None and sum(map(int, counted.groups())) == 40 and int(counted[2]) >= 20, done.stderr
    if chosen == "eager":
        assert done.exit_code == 1 and "nothing was written: eager is as fast\n" in done.stderr and not path.exists()
        assert re.search(
            r"  left out, not faster than eager: pass\.\w+\.0: eager \d+ µs, compiled \d+ µs", done.stderr
        ), done.stderr
        return
    assert done.exit_code == 0, done.stderr
    shown = called("inspect", path)
    assert "Speed when it was recorded:" in shown.stdout and "eager" in shown.stdout, shown.stdout
    described = json.loads(called("inspect", "--json", path).stdout)
    (variant,) = described["entries"]["backward"]["structures"][0]["variants"]
    assert variant["speed"]["chosen"] == "compiled" and variant["speed"]["tune"] == "quick"
    replayed = called("replay", "--json", path, "--", script)
    # The first gradients are not accumulated
    assert replayed.exit_code == 0 and json.loads(replayed.stderr)["hits"] == 38, replayed.stderr


def test_sizes_in_any_order_are_timed_each_by_itself(tmp_path: Path) -> None:
    """Passes between two of one size do not keep that size in eager forever."""
    batches = [3, 5, 6, 6, 3, 5, 5, 3, 6] * 16
    with ab.record(tmp_path / "bw.pt2", tune="quick") as recording:
        passes(small(), batches)
    (structure,) = recording.structures.values()
    assert all(t.times_in_eager >= 20 for t in structure.times.values())
    assert recording.in_eager >= 60 and recording.in_eager + recording.recorded == 144


def test_what_begins_alike_and_is_another_structure_is_recorded_too() -> None:
    """A timed row of passes ends at the first one that differs, however late the difference comes."""

    def net(last: type[nn.Module]) -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 4), last(), *(m for _ in range(4) for m in (nn.Linear(4, 4), nn.ReLU())))

    one, other = net(nn.Tanh), net(nn.Sigmoid)
    with ab.record(None, tune="quick") as recording:
        for chosen in [one] * 4 + [other] * 9 + [one] * 3:
            chosen(torch.ones(3, 4)).square().mean().backward()
    assert len(recording.structures) == 2 and recording.in_eager + recording.recorded == 16


def test_what_is_traced_meanwhile_keeps_its_dynamic_sizes() -> None:
    net, x = small(), torch.randn(3, 4)
    torch._dynamo.mark_dynamic(x, 0)
    compiled = torch.compile(lambda x: net(x).square().mean(), backend="aot_eager")
    with ab.record(None, tune="quick"):
        compiled(x).backward()
    expected = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    same(passes_of(net, x), [expected])


def passes_of(net: nn.Module, x: torch.Tensor) -> Grads:
    net.zero_grad()
    net(x).square().mean().backward()
    return [[p.grad for p in net.parameters() if p.grad is not None]]


def test_what_differs_each_time_is_not_kept_for_ever() -> None:
    with ab.record(None, tune="quick") as recording:
        passes(small(), range(2, 202))
    (structure,) = recording.structures.values()
    assert recording.recorded == 200 and len(structure.times) <= 64


class NamedContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.name = "scale"  # the node's own name was in this attribute
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


def test_what_cannot_be_looked_at_is_not_timed() -> None:
    x = torch.ones(3, requires_grad=True)
    with ab.record(None, tune="quick") as recording:
        for _ in range(6):
            NamedContext.apply(x).sum().backward()
    assert recording.in_eager == 0 and x.grad is not None and x.grad.tolist() == [12.0] * 3


def test_a_pass_within_a_hook_is_timed_with_the_pass_that_it_is_in(tmp_path: Path) -> None:
    net, weight = small(), torch.ones(3, requires_grad=True)

    def hook(grad: torch.Tensor) -> None:
        with torch.enable_grad():
            (weight * 2).sum().backward()

    net[2].weight.register_hook(hook)
    with ab.record(None, tune="quick") as recording:
        passes(net, [3] * 40)
    (structure,) = (s for s in recording.structures.values() if len(s.tape.nodes) > 5)
    assert [t.times_in_eager >= 10 and t.eager < 1 for t in structure.times.values()] == [True]


def test_new_structures_in_one_thread_beside_passes_in_eager_in_another() -> None:
    """The engine's compiler stays in place while another thread's pass is about to call it. Removing it caused a
    crash."""
    path, known, done = recorded(), unserved(), threading.Event()

    def eager() -> None:
        while not done.is_set():
            passes(known, [3])

    def new() -> None:
        try:
            for depth in range(2, 40):
                net = nn.Sequential(*(m for _ in range(depth) for m in (nn.Linear(4, 4), nn.Tanh())))
                passes_of(net, torch.ones(3, 4))
        finally:
            done.set()

    with ab.replay(path) as replaying:
        threads = [threading.Thread(target=f) for f in (eager, new)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sum(replaying.report.eager.values()) > 0
