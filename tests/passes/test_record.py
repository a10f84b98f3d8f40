"""Record and replay unmodified programs through the public API."""

from __future__ import annotations

import gc
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import aot_backward as ab
from aot_backward_runtime import torch_api
from aot_backward_runtime.entries import autograd_function
from aot_backward_runtime.native.library import Library

from ..conftest import aot_backward
from ..support.exports import shared

Run = Callable[[Sequence[int]], list[list[Tensor | None]]]


def mlp(batches: Sequence[int], *, width: int = 16, activation: type[nn.Module] = nn.Tanh) -> list[list[Tensor | None]]:
    """Return the gradients of a small net, one list for each batch. Its hidden layers are as wide as one of the
    batches."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(8, width), activation(), nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, 3)
    )
    out = []
    for i, n in enumerate(batches):
        torch.manual_seed(i)
        net.zero_grad()
        nn.functional.cross_entropy(net(torch.randn(n, 8)), torch.randint(3, (n,))).backward()
        out.append([None if p.grad is None else p.grad.clone() for p in net.parameters()])
    return out


def attention(batches: Sequence[tuple[int, int]]) -> list[list[Tensor | None]]:
    """Vary batch and length independently. Some of both equal the width."""
    torch.manual_seed(0)
    net = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    out = []
    for i, (n, length) in enumerate(batches):
        torch.manual_seed(i)
        net.zero_grad()
        x = torch.randn(n, length, 16, requires_grad=True)
        net(x).square().mean().backward()
        out.append([x.grad, *(None if p.grad is None else p.grad.clone() for p in net.parameters())])
    return out


def same(expected: Sequence[Sequence[Tensor | None]], actual: Sequence[Sequence[Tensor | None]]) -> None:
    for e_step, a_step in zip(expected, actual, strict=True):
        largest = max(float(e.norm()) for e in e_step if e is not None)
        for e, a in zip(e_step, a_step, strict=True):
            assert (e is None) == (a is None)
            if e is not None and a is not None:
                assert e.dtype == a.dtype and e.shape == a.shape and e.stride() == a.stride()
                assert float((e - a).norm()) <= 1e-5 * max(float(e.norm()), 0.05 * largest)


def recorded_mlp() -> Path:
    """Return a package of :func:`mlp` over several batches. Do not write to it."""

    def make(path: Path) -> None:
        with ab.record(path) as recording:
            mlp((2, 2, 5, 7, 9, 64))
        assert not recording.skipped

    return shared("recorded-mlp", make)


@pytest.fixture(scope="session")
def package() -> Path:
    return recorded_mlp()


def test_recording_gives_eagers_bits(tmp_path: Path) -> None:
    expected = mlp((3, 3, 6))
    with ab.record() as recording:
        actual = mlp((3, 3, 6))
    for e_step, a_step in zip(expected, actual, strict=True):
        assert all(e is not None and a is not None and torch.equal(e, a) for e, a in zip(e_step, a_step, strict=True))
    assert len(recording.tapes) == 1 and recording.recorded == 3 and "AddmmBackward0" in str(recording.tapes[0])


def test_every_batch_is_one_variant(package: Path) -> None:
    (structure,) = ab.load(package).manifest.entries["backward"].structures
    (variant,) = structure.variants  # other batch sizes distinguish a batch of 16 from the layers of width 16
    assert len(variant.symbols) == 1 and variant.verdict.status == "verified" and len(variant.verdict.sizes) == 2
    batches = (2, 2, 5, 7, 9, 64, 16, 33, 8, 3)
    expected = mlp(batches)
    with ab.replay(package, strict=True) as replaying:
        same(expected, mlp(batches))
    report = replaying.report
    assert (report.bindings, report.hits, sum(report.misses.values()), sum(report.eager.values())) == (1, 9, 0, 0)
    assert report.to_json()["bindings"] == 1 and "9 hits" in str(report)


def test_a_logger_that_compiled_autograd_left_behind(tmp_path: Path) -> None:
    """The engine would call methods of PyTorch's own compiler."""
    torch_api.set_verbose_logger(logging.getLogger("left behind"))
    try:
        with ab.record(tmp_path / "bw.pt2", tune="none") as recording:
            mlp([3, 4, 3])
    finally:
        torch_api.set_verbose_logger(None)
    assert (recording.recorded, recording.report.eager) == (3, {})


