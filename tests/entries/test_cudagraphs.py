"""CUDA graphs on a simulated GPU: copies in and out, memory lent between forward and backward, and calls without a
graph."""

from __future__ import annotations

import copy
import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.export import Dim

import aot_backward as ab
from aot_backward_runtime import IncompatibleError, InputError, load
from aot_backward_runtime.native import cuda_graphs

from ..conftest import aot_backward
from ..support import exports
from ..support.oracle import assert_same
from ..support.simulated_gpu import graphed

ROWS = {0: Dim("rows", min=3, max=64)}  # with two rows, BatchNorm leaves only rounding of most gradients


class Net(nn.Module):
    """Running statistics, random numbers, an output that is saved for the backward, and one that is a view of
    another."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        hidden = torch.tanh(self.drop(self.norm(self.first(x))))
        return self.last(hidden), hidden, hidden.flatten()


def net() -> Net:
    torch.manual_seed(4)
    return Net()


def _loss(outputs: tuple[torch.Tensor, ...], label: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs[0], label) + 0.1 * outputs[1].square().mean()


def _energy(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (torch.sin(x) * scale).square().sum()


def _make(path: Path) -> None:
    x, label = torch.randn(8, 6), torch.randint(0, 3, (8,))
    module, trained = net(), net()
    step = ab.Step(
        trained,
        [ab.Variant((x, label), dynamic_shapes=(ROWS, ROWS))],
        torch.optim.AdamW(trained.parameters(), lr=1e-2),
        loss_fn=_loss,
        accumulate=True,
    )
    wide = torch.randn(1, 6).expand(8, 6)
    ab.export(
        path,
        {
            "net": ab.Module(module, [ab.Variant((x.clone().requires_grad_(),), dynamic_shapes=(ROWS,))]),
            "energy": ab.Grad(_energy, [ab.Variant((x, wide), dynamic_shapes=(ROWS, ROWS))], wrt="x"),
            "fit": step,
        },
    )


@pytest.fixture(scope="module")
def package() -> Path:
    return exports.shared("cudagraphs", _make)


def _inputs(rows: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(seed))


def _trained(module: nn.Module, sizes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Return all results of training at batches of those sizes, step by step."""
    found = {}
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for i, rows in enumerate(sizes):
        x, label = _inputs(rows, i).requires_grad_(), torch.arange(rows) % 3
        optimizer.zero_grad()
        torch.manual_seed(i)
        outputs = module(x)
        _loss(outputs, label).backward()
        found |= {f"output {i}.{n}": t.detach() for n, t in enumerate(outputs)}
        found |= {f"gradient {i} {n}": p.grad.clone() for n, p in module.named_parameters()} | {
            f"gradient {i} x": x.grad
        }
        optimizer.step()
    return found | {n: b.clone() for n, b in module.named_buffers()}


def test_a_training_loop_is_eagers(package: Path) -> None:
    loaded, _ = graphed(package)
    sizes = (8, 8, 5, 8, 5, 5, 8, 5)
    assert_same(_trained(loaded.module("net"), sizes), _trained(net(), sizes))
    report = loaded.cudagraphs
    assert report is not None and report.captured == 4  # forward and backward, at two sizes
    assert report.plain == {cuda_graphs.WARM_UP: 2, "the backward of a forward that ran without a CUDA graph": 2}
    assert report.replayed == 2 * len(sizes) - 4
    assert str(report).startswith("4 captured, 12 replayed, 4 without a CUDA graph\n  x2: the first call at its shapes")


def test_what_was_handed_out_stays_as_it_is(package: Path) -> None:
    loaded, _ = graphed(package)
    module = loaded.module("net").train()
    kept, again = [], []
    for i in range(5):
        x = _inputs(8, i).requires_grad_()
        torch.manual_seed(i)
        outputs = module(x)
        gradients = torch.autograd.grad(outputs[0].sum(), [x, *module.parameters()])
        kept += [*(t.detach() for t in outputs), *gradients]
        again += [t.clone() for t in kept[-len(gradients) - 3 :]]
    assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))
    assert loaded.cudagraphs is not None and loaded.cudagraphs.replayed == 8


