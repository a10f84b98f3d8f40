"""Large tensors: their storage, their comparison, and the cost of their export."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import aot_backward as ab
from aot_backward.checks import eager_check, stored_results
from aot_backward.checks.stored_results import MAX_WHOLE_BYTES, SUMS, compare_stored, sketch, sketched_distance, store
from aot_backward_runtime import PackageError, load

from ..conftest import aot_backward
from ..support.packages import EXAMPLES, put_together, taken_apart


def test_the_distance_of_two_sketches_is_that_of_the_tensors() -> None:
    a = torch.randn(300, 700, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    kept = a.clone()
    noise = 1e-6 * torch.randn(a.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    column, one = torch.zeros_like(a), torch.zeros_like(a)
    column[:, 5], one[7, 9] = 1e-3, 1e-3
    wide = torch.ones(()).expand(20_000_000)
    assert sketched_distance(sketch(wide), torch.zeros(SUMS)) == pytest.approx(20_000_000**0.5, rel=0.15)
    for difference in (noise, column, one, torch.full_like(a, 1e-5)):
        exact = float(difference.norm())
        assert sketched_distance(sketch(a + difference), sketch(a)) == pytest.approx(exact, rel=0.15)
    assert torch.equal(a, kept) and torch.equal(sketch(a.t().contiguous().t()), sketch(a))
    assert (
        sketched_distance(sketch(a.roll(1)), sketch(a)) > float(a.norm())
        and sketched_distance(sketch(a[:, torch.randperm(700)]), sketch(a)) > 1
    )
    assert sketch(torch.complex(a, noise)).shape == (SUMS,) and sketch(torch.empty(0)).abs().sum() == 0


@pytest.mark.parametrize(
    ("dtype", "elements"), [(torch.float32, 70_000), (torch.bfloat16, 1021), (torch.float64, (65 << 8) * SUMS + 7)]
)
def test_a_sketch_is_as_the_format_defines_it(dtype: torch.dtype, elements: int) -> None:
    tensor = torch.randn(elements, generator=torch.Generator().manual_seed(3)).to(dtype)
    signs = torch.randint(0, 2, (elements,), dtype=torch.int8, generator=torch.Generator().manual_seed(20))
    sums = torch.zeros(SUMS, dtype=torch.float64)
    sums.index_add_(0, torch.arange(elements) % SUMS, torch.where(signs == 1, 1.0, -1.0) * tensor.double())
    torch.testing.assert_close(sketch(tensor), sums, rtol=1e-9, atol=1e-9)


def test_what_is_stored_of_a_result() -> None:
    large, places = torch.randn(MAX_WHOLE_BYTES // 4 + 1), torch.arange(MAX_WHOLE_BYTES // 8 + 1)
    infinite = large.clone()
    infinite[3] = float("inf")
    stored: dict[str, Tensor] = {}
    for name, result in (("small", large[:-1]), ("large", large), ("infinite", infinite), ("places", places)):
        store(stored, "e/0", name, result, 1e-4)
    mine = {key.removeprefix("e/0/"): tensor for key, tensor in stored.items()}
    assert {k for k in mine if not k.startswith("allowed")} == {
        "expected/small",
        "sketch/large",
        "expected/infinite",
        "digest/places",
    }
    for name, result in (("small", large[:-1]), ("large", large), ("infinite", infinite), ("places", places)):
        assert not compare_stored(name, result, mine).wrong
        other = result.clone()
        other[2] += 1
        assert compare_stored(name, other, mine).wrong
    assert compare_stored("large", torch.full_like(large, float("nan")), mine).wrong
    with pytest.raises(stored_results.Differs):
        compare_stored("large", large.long(), mine)
    with pytest.raises(PackageError, match=r"'sketch/large' is .*; expected float64"):
        compare_stored("large", large, mine | {"sketch/large": torch.zeros(3)})
    with pytest.raises(PackageError, match="'allowed/large' is missing"):
        compare_stored("large", large, {"sketch/large": mine["sketch/large"]})
    for limit in (-1.0, float("inf"), float("nan"), 1 + 2j, 3):
        with pytest.raises(
            PackageError, match="'allowed/large' is missing, or is not a finite float64 number from 0 on"
        ):
            compare_stored(
                "large",
                large,
                mine
                | {
                    "allowed/large": torch.tensor(
                        limit, dtype=None if isinstance(limit, int | complex) else torch.float64
                    )
                },
            )
    assert "large" in stored_results.names_of({"allowed/large": mine["allowed/large"]})
    with pytest.raises(PackageError, match="'expected/large' is missing"):
        compare_stored("large", large, {"allowed/large": mine["allowed/large"]})
    with pytest.raises(PackageError, match=r"'digest/places' is torch.int64 .*; expected uint8"):
        compare_stored("places", places, mine | {"digest/places": mine["digest/places"].long()})


class Wide(nn.Module):
    """Weights of more than :data:`MAX_WHOLE_BYTES` bytes, and a small bias."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(160, 180), nn.Linear(180, 160)

    def forward(self, x: Tensor) -> Tensor:
        return (self.second(torch.tanh(self.first(x))) - x).square().mean()


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    net, x, path = Wide(), torch.randn(6, 160), tmp_path_factory.mktemp("wide") / "wide.pt2"
    fit = ab.Step(net, [ab.Variant((x,))], torch.optim.AdamW(net.parameters(), lr=1e-2))
    entries: ab.Entries = {
        "net": ab.Module(net, [ab.Variant((x,))]),
        "loss": ab.Grad(net, [ab.Variant((x,))], wrt="parameters"),
        "fit": fit,
    }
    return ab.export(path, entries)