def test_sizes_that_vary_by_themselves(tmp_path: Path) -> None:
    seen = ((2, 5), (2, 5), (16, 5), (2, 7), (5, 16))
    with ab.record(tmp_path / "bw.pt2") as recording:
        attention(seen)
    assert not recording.skipped
    structures = ab.load(tmp_path / "bw.pt2").manifest.entries["backward"].structures
    assert [len(s.variants) for s in structures] == [1] and len(structures[0].variants[0].symbols) >= 2
    never_seen = ((3, 9), (16, 16), (9, 3), (64, 2))
    expected = attention((*seen, *never_seen))
    with ab.replay(tmp_path / "bw.pt2", strict=True):
        same(expected, attention((*seen, *never_seen)))


def test_static_first_then_dynamic(tmp_path: Path) -> None:
    path = tmp_path / "bw.pt2"
    with ab.record(path):
        mlp((4, 4))
    before = ab.load(path).manifest.entries["backward"].structures[0].variants
    assert len(before) == 1 and not before[0].symbols
    expected = mlp((4, 6, 4))
    with ab.replay(path) as replaying:
        same(expected, mlp((4, 6, 4)))
    assert replaying.report.hits == 1
    ((miss, count),) = replaying.report.misses.items()
    assert "has size 6 in dimension 0; expected 4" in miss and count == 1
    with ab.record(path) as recording:
        mlp((4, 6))
    assert recording.recorded == 1  # the existing variant serves the batch of 4
    after = ab.load(path).manifest.entries["backward"].structures
    assert [len(s.variants) for s in after] == [2] and after[0].variants[0].symbols
    expected = mlp((4, 6, 11))
    with ab.replay(path, strict=True):
        same(expected, mlp((4, 6, 11)))