def test_forwards_may_wait_for_their_backward(package: Path) -> None:
    loaded, _ = graphed(package)
    module, eager = loaded.module("net"), net()
    count = cuda_graphs.WAITING + 3
    for m, found in ((module, ours := {}), (eager, theirs := {})):
        xs = [_inputs(8, i).requires_grad_() for i in range(count)]
        for _ in range(2):
            torch.manual_seed(1)
            made = [_loss(m(x), torch.arange(8) % 3) for x in xs]
            for i in (3, 0, 5, 1, 6, 2, 4):
                (found[str(i)],) = torch.autograd.grad(made[i], xs[i])
    assert_same(ours, theirs)
    report = loaded.cudagraphs
    assert (
        report is not None
        and report.plain[f"{cuda_graphs.WAITING} forwards of these shapes wait for their backward"] == 2 + 3
    )


@pytest.mark.parametrize(
    "order",
    ["f0 f1 b0 b1", "f0 f1 b1 b0", "f0 f1 b0 f2 b1 b2", "f0 s1 b0 b1", "f0 f1 e b1 b0", "f0 f1 f2 b2 b0 f3 b1 b3"],
)
def test_what_waits_is_not_written_by_other_graphs(package: Path, order: str) -> None:
    """Two losses, a pipeline, another size, and an evaluation in between. Before that, each forward had its backward at
    once."""
    loaded, _ = graphed(package)
    module, eager = loaded.module("net"), net()
    for m in (module, eager):
        _trained(m, (8, 5, 8, 5, 8, 5))
        with torch.no_grad():
            for _ in range(2):
                m(_inputs(8, 9))
    for _ in range(3):
        found = []
        for m in (module, eager):
            m.zero_grad()
            waiting: dict[str, torch.Tensor] = {}
            for i, (what, *number) in enumerate(order.split()):
                torch.manual_seed(i)
                if what == "b":
                    waiting.pop(number[0]).backward()
                elif what == "e":
                    with torch.no_grad():
                        m(_inputs(8, 40))
                else:
                    rows = 5 if what == "s" else 8
                    waiting[number[0]] = _loss(
                        m(_inputs(rows, int(number[0])).requires_grad_()), torch.arange(rows) % 3
                    )
            found.append({n: p.grad.clone() for n, p in m.named_parameters() if n != "first.bias"})
        assert_same(*found)


def test_a_dropped_forward_is_used_again(package: Path) -> None:
    loaded, _ = graphed(package)
    module = loaded.module("net")
    for i in range(10):
        module(_inputs(8, i).requires_grad_())
    assert (
        loaded.cudagraphs is not None
        and loaded.cudagraphs.plain == {cuda_graphs.WARM_UP: 1}
        and loaded.cudagraphs.captured == 1
    )


def test_a_saved_output_that_is_changed_is_autograds_error(package: Path) -> None:
    loaded, _ = graphed(package)
    for module in (net(), loaded.module("net"), loaded.module("net")):
        for _ in range(2):
            outputs = module(_inputs(8, 0).requires_grad_())
            with torch.no_grad():
                outputs[1].mul_(2)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                outputs[1].sum().backward()


def test_retained_graphs(package: Path) -> None:
    loaded, _ = graphed(package)
    module, eager = loaded.module("net"), net()
    for i in range(4):
        found = []
        for m in (module, eager):
            x = _inputs(8, i).requires_grad_()
            torch.manual_seed(i)
            loss = _loss(m(x), torch.arange(8) % 3)
            found.append({str(n): torch.autograd.grad(loss, x, retain_graph=n < 2)[0] for n in range(3)})
        assert_same(*found)


