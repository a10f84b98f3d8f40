"""A replay runs compiled code only where it was the fastest way when it was recorded: what is timed, what goes to eager, and what is said."""

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
from aot_backward_runtime import load
from aot_backward_runtime.errors import MissError
from aot_backward_runtime.format.manifest import Choice, PassSpec, Speed, Timing

from ..conftest import aot_backward
from ..support.exports import shared

Grads = list[list[torch.Tensor]]
pytestmark = pytest.mark.usefixtures("one_thread")


def small(width: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2))


def passes(net: nn.Module, batches: Sequence[int]) -> Grads:
    """All of them called from one line."""
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


def said(chosen: str, *choices: Choice) -> Callable[..., Speed]:
    """In the place of what measures a compiled pass: one that says that ``chosen`` was ten times as fast, or what was at each of the sizes."""
    ways = [choice.chosen for choice in choices] or [chosen]
    timings = tuple(Timing(name, tuple(10.0 if name == way else 100.0 for way in ways)) for name in ("eager", "interpreted", "compiled"))
    sizes = tuple("" for _ in ways)
    return lambda *_: Speed(chosen, timings, sizes, 1, "a processor", "quick", "cpu", torch.__version__, 0, choices=choices)


def recorded(chosen: str) -> Path:
    """:func:`passes` of :func:`small`, of which ``chosen`` is said to be the fastest way. Do not write to it."""

    def make(path: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pass_speed, "measure", said(chosen))
            with ab.record(path, tune="quick") as recording:
                passes(small(), (3, 3, 5))
        assert not recording.skipped
        assert [chosen in words and "backward called at" in words for words in recording.slower] == ([] if chosen == "compiled" else [True])

    return shared(f"pass-speed-{chosen}", make)


def test_what_a_pass_takes_is_measured_and_kept(tmp_path: Path) -> None:
    """Every gradient is eager's meanwhile, whichever way a pass runs, and each hook is called once."""
    path, batches, net, called = tmp_path / "bw.pt2", (3, 5, *[6] * 40), small(), []
    expected = passes(net, batches)
    net[2].weight.register_hook(lambda g: called.append(tuple(g.shape)))
    with ab.record(path, tune="quick") as recording:
        same(expected, passes(net, batches))
    assert called == [(2, 8)] * len(batches)
    assert recording.in_eager >= 20 and recording.in_eager + recording.recorded == 42 and not recording.skipped
    speed = the_pass(path).speed
    assert speed is not None and [t.name for t in speed.timings] == ["eager", "interpreted", "compiled"]
    assert speed.chosen in speed.means and min(speed.means.values()) > 1
    assert speed.sizes == ("s0=6",) and speed.tune == "quick" and speed.threads == torch.get_num_threads()
    assert [speed.chosen] * len(recording.slower) == [speed.chosen for _ in recording.slower if speed.chosen != "compiled"]


def test_nothing_is_timed_where_it_is_not_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "bw.pt2"
    with ab.record(path, tune="none") as recording:
        passes(small(), (3, 5, *[6] * 20))
    assert recording.in_eager == 0 and recording.recorded == 22 and the_pass(path).speed is None
    with pytest.raises(ab.ExportError, match="tune is 'much'; expected one of 'none', 'quick', 'full'"):
        ab.record(path, tune="much")


def test_passes_that_look_alike_and_are_not_are_all_recorded(tmp_path: Path) -> None:
    """The limit of a clamp is in no shape and no name: each of these is a structure of its own, and none is timed under another's name."""
    weight = torch.ones(3, requires_grad=True)
    with ab.record(tmp_path / "bw.pt2", tune="quick") as recording:
        for i in range(12):
            (weight * 2).clamp(max=1 + i % 3).sum().backward()
    assert recording.in_eager == 0 and recording.recorded == 12 and len(recording.structures) == 3


def test_what_eager_did_faster_goes_to_eager() -> None:
    path, batches, net = recorded("eager"), [3] * 40, small()
    expected = passes(net, batches)
    with ab.replay(path) as replaying:
        same(expected, passes(net, batches))
    report = replaying.report
    assert (report.bindings, report.hits, sum(report.slower.values())) == (1, 2, 37) and not report.misses and not report.eager
    assert "3 of 40 backward passes (1 binding, 2 hits) ran compiled\n37 not faster compiled" in str(report) and report.to_json()["slower"]
    for more in ({"always": True}, {"strict": True}):
        with ab.replay(path, **more) as replaying:
            same(expected, passes(net, batches))
        assert replaying.report.hits == 39 and not replaying.report.slower