def test_verify_compares_sketches_and_says_so(package: Path, tmp_path: Path) -> None:
    done = aot_backward("verify", package)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("(2 large ones by a sketch)") == 2  # of the step's optimizer state, too
    members = taken_apart(package)
    examples = safetensors.torch.load(members[EXAMPLES])
    assert len(members[EXAMPLES]) < 2 * MAX_WHOLE_BYTES  # the weights take 230 kB, and so would each entry's gradients
    for name in ("loss/0/sketch/gradient of first.weight", "fit/0/sketch/parameter first.weight"):
        assert name in examples, sorted(examples)
        spoilt = examples[name].clone()
        spoilt[17] += 0.01 * spoilt.norm()
        members[EXAMPLES] = safetensors.torch.save(examples | {name: spoilt})
        put_together(tmp_path / "wrong.pt2", members, {})
        done = aot_backward("verify", tmp_path / "wrong.pt2")
        assert done.returncode == 1 and f"{name.rpartition('/')[2]} is off by" in done.stderr, done.stderr


def test_the_reference_where_float64_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Float64 draws other random numbers. By then eager's gradients were freed for its gradients, so they are computed
    again."""

    class Noisy(Wide):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + torch.randn_like(x))

    references = []
    reference = eager_check._reference
    monkeypatch.setattr(
        eager_check, "_reference", lambda *given: references.append(reference(*given)) or references[-1]
    )
    net = Noisy()
    seen = list[Tensor]()
    ab.export_grad(net, (torch.randn(6, 160),), wrt="parameters", path=tmp_path / "noisy.pt2")
    ((found, sketches),) = references
    assert not found.float64 and not sketches and not found.eager_errors
    ab.export_grad(Wide(), (torch.randn(6, 160),), wrt="parameters", path=tmp_path / "wide.pt2")
    found, sketches = references[1]
    assert found.float64
    assert set(sketches) == set(found.eager_errors) == {"gradient of first.weight", "gradient of second.weight"}
    net.first.weight.register_hook(seen.append)  # neither the check's hooks nor float64 tensors remain
    net(torch.randn(6, 160)).backward()
    assert len(seen) == 1 and net.first.weight.grad is not None and net.first.weight.dtype is torch.float32


def test_a_backward_within_the_backward(tmp_path: Path) -> None:
    """The gradient of a weight within the program differs from that of the program."""
    net = Wide()

    def penalty(x: Tensor) -> Tensor:
        (inner,) = torch.autograd.grad(net(x), net.first.weight, create_graph=True)
        return inner.square().sum() + net(x)

    x = torch.randn(6, 160)
    path = ab.export_grad(penalty, (x,), wrt=["net.first.weight"], path=tmp_path / "penalty.pt2")
    expected = torch.autograd.grad(penalty(x), net.first.weight)[0]
    torch.testing.assert_close(load(path).grad()(x)[1]["net.first.weight"], expected)


PEAK = """
import os, sys, resource, threading, time
import torch
import aot_backward as ab
from aot_backward_exporters import torch_api
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(3200, 3200), nn.Tanh())])
weights = sum(p.numel() * p.element_size() for p in net.parameters())
torch_api.compile_fx_inner
resident = lambda: int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
before, peaks, done = resident(), [0], threading.Event()
names = [f"net.{2 * i}.{n}" for i in range(4) for n in ("weight", "bias")]
def watch():
    while not done.wait(0.002):
        peaks[0] = max(peaks[0], resident())
watching = threading.Thread(target=watch)
watching.start()
ab.export_grad(lambda x: net(x).square().mean(), (torch.randn(4, 3200),), wrt=names, path=sys.argv[1])
done.set()
watching.join()
print((peaks[0] - before) / weights, os.path.getsize(sys.argv[1]) / weights)
"""


def test_an_export_takes_four_times_the_weights_and_the_package_once(tmp_path: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "AOT_BACKWARD_TUNE": "quick"}
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(tmp_path / "net.pt2")],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    peak, size = map(float, done.stdout.split())
    assert peak <= 4 and size <= 1.02, (peak, size)