def test_saved_tensors_hooks_get_tensors_that_stay(package: Path) -> None:
    loaded, _ = graphed(package)
    module, eager = loaded.module("net"), net()
    found = []
    for m in (module, eager):
        losses, xs = [], [_inputs(8, i).requires_grad_() for i in range(4)]
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
            for i, x in enumerate(xs):
                torch.manual_seed(i)
                losses.append(_loss(m(x), torch.arange(8) % 3))
        found.append(
            {str(i): torch.autograd.grad(loss, x)[0] for i, (loss, x) in enumerate(zip(losses, xs, strict=True))}
        )
    assert_same(*found)


def test_what_cannot_be_captured_runs_without(package: Path) -> None:
    loaded, machine = graphed(package)
    machine.refuse = 100
    sizes = (8, 8, 8, 5, 5)
    assert_same(_trained(loaded.module("net"), sizes), _trained(net(), sizes))
    report = loaded.cudagraphs
    assert (
        report is not None and report.captured == report.replayed == 0 and sum(report.plain.values()) == 2 * len(sizes)
    )
    (reason,) = [
        reason
        for reason in report.plain
        if "cannot be captured: operation not permitted when stream is capturing" in reason
    ]
    assert reason.startswith("data/aotinductor/net.0.forward/") and machine.refuse == 100 - cuda_graphs.TRIES


def test_one_capture_that_fails_is_not_the_end(package: Path) -> None:
    loaded, machine = graphed(package)
    machine.refuse = 1
    _trained(loaded.module("net"), (8, 8, 8, 8))
    assert loaded.cudagraphs is not None and loaded.cudagraphs.captured == 2


def test_parameters_that_move(package: Path) -> None:
    loaded, _ = graphed(package)
    module, eager = loaded.module("net"), net()
    for n in range(3):
        for m in (module, eager):
            m.last.weight.data = m.last.weight.data + n
        assert_same(_trained(module, (8, 8, 8)), _trained(eager, (8, 8, 8)))
    assert loaded.cudagraphs is not None and loaded.cudagraphs.captured == 6


def test_what_is_bound_anew_runs_once_before_it_is_captured(package: Path) -> None:
    """This includes a backward whose forward was captured before any backward ran."""
    loaded, _ = graphed(package)
    module = loaded.module("net")
    _trained(module, (8, 8, 8))
    module.last.weight.data = module.last.weight.data.clone()
    report = loaded.cudagraphs
    assert report is not None
    before, captured = report.plain[cuda_graphs.WARM_UP], report.captured
    for _ in range(2):
        outputs = module(_inputs(8, 0).requires_grad_())  # no backward, then captured
    outputs[0].sum().backward()
    assert report.plain[cuda_graphs.WARM_UP] == before + 2 and report.captured == captured + 1


def test_steps_are_eagers(package: Path) -> None:
    loaded, _ = graphed(package)
    step, module = loaded.step("fit"), net()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    for i, rows in enumerate((8, 8, 5, 8, 5, 5, 8, 8)):
        x, label = _inputs(rows, i), torch.arange(rows) % 3
        lr = 1e-2 / (1 + i)
        step.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"] = lr
        torch.manual_seed(i)
        optimizer.zero_grad()
        loss = _loss(module(x), label)
        loss.backward()
        if i == 3:  # two batches for one update
            _loss(module(x), label).backward()
        optimizer.step()
        torch.manual_seed(i)
        ours = step(x, label, update=i != 3)
        if i == 3:
            step(x, label)
        assert_same({"loss": ours}, {"loss": loss.detach()})
        now = [
            {n: p.detach() for n, p in named.items()} for named in (step.parameters, dict(module.named_parameters()))
        ]
        for named in now:
            del named["first.bias"]  # before BatchNorm its gradient is only rounding, and AdamW divides it by its size
        assert_same(*now, 1e-4)
    report = loaded.cudagraphs
    # At 5 and 8 rows, and the second accumulating call
    assert report is not None and report.captured == 2 + 1 and report.replayed == 6
    assert report.plain == {cuda_graphs.WARM_UP: 4}