def test_what_was_faster_interpreted_is_interpreted() -> None:
    path, batches, net = recorded("interpreted"), [3] * 20, small()
    expected = passes(net, batches)
    with ab.replay(path) as replaying:
        same(expected, passes(net, batches))
    assert replaying.report.hits == 0 and sum(replaying.report.slower.values()) == 19 and not replaying.report.misses
    assert all("interpreted 10 µs, compiled 100 µs" in reason for reason in replaying.report.slower)
    with ab.replay(path, always=True) as replaying:
        same(expected, passes(net, batches))
    assert replaying.report.hits == 19 and not replaying.report.slower


def test_what_is_fastest_compiled_is_a_hit_each_time() -> None:
    path, batches, net = recorded("compiled"), [3] * 20, small()
    expected = passes(net, batches)
    with ab.replay(path) as replaying:
        same(expected, passes(net, batches))
    assert replaying.report.hits == 19 and not replaying.report.slower


def test_each_size_runs_as_was_best_at_the_nearest(tmp_path: Path) -> None:
    path, net = tmp_path / "bw.pt2", small()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pass_speed, "measure", said("compiled", Choice({"s0": 4}, "interpreted"), Choice({"s0": 100}, "compiled")))
        with ab.record(path, tune="quick") as recording:
            passes(net, (3, 3, 5))
    assert [" at : " in words and "interpreted" in words for words in recording.slower] == [True]
    batches = [15] * 10 + [30] * 10
    with ab.replay(path) as replaying:
        same(passes(small(), batches), passes(small(), batches))
    report = replaying.report
    assert (report.bindings, report.hits, sum(report.slower.values())) == (1, 20, 19) and not report.misses


def test_where_structures_take_turns_each_is_looked_at() -> None:
    """Three of four passes that one line calls are faster in eager; the fourth, which is not, is run compiled nearly each time."""
    path, net, other = recorded("eager"), small(), nn.Sequential(nn.Linear(4, 3), nn.Sigmoid())

    def run() -> Grads:
        return [grads for i in range(400) for grads in passes(other if i % 4 == 3 else net, [3])]

    expected = run()
    with ab.replay(path) as replaying:
        same(expected, run())
    assert sum(replaying.report.misses.values()) > 60, str(replaying.report)


def test_functions_of_one_file_are_places_of_their_own() -> None:
    """Also where they call backward at the same instruction."""
    path, net, other = recorded("eager"), small(), nn.Sequential(nn.Linear(4, 3), nn.Sigmoid())

    def one(loss: torch.Tensor) -> None:
        loss.backward()

    def two(loss: torch.Tensor) -> None:
        loss.backward()

    with ab.replay(path) as replaying:
        for _ in range(20):
            for call, model in ((one, net), (two, other)):
                call(model(torch.ones(3, 4)).square().mean())
    assert sum(replaying.report.misses.values()) == 20 and sum(replaying.report.slower.values()) >= 15


def test_a_session_whose_passes_all_go_to_eager_rests() -> None:
    """Nothing is looked at then, but for one pass in some 64; what is counted adds up, also where the context is left within a rest."""
    path, net = recorded("eager"), small()
    for count in (150, 400):
        expected = passes(net, [3] * count)
        with ab.replay(path) as replaying:
            same(expected, passes(net, [3] * count))
        report = replaying.report
        assert report.bindings + report.hits + sum(report.slower.values()) == count and not report.misses and not report.eager
        assert report.slower["left to eager without a look, as all before them were"] > count - 110
        same(expected, passes(net, [3] * count))
    with ab.replay(path, strict=True) as replaying:  # the engine's setting is as it was
        passes(net, [3] * 80)
    assert replaying.report.hits == 79


def test_a_rest_ends_where_compiled_code_is_faster(tmp_path: Path) -> None:
    """And a pass that the engine would not have is counted as such, in a rest too."""
    path, slow, net = tmp_path / "bw.pt2", small(), nn.Sequential(nn.Linear(4, 3), nn.Sigmoid())
    path.write_bytes(recorded("eager").read_bytes())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pass_speed, "measure", said("compiled"))
        with ab.record(path, tune="quick"):
            passes(net, (3, 3, 5))
    with ab.replay(path) as replaying:
        passes(slow, [3] * 80)
        leaf = torch.ones(2, requires_grad=True)
        torch.autograd.grad((leaf**2).sum(), leaf, create_graph=True)
        same(passes(net, [3] * 400), passes(net, [3] * 400))
    report = replaying.report
    assert report.hits > 500 and sum(report.eager.values()) == 1 and not report.misses
    assert report.bindings + report.hits + sum(report.slower.values()) == 880