def test_a_fresh_process_needs_no_compiler_and_no_dynamo(package: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import json, sys, torch\n"
        "before = set(sys.modules)\n"
        "import aot_backward_runtime\n"
        "from torch import nn\n"
        "torch.manual_seed(0)\n"
        "net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 3))\n"
        "with aot_backward_runtime.replay(sys.argv[1], strict=True) as replaying:\n"
        "    for i, n in enumerate((2, 7, 12)):\n"
        "        torch.manual_seed(i)\n"
        "        net.zero_grad()\n"
        "        nn.functional.cross_entropy(net(torch.randn(n, 8)), torch.randint(3, (n,))).backward()\n"
        "new = {m.partition('.')[0] if not m.startswith('torch.') else '.'.join(m.split('.')[:2]) for m in set(sys.modules) - before}\n"
        "print(json.dumps([replaying.report.to_json(), sorted(new), [p.grad.double().sum().item() for p in net.parameters()]]))\n"
    )
    env = {**os.environ, "PATH": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    done = subprocess.run([sys.executable, script, package], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    report, modules, sums = json.loads(done.stdout)
    assert (report["bindings"], report["hits"], report["misses"], report["eager"]) == (1, 2, {}, {})
    assert (
        not {"torch._dynamo", "torch._inductor", "sympy", "onnx", "click"} & set(modules)
        and not (tmp_path / "inductor").exists()
    )
    assert sums == pytest.approx(
        [float(g.double().sum()) for g in mlp((2, 7, 12))[-1] if g is not None], rel=1e-4, abs=1e-5
    )


def test_a_miss_is_interpreted_counted_and_logged_once(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = mlp((3, 4, 5), activation=nn.Sigmoid)
    said: list[logging.LogRecord] = []
    monkeypatch.setattr(logging.getLogger("aot_backward.replay"), "handle", said.append)
    with ab.replay(package) as replaying:
        actual = mlp((3, 4, 5), activation=nn.Sigmoid)
    for e_step, a_step in zip(expected, actual, strict=True):
        assert all(e is not None and a is not None and torch.equal(e, a) for e, a in zip(e_step, a_step, strict=True))
    assert len(said) == 1 and "was interpreted" in said[0].getMessage()
    ((reason, count),) = replaying.report.misses.items()
    assert count == 3 and "is SigmoidBackward0, in the nearest recorded structure it is TanhBackward0" in reason


def test_strict_makes_a_miss_an_error_before_anything_ran(package: Path) -> None:
    leaf = torch.randn(3, requires_grad=True)
    with ab.replay(package, strict=True):
        for _ in range(2):  # a binding pass, then one in the engine's cache
            with pytest.raises(ab.MissError, match="was not recorded"):
                leaf.sin().sum().backward()
    assert leaf.grad is None
    leaf.sin().sum().backward()
    assert torch.equal(leaf.grad, leaf.cos())


def test_a_wrong_graph_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Library.run
    with ab.record(tmp_path / "bw.pt2", min_seen=1) as recording:
        mlp((3, 4))
        monkeypatch.setattr(Library, "run", lambda self, inputs: [r * 1.01 for r in original(self, inputs)])
        infinite = torch.zeros(1, requires_grad=True)
        (torch.randn(3, requires_grad=True).sin().sum() + infinite.sqrt().sum()).backward()
    assert infinite.grad is not None and infinite.grad.isinf()
    assert [("is wrong:" in reason) for reason in recording.skipped] == [True, True]
    assert not (tmp_path / "bw.pt2").exists()


def test_leaves_get_gradients_of_their_own(tmp_path: Path) -> None:
    def step() -> tuple[Tensor, Tensor, Tensor]:
        a, b, c = (torch.full((4,), 1.0 + i, requires_grad=True) for i in range(3))
        given = torch.arange(4.0)
        (a + b + c.view(2, 2).t().reshape(4)).backward(given)
        return a, b, c

    with ab.record(tmp_path / "bw.pt2", min_seen=1) as recording:
        step()
    assert not recording.skipped
    with ab.replay(tmp_path / "bw.pt2", strict=True):
        a, b, c = step()
        assert a.grad is not None and b.grad is not None and c.grad is not None
        a.grad.add_(100)
        assert b.grad.tolist() == [0, 1, 2, 3] and c.grad.tolist() == [0, 2, 1, 3]


def test_gradients_accumulate_in_the_tensor_that_is_there(package: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 3))
    x, y = torch.randn(5, 8), torch.randint(3, (5,))

    def step() -> None:
        nn.functional.cross_entropy(net(x), y).backward()

    step()
    once = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    held = [p.grad for p in net.parameters()]
    with ab.replay(package, strict=True) as replaying:
        step()
        step()
    assert replaying.report.hits == 1
    assert all(p.grad is h for p, h in zip(net.parameters(), held, strict=True))
    same([[3 * g for g in once]], [[p.grad for p in net.parameters()]])


def test_a_tensor_of_lower_rank_is_a_miss(tmp_path: Path) -> None:
    def step(mask: Tensor) -> Tensor | None:
        x = torch.linspace(-1, 1, 6).reshape(2, 3).requires_grad_()
        x.masked_fill(mask, 0.0).sum().backward()
        return x.grad

    wide, narrow = torch.tensor([[True], [False]]), torch.tensor([True, False, False])
    with ab.record(tmp_path / "bw.pt2"):
        step(wide)
        step(torch.eye(2, 3).bool())
    with ab.replay(tmp_path / "bw.pt2") as replaying:
        actual = [step(wide), step(narrow)]
    torch.testing.assert_close(actual, [step(wide), step(narrow)])
    assert ["dimensions" in r for r in replaying.report.misses] == [True]


def test_what_a_hook_returns_is_looked_at(tmp_path: Path) -> None:
    """A gradient with other strides is copied. An undefined one sends that part of the pass to the interpreter."""
    returned: list[Callable[[Tensor], Tensor | None]] = [lambda g: g * 2]

    class Maybe(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor | None:
            return returned[0](grad)

    def step() -> Tensor | None:
        x = torch.linspace(-1, 1, 12).reshape(3, 4).requires_grad_()
        Maybe.apply(x.sin().exp()).square().sum().backward()
        return x.grad

    path = tmp_path / "bw.pt2"
    with ab.record(path, min_seen=1) as recording:
        step()
    assert not recording.skipped
    for change in (lambda g: g * 2, lambda g: (g.t().contiguous() * 2).t(), lambda g: None):
        returned[0] = change
        expected = step()
        with ab.replay(path) as replaying:
            actual = step()
        assert (expected is None) == (actual is None)
        if expected is not None and actual is not None:
            torch.testing.assert_close(actual, expected)
        assert [("%v" in m and "undefined" in m) for m in replaying.report.misses] == (
            [True] if expected is None else []
        )


class Scaled(torch.autograd.Function):
    """Its backward has a side effect, and reads a number that the forward stored."""

    calls: ClassVar[list[int]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        Scaled.calls.append(1)
        return grad * ctx.factor + 0 * x, None


def test_a_custom_backward_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its code and the numbers in its context may change after recording."""

    def step(factor: float) -> Tensor | None:
        x = torch.linspace(-1, 1, 6, requires_grad=True)
        Scaled.apply(x.exp(), factor).sin().sum().backward()
        return x.grad

    def other(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor * 5, None

    backwards = Scaled.backward, other

    def steps() -> list[Tensor | None]:
        out = []
        for backward in backwards:
            monkeypatch.setattr(Scaled, "backward", staticmethod(backward))
            out += [step(factor) for factor in (3.0, 40.0, -0.0)]
        return out

    path = tmp_path / "bw.pt2"
    with ab.record(path, min_seen=1) as recording:
        step(2.0)
        step(3.0)
    assert not recording.skipped and len(ab.load(path).manifest.entries["backward"].structures) == 1
    expected = steps()
    Scaled.calls.clear()
    with ab.replay(path, strict=True):
        actual = steps()
    assert len(Scaled.calls) == 3
    torch.testing.assert_close(actual, expected)


def test_gradients_that_were_absent_and_come(tmp_path: Path, package: Path) -> None:
    """The custom function returned None while recording."""
    given: list[float | None] = [None]

    class Sometimes(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
            return x * y

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
            return grad * 2, None if given[0] is None else grad * given[0]

    def step() -> list[Tensor | None]:
        x, y = (torch.linspace(-1, 1, 6, requires_grad=True) for _ in range(2))
        Sometimes.apply(x.tanh(), y.tanh()).sum().backward()
        return [x.grad, y.grad]

    with ab.record(tmp_path / "bw.pt2", min_seen=1):
        step()
    given[0] = 3.0
    expected = step()
    with ab.replay(tmp_path / "bw.pt2") as replaying:
        actual = step()
    torch.testing.assert_close(actual, expected)
    assert ["is defined" in r for r in replaying.report.misses] == [True]


def test_a_variant_for_each_precision(tmp_path: Path) -> None:
    """Ambient state has a separate guard. A match for one variant must not block another."""
    precision = torch.get_float32_matmul_precision()
    try:
        with ab.record(tmp_path / "bw.pt2") as recording:
            for wanted in ("highest", "high"):
                torch.set_float32_matmul_precision(wanted)
                mlp((4,))
        assert not recording.skipped
        with ab.replay(tmp_path / "bw.pt2", strict=True):
            for wanted in ("highest", "high", "highest"):
                torch.set_float32_matmul_precision(wanted)
                mlp((4, 4))
    finally:
        torch.set_float32_matmul_precision(precision)


def test_the_order_of_the_forward_decides_the_order_of_hooks(tmp_path: Path) -> None:
    def step(first: str) -> tuple[list[str], Tensor | None]:
        log: list[str] = []
        x, y = (torch.linspace(-1, 1, 6, requires_grad=True) for _ in range(2))
        made = {
            n: t.cos() if n == "a" else t.sin()
            for n, t in ((("a", x), ("b", y)) if first == "a" else (("b", y), ("a", x)))
        }
        for name in ("a", "b"):
            made[name].register_hook(lambda g, n=name: log.append(n))
        (made["a"] + made["b"]).exp().sum().backward()
        return log, x.grad

    with ab.record(tmp_path / "bw.pt2", min_seen=1) as recording:
        step("a")
        step("b")
    assert not recording.skipped
    expected = [step(f) for f in ("b", "a", "b", "b")]
    with ab.replay(tmp_path / "bw.pt2", strict=True) as replaying:
        actual = [step(f) for f in ("b", "a", "b", "b")]
    assert [log for log, _ in actual] == [log for log, _ in expected] and expected[0][0] != expected[1][0]
    torch.testing.assert_close([g for _, g in actual], [g for _, g in expected])
    assert replaying.report.bindings == 1


def test_memory_that_changes_under_a_pass(tmp_path: Path) -> None:
    w1, w2 = (torch.linspace(-1, 1, 9).reshape(3, 3).requires_grad_() for _ in range(2))
    relay = [False]

    def hook(parameter: Tensor) -> None:
        if relay[0]:
            w1.data = w1.data.t().contiguous().t()  # the same numbers in another layout

    w2.register_post_accumulate_grad_hook(hook)

    def step() -> list[Tensor | None]:
        x = torch.linspace(0, 1, 6).reshape(2, 3).requires_grad_()
        w1.grad = w2.grad = None
        w1.data = torch.linspace(-1, 1, 9).reshape(3, 3)
        ((x @ w1).tanh() @ w2).sum().backward()
        return [x.grad, w1.grad, w2.grad]

    def accumulated(grad_of_leaf: bool) -> Tensor | None:
        a, b = (torch.linspace(-1, 1, 4, requires_grad=True) for _ in range(2))
        a.grad = torch.ones(4)
        (b.tanh() * 2 + a.cos() * 3).backward(a.grad if grad_of_leaf else torch.ones(4))
        return b.grad

    with ab.record(tmp_path / "bw.pt2", min_seen=1) as recording:
        step()
        accumulated(False)
    assert not recording.skipped
    relay[0] = True
    expected = [*step(), accumulated(True)]
    with ab.replay(tmp_path / "bw.pt2") as replaying:
        actual = [*step(), accumulated(True)]
    torch.testing.assert_close(actual, expected)
    assert sorted("new strides or new memory" in r for r in replaying.report.misses) == [False, True]


def test_a_size_that_turns_out_to_be_another(tmp_path: Path) -> None:
    def step(n: int) -> Tensor | None:
        x = torch.linspace(-1, 1, n * 6).reshape(n, 6).requires_grad_()
        x.tanh()[1 : n - 1].exp().sum().backward()
        return x.grad

    with ab.record(tmp_path / "bw.pt2") as recording:
        for n in (4, 7, 9):
            step(n)
        mlp((3, 5))
    assert not [r for r in recording.skipped if "unknown symbol" in r]
    expected = [step(n) for n in (4, 5, 12)]
    with ab.replay(tmp_path / "bw.pt2") as replaying:
        torch.testing.assert_close([step(n) for n in (4, 5, 12)], expected)
        mlp((3, 8))
    assert replaying.report.hits >= 1


def test_contexts_nest_and_put_back_what_was_there(package: Path, tmp_path: Path) -> None:
    with ab.replay(package) as outer:
        mlp((4, 5))
        with ab.record() as inner:
            mlp((4,))
        mlp((6,))
        assert not outer.is_cache_empty()
        outer.clear_cache()
        assert outer.is_cache_empty()
        with pytest.raises(ZeroDivisionError), ab.record(tmp_path / "never.pt2"):
            mlp((4,))
            _ = 1 / 0
        mlp((7,))
    assert inner.recorded == 1 and not (tmp_path / "never.pt2").exists()
    assert outer.report.bindings == 3 and outer.report.hits == 1 and not outer.report.misses
    mlp((4,))
    assert outer.report.bindings + outer.report.hits == 4  # passes after the context are not seen


def test_threads_one_at_a_time_good_and_bad(package: Path) -> None:
    expected = mlp((4, 5, 6, 7))
    errors: list[BaseException] = []

    def good() -> None:
        try:
            for _ in range(5):
                x = torch.linspace(0, 1, 3, requires_grad=True)  # avoids the random numbers that mlp draws
                x.sin().sum().backward()
                assert torch.equal(x.grad, x.cos())
        except BaseException as error:
            errors.append(error)

    def bad() -> None:
        def fails(grad: Tensor) -> None:
            raise KeyError("the hook's own")

        try:
            for _ in range(5):
                x = torch.linspace(0, 1, 3, requires_grad=True)  # avoids the random numbers that mlp draws
                x.register_hook(fails)
                with pytest.raises(KeyError, match="own"):
                    x.exp().sum().backward()
        except BaseException as error:
            errors.append(error)

    with ab.replay(package) as replaying:
        threads = [threading.Thread(target=t) for t in (good, bad, good, bad)]
        for t in threads:
            t.start()
        actual = mlp((4, 5, 6, 7))
        for t in threads:
            t.join(60)
            assert not t.is_alive()
    assert not errors
    same(expected, actual)
    # All are counted; mlp's were replayed while the threads' unserved passes ran in eager
    assert replaying.report.passes == 24


def test_a_thousand_hits_leave_nothing(package: Path) -> None:
    with ab.replay(package, strict=True):
        mlp((4,) * 10)
        gc.collect()
        before = len(gc.get_objects())
        mlp((4,) * 1000)
        gc.collect()
        assert len(gc.get_objects()) - before < 2000  # the gradients that mlp returned, and nothing per pass


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(
        "import sys, torch\n"
        "from torch import nn\n"
        "torch.manual_seed(0)\n"
        "net = nn.Sequential(nn.Linear(4, 8), nn.Tanh() if sys.argv[1] == 'tanh' else nn.Sigmoid(), nn.Linear(8, 2))\n"
        "for n in (3, 5, 9):\n"
        "    net(torch.randn(n, 4)).square().sum().backward()\n"
        "print(__name__, sys.argv[1:], sum(p.grad.sum().item() for p in net.parameters()))\n"
        "sys.exit(int(sys.argv[2]))\n"
    )
    return path


def test_the_command_line(script: Path, tmp_path: Path) -> None:
    package = tmp_path / "bw.pt2"
    eager = subprocess.run([sys.executable, script, "tanh", "3"], capture_output=True, text=True)
    done = aot_backward("record", "-o", package, "--json", "--", script, "tanh", "3")
    assert (done.returncode, done.stdout) == (3, eager.stdout), done.stderr
    assert json.loads(done.stderr)["recorded"] == 3 and json.loads(done.stderr)["skipped"] == {}
    done = aot_backward("replay", package, "--strict", "--json", "--", script, "tanh", "0")
    assert done.returncode == 0 and (json.loads(done.stderr)["bindings"], json.loads(done.stderr)["hits"]) == (2, 1), (
        done.stderr
    )

    done = aot_backward("replay", package, "--strict", "--", script, "sigmoid", "0")
    assert done.returncode == 1 and done.stderr.startswith("error: the structure"), done.stderr
    done = aot_backward("replay", package, "--", script, "sigmoid", "0")
    assert done.returncode == 0 and "miss x3: the structure" in done.stderr, done.stderr
    done = aot_backward("record", "-o", package, "--", script, "sigmoid", "0")  # onto the same file
    assert done.returncode == 0 and f"wrote {package}" in done.stderr, done.stderr
    for activation in ("tanh", "sigmoid"):
        done = aot_backward("replay", package, "--strict", "--json", "--", script, activation, "0")
        assert done.returncode == 0 and json.loads(done.stderr)["misses"] == {}, done.stderr

    done = aot_backward("record", "-o", tmp_path / "none.pt2", "--", tmp_path / "absent.py")
    assert done.returncode == 2 and "absent.py does not exist" in done.stderr


def test_what_cannot_be_written_is_found_out_first(tmp_path: Path, package: Path) -> None:
    for path, said in ((tmp_path / "none" / "bw.pt2", "does not exist"), (tmp_path, "is a directory")):
        with pytest.raises(ab.ExportError, match=said):
            ab.record(path)
    with pytest.raises(ab.PackageError, match="cannot open package"):
        ab.replay(tmp_path / "none.pt2")


def test_two_processes_record_into_one_package(script: Path, tmp_path: Path) -> None:
    package = tmp_path / "bw.pt2"
    argv = [sys.executable, "-m", "aot_backward.cli", "record", "-o", str(package), "--", str(script)]
    both = [
        subprocess.Popen([*argv, name, "0"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        for name in ("tanh", "sigmoid")
    ]
    for process in both:
        _, said = process.communicate()
        assert process.returncode == 0, said
    assert len(ab.load(package).manifest.entries["backward"].structures) == 2


def test_a_script_that_fails_writes_nothing(script: Path, tmp_path: Path) -> None:
    done = aot_backward("record", "-o", tmp_path / "bw.pt2", "--", script, "tanh", "three")
    assert done.returncode == 1 and "ValueError" in done.stderr and not (tmp_path / "bw.pt2").exists()


def test_a_package_of_modules_gets_a_replay_entry(tmp_path: Path) -> None:
    path = tmp_path / "net.pt2"
    net = nn.Linear(3, 2)
    ab.export_module(net, (torch.randn(4, 3),), path=path)
    copy = shutil.copy(path, tmp_path / "copy.pt2")
    with ab.record(path):
        mlp((3, 4))
    loaded = ab.load(path)
    assert loaded.entries == {"module": "module", "backward": "replay"}
    x = torch.randn(4, 3)
    assert torch.equal(loaded.module()(x), ab.load(copy).module()(x))
    with ab.replay(path, strict=True):
        mlp((3, 4))
    with pytest.raises(ab.AotBackwardError, match="expected a replay entry, got "):
        ab.replay(copy)


def test_the_functions_of_a_loaded_module_keep_their_names() -> None:
    """Packages of any version find recorded passes by these names."""
    recorded = {"aot_backward_runtime.module._Native", "aot_backward_runtime.module._Refusing"}
    functions = {
        f for f in vars(autograd_function).values() if isinstance(f, type) and issubclass(f, torch.autograd.Function)
    }
    assert {f"{f.__module__}.{f.__qualname__}" for f in functions} == recorded
    assert {f._backward_cls.__name__ for f in functions} == {"_NativeBackward", "_RefusingBackward"}