def test_a_gradient_function(package: Path) -> None:
    loaded, _ = graphed(package)
    energy, values = loaded.grad("energy"), []
    for i in range(6):
        x = _inputs(7, i)
        scale = _inputs(1, 50 + i).expand(7, 6) if i % 2 else _inputs(7, 50 + i)
        value, gradient = energy(x, scale)
        values.append((value, gradient, value.clone(), gradient.clone()))
        leaf = x.clone().requires_grad_()
        expected = _energy(leaf, scale)
        assert_same({"v": value, "g": gradient}, {"v": expected.detach(), "g": torch.autograd.grad(expected, leaf)[0]})
    assert all(torch.equal(v, kept_v) and torch.equal(g, kept_g) for v, g, kept_v, kept_g in values)
    assert loaded.cudagraphs is not None and loaded.cudagraphs.replayed == 5


def test_threads_share_graphs(package: Path) -> None:
    loaded, _ = graphed(package)
    energy, wrong = loaded.grad("energy"), []

    def work(seed: int) -> None:
        for i in range(20):
            x, scale = _inputs(7, seed + i), _inputs(7, seed - i)
            value, _ = energy(x, scale)
            if not torch.allclose(value, _energy(x, scale)):
                wrong.append((seed, i))

    threads = [threading.Thread(target=work, args=(100 * n,)) for n in range(1, 5)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert not wrong and not any(t.is_alive() for t in threads)


def test_inference_and_training_share_graphs(package: Path) -> None:
    loaded, _ = graphed(package)
    module, eager = loaded.module("net"), net()
    for i in range(4):
        for m, found in ((module, ours := {}), (eager, theirs := {})):
            torch.manual_seed(i)
            with torch.inference_mode():
                found["inference"] = m(_inputs(8, i))[0].clone()
            found |= _trained(m, (8,))
        assert_same(ours, theirs)


def test_a_copy_has_graphs_of_its_own(package: Path) -> None:
    loaded, _ = graphed(package)
    module = loaded.module("net")
    _trained(module, (8, 8, 8))
    other, eager = copy.deepcopy(module), net()
    eager.load_state_dict(module.state_dict())
    assert_same(_trained(other, (8, 8, 8)), _trained(eager, (8, 8, 8)))


def test_only_on_a_gpu(package: Path) -> None:
    with pytest.raises(
        InputError, match=r"cudagraphs=True is for packages for a GPU; the target of .* that runs here is cpu:avx2"
    ):
        load(package, cudagraphs=True)
    with pytest.raises(IncompatibleError, match="it was built for cpu, but cuda:1 was asked for"):
        load(package, device="cuda:1")
    with pytest.raises(InputError, match="device is 'gpu'; expected 'cpu', 'cuda' or 'cuda:1'"):
        load(package, device="gpu")
    assert load(package, device="cpu").cudagraphs is None
    trained = ("train", package, "--entry", "fit", "--data", "none", "--epochs", 1, "--save", "none")
    assert "cudagraphs=True is for packages for a GPU" in aot_backward(*trained, "--cudagraphs").stderr
    ran = aot_backward(
        "run", package, "--entry", "energy", "--inputs", "none", "--outputs", "none", "--device", "cuda:3"
    )
    assert ran.returncode == 3 and "it was built for cpu, but cuda:3 was asked for" in ran.stderr


def test_weights_elsewhere_are_refused(package: Path) -> None:
    module = load(package).module("net")
    message = r"first.weight is on meta; the loaded code runs on cpu: move it back, or load\(path, device='meta'\)"
    with pytest.raises(ab.WeightsError, match=message):
        module.to("meta")(_inputs(8, 0))