def test_a_place_that_goes_on_to_another_structure_is_noticed() -> None:
    """The package holds nothing for the other one: while its passes go to eager with the first's, one in some 64 is looked at."""
    path, net, other = recorded("eager"), small(), nn.Sequential(nn.Linear(4, 3), nn.Sigmoid())
    batches = [3] * 200
    with ab.replay(path) as replaying:
        passes(net, [3] * 8)
        same(passes(other, batches), passes(other, batches))
    assert replaying.report.misses and "SigmoidBackward0" in str(replaying.report)
    with ab.replay(path, strict=True), pytest.raises(MissError, match="SigmoidBackward0"):
        passes(net, [3] * 8)
        passes(other, [3])


def test_another_place_is_judged_by_itself() -> None:
    """Where a line calls backward on several structures of which one is not known to be slower, the engine goes on being asked."""
    path, net, other = recorded("eager"), small(), nn.Sequential(nn.Linear(4, 3), nn.Sigmoid())
    with ab.replay(path) as replaying:
        for _ in range(10):
            for each in (net, other):
                passes(each, [3])
    assert replaying.report.hits == 9 and not replaying.report.slower
    assert sum(replaying.report.misses.values()) == 10


def test_eager_is_preferred_in_threads_too() -> None:
    """A hook of a pass that went to eager waits for another thread's pass."""
    path, nets = recorded("eager"), [small(), small()]
    expected = passes(small(), [3] * 10)
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

        nets[0][2].weight.register_hook(hook)
        same(expected, passes(nets[0], [3] * 10))
        thread.join()
    same(expected, got[0])


def test_the_command_line_says_it(tmp_path: Path) -> None:
    script, path = tmp_path / "train.py", tmp_path / "bw.pt2"
    script.write_text(
        "import torch\n"
        "net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))\n"
        "for i in range(40):\n"
        "    net(torch.randn(3, 4)).square().mean().backward()\n"
    )
    done = aot_backward("record", "-o", path, "--tune", "quick", "--", script)
    assert done.returncode == 0, done.stderr
    counted = re.search(r"(\d+) backward passes of 1 structure recorded, (\d+) timed in eager", done.stderr)
    assert counted is not None and sum(map(int, counted.groups())) == 40 and int(counted[2]) >= 20, done.stderr
    shown = aot_backward("inspect", path)
    assert "timed when it was recorded" in shown.stdout and "eager" in shown.stdout, shown.stdout
    described = json.loads(aot_backward("inspect", "--json", path).stdout)
    (variant,) = described["entries"]["backward"]["structures"][0]["variants"]
    assert variant["speed"]["chosen"] in ("eager", "compiled", "interpreted") and variant["speed"]["tune"] == "quick"
    always = aot_backward("replay", "--always", "--json", path, "--", script)
    assert always.returncode == 0 and json.loads(always.stderr)["hits"] == 38, (
        always.stderr
    )  # the first gradients are not added to others: bound twice


def test_sizes_in_any_order_are_timed_each_by_itself(tmp_path: Path) -> None:
    """What comes between two passes of one size does not keep them in eager for ever."""
    batches = [3, 5, 6, 6, 3, 5, 5, 3, 6] * 16
    with ab.record(tmp_path / "bw.pt2", tune="quick") as recording:
        passes(small(), batches)
    (structure,) = recording.structures.values()
    assert all(t.times_in_eager >= 20 for t in structure.times.values())
    assert recording.in_eager >= 60 and recording.in_eager + recording.recorded == 144


def test_what_begins_alike_and_is_another_structure_is_recorded_too() -> None:
    """A row of passes that are timed ends at the first that differs, however far from its beginning."""

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
        ctx.name = "scale"  # what the node's own name was
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


def test_a_tie_goes_to_what_the_package_says() -> None:
    """Interpreting was a little faster on the average, not by enough to be chosen."""
    timings = tuple(Timing(name, (t,)) for name, t in (("eager", 110.0), ("interpreted", 99.0), ("compiled", 100.0)))

    def make(path: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pass_speed, "measure", lambda *_: Speed("compiled", timings, ("",), 1, "a", "quick", "cpu", torch.__version__, 0))
            with ab.record(path, tune="quick"):
                passes(small(), (3, 3, 5))

    with ab.replay(shared("pass-speed-tie", make)) as replaying:
        passes(small(), [3] * 10)
    assert replaying.report.hits == 9 and not replaying.report.slower


def test_new_structures_in_one_thread_beside_passes_in_eager_in_another() -> None:
    """The engine's compiler is not taken away while another thread's pass is about to call it: that was a crash."""
    path, known, done = recorded("eager"), small(), threading.Event()

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
    assert sum(replaying.report.slower.values()) > 0
