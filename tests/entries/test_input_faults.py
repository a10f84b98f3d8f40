"""Inputs that raw AOTInductor accepts silently (docs/reliability.md, rows 1 to 19, called cases here). Each gives the
right result, or an error that names the input before native code runs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.export import Dim

import aot_backward as ab
from aot_backward_runtime import AotBackwardError, InputError, load

from ..support import exports
from ..support.oracle import assert_same, run


class Pair(nn.Module):
    """Two inputs with one batch dimension, which must be a multiple of 4 for the second use, and a nested argument."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 5)
        self.b = nn.Linear(5, 3)

    def forward(
        self, x: torch.Tensor, extra: dict[str, torch.Tensor], scale: float = 2.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        h = torch.sigmoid(self.a(x)) * scale
        return self.b(h) + extra["bias"], h


class Grouped(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(x.shape[0] // 4, 4, -1).softmax(1).square().sum(1)


def pair() -> Pair:
    torch.manual_seed(2)
    return Pair()


def arguments(n: int = 4) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    torch.manual_seed(n)
    return torch.randn(n, 6, requires_grad=True), {"bias": torch.randn(n, 3)}


def _pair_package() -> Path:
    batch = Dim("batch", min=2, max=32)
    shapes = {"x": {0: batch}, "extra": {"bias": {0: batch}}}
    return exports.shared("pair", lambda path: ab.export_module(pair(), arguments(), dynamic_shapes=shapes, path=path))


@pytest.fixture(scope="module")
def package() -> Path:
    return _pair_package()


@pytest.fixture
def model(package: Path) -> nn.Module:
    return load(package).module()


BAD: dict[str, tuple[Callable[[torch.Tensor, dict[str, torch.Tensor]], tuple[object, ...]], str]] = {
    "float64 (1)": (lambda x, e: (x.double(), e), r"x has dtype torch\.float64; expected torch\.float32"),
    "float16 (1)": (lambda x, e: (x.half(), e), r"x has dtype torch\.float16"),
    "integers (1)": (lambda x, e: (x.long(), e), r"x has dtype torch\.int64"),
    "rank 0 (2)": (lambda x, e: (x.sum(), e), r"x has 0 dimensions, shape \(\); expected 2"),
    "rank 3 (2)": (lambda x, e: (x[None], e), r"x has 3 dimensions, shape \(1, 4, 6\); expected 2"),
    "static dimension (3)": (lambda x, e: (x[:, :5], e), r"x has size 5 in dimension 1; expected 6"),
    "below its range (4)": (
        lambda x, e: (x[:1], {"bias": e["bias"][:1]}),
        r"batch \(x\.shape\[0\]\) is 1; expected at least 2 and at most 32",
    ),
    "above its range (4)": (
        lambda x, e: (torch.ones(33, 6), {"bias": torch.ones(33, 3)}),
        r"batch .* is 33; expected at least 2 and at most 32",
    ),
    "one symbol, two sizes (5)": (
        lambda x, e: (x, {"bias": e["bias"][:3]}),
        r"extra\['bias'\] has size 3 in dimension 0; expected 4 \(batch, as x\.shape",
    ),
    "size 0 (7)": (lambda x, e: (x[:0], {"bias": e["bias"][:0]}), r"batch .* is 0"),
    "meta (11)": (lambda x, e: (x.to("meta"), e), r"x is on meta; expected cpu"),
    "sparse (12)": (
        lambda x, e: (x.detach().to_sparse(), e),
        r"x has layout torch\.sparse_coo; expected torch\.strided",
    ),
    "another structure (16)": (lambda x, e: (x, e["bias"]), r"extra is a Tensor; expected \{'bias': Tensor\}"),
    "another key (16)": (
        lambda x, e: (x, {"offset": e["bias"]}),
        r"extra is a dict with the keys \['offset'\]; expected \{'bias': Tensor\}",
    ),
    "too few arguments (16)": (
        lambda x, e: (x,),
        r"1 positional argument and no keywords do not fit; expected \(x=Tensor, extra=",
    ),
    "too many arguments (16)": (lambda x, e: (x, e, 2.0, 1), r"4 positional .* do not fit"),
    "not a tensor (16)": (lambda x, e: (x.tolist(), e), r"x is a list of 4; expected a tensor"),
    "None (16)": (lambda x, e: (None, e), r"x is None; expected a tensor"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_call_names_what_is_wrong_and_changes_nothing(case: str, model: nn.Module) -> None:
    make, message = BAD[case]
    x, extra = arguments()
    good = run(model, (x, extra), 1)
    before = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    kept = x.detach().clone()
    with pytest.raises(InputError, match=message):
        model(*make(x, extra))
    assert all(torch.equal(p.grad, before[n]) for n, p in model.named_parameters()) and torch.equal(x, kept)
    assert_same(run(model, (x, extra), 1), good)


def test_fake_and_wrapped_tensors_name_their_type(model: nn.Module) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    x, extra = arguments()
    with (
        FakeTensorMode() as mode,
        pytest.raises(InputError, match=r"x is a torch\._subclasses\.fake_tensor\.FakeTensor; expected a plain"),
    ):
        model(mode.from_tensor(x), extra)
    with pytest.raises(InputError, match=r"x is wrapped by a torch\.func transform"):
        torch.func.vmap(lambda row: model(row, extra)[0])(x.detach()[None])

    class Mine(torch.Tensor):
        pass

    with pytest.raises(InputError, match=r"x is a .*Mine; expected a plain torch\.Tensor"):
        model(x.detach().as_subclass(Mine), extra)


def test_layouts_are_copied_to_the_recorded_one(model: nn.Module) -> None:
    """Cases 8, 9 and 13."""
    _, extra = arguments()
    row = torch.randn(1, 6)
    wide = torch.randn(4, 12)
    raw = bytearray(torch.randn(25).numpy().tobytes())
    misaligned = torch.frombuffer(raw, dtype=torch.float32, offset=1, count=24).view(4, 6)
    assert misaligned.data_ptr() % 4 != 0
    misaligned.copy_(torch.randn(4, 6))
    complex_ = torch.randn(4, 6, dtype=torch.complex64)
    layouts = {
        "stride 0": row.expand(4, 6),
        "transposed": torch.randn(6, 4).t(),
        "sliced": wide[:, ::2],
        "offset": wide[:, 3:9],
        "negated": complex_.conj().imag,
        "misaligned": misaligned,
        "parameter": nn.Parameter(torch.randn(4, 6)),
    }
    assert layouts["negated"].is_neg()
    for name, value in layouts.items():
        args = (value.detach().requires_grad_(), extra)
        eager = pair()
        out, expected = model(*args), eager(*args)
        torch.testing.assert_close(out, expected, msg=name)
        (mine,), (theirs,) = (torch.autograd.grad(o[0].square().sum(), args[0]) for o in (out, expected))
        torch.testing.assert_close(mine, theirs, msg=name)


def test_incoming_gradients_of_any_layout(model: nn.Module) -> None:
    """``y.sum().backward()`` gives a stride-0 gradient, which raw AOTInductor reads as dense (case 8)."""
    args, eager = arguments(), pair()
    for gradient in (
        torch.ones(()).expand(4, 3),
        torch.randn(3, 4).t(),
        torch.randn(4, 6)[:, ::2],
        torch.randn(4, 3, dtype=torch.complex64).conj().imag,
    ):
        assert_same(run(model, args, [gradient, None]), run(eager, args, [gradient, None]))
    sums = []
    for module in (model, eager):
        x, extra = arguments()
        module(x, extra)[0].sum().backward()
        sums.append(x.grad)
    torch.testing.assert_close(*sums)


def test_storage_that_was_freed_or_shrunk(model: nn.Module) -> None:
    """Case 14, even if the same tensor was valid a moment ago."""
    x, extra = arguments()
    x = x.detach()
    model(x, extra)
    model(x, extra)
    for size in (0, 40):
        x = torch.randn(4, 6)
        model(x, extra)
        x.untyped_storage().resize_(size)
        with pytest.raises(
            InputError, match=rf"x of shape \(4, 6\) needs 96 bytes, its storage holds {size}: it was freed or shrunk"
        ):
            model(x, extra)


def test_an_undefined_incoming_gradient_leaves_none_what_eager_leaves_none(model: nn.Module) -> None:
    """Case 15: the second output alone does not reach ``b``; the first reaches everything."""
    args, eager = arguments(), pair()
    for given in ([None, torch.randn(4, 5)], [torch.randn(4, 3), None], [torch.randn(4, 3), torch.randn(4, 5)]):
        assert_same(run(model, args, given), run(eager, args, given))
    assert run(model, args, [None, torch.ones(4, 5)])["grad of b.weight"] is None


@pytest.mark.parametrize("what", ["input", "parameter", "output"])
def test_a_saved_tensor_changed_in_place_is_autograds_version_error(what: str, model: nn.Module) -> None:
    x, extra = arguments()
    x = x.detach()
    out, hidden = model(x, extra)
    with torch.no_grad():
        {"input": x, "parameter": model.b.weight, "output": hidden}[what].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_second_derivative_says_how_to_export_one(model: nn.Module) -> None:
    x, extra = arguments()
    (first,) = torch.autograd.grad(model(x, extra)[0].square().sum(), x, create_graph=True)
    expected = torch.autograd.grad(pair()(x, extra)[0].square().sum(), x)[0]
    torch.testing.assert_close(first, expected)
    with pytest.raises(RuntimeError, match=r"has no derivatives of this order: .*export_grad"):
        first.sum().backward()


def test_nan_and_inf_are_as_in_eager(model: nn.Module) -> None:
    x, extra = arguments()
    with torch.no_grad():
        x[0, 0], x[1, 1] = float("nan"), float("inf")
    mine, theirs = run(model, (x, extra), 2), run(pair(), (x, extra), 2)
    for name, value in theirs.items():
        if value is not None:
            torch.testing.assert_close(mine[name], value, equal_nan=True, msg=name)


def test_a_baked_in_constant_is_compared(package: Path) -> None:
    model = load(package).module()
    x, extra = arguments()
    with pytest.raises(
        InputError, match=r"3 positional .* do not fit; expected \(x=Tensor, extra=\{'bias': Tensor\}\)"
    ):
        model(x, extra, 3.0)
    torch.testing.assert_close(model(extra=extra, x=x)[0], pair()(x, extra)[0])


def test_ambient_state_is_part_of_the_contract(model: nn.Module) -> None:
    x, extra = arguments()
    model(x, extra)
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(InputError, match="called under autocast bfloat16; captured under autocast off"),
    ):
        model(x, extra)
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(InputError, match="use_deterministic_algorithms is on"):
            model(x, extra)
    finally:
        torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("high")
    try:
        with pytest.raises(InputError, match="matmul precision is 'high'"):
            model(x, extra)
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.fixture(scope="module")
def grouped() -> Path:
    def make(path: Path) -> None:
        variants = [
            ab.Variant(
                (torch.randn(8, 6, requires_grad=True),), dynamic_shapes={"x": {0: Dim("quads", min=2, max=16) * 4}}
            ),
            ab.Variant((torch.randn(8, 5, requires_grad=True),)),
            ab.Variant((torch.randn(12, 5, requires_grad=True),)),
        ]
        ab.export(path, {"module": ab.Module(Grouped(), variants)})

    return exports.shared("grouped", make)


def test_a_derived_guard_and_the_variants_there_are(grouped: Path) -> None:
    """Case 6, and several shapes in one package."""
    model = load(grouped).module()
    for shape in ((8, 6), (16, 6), (8, 5), (12, 5), (64, 6)):
        x = torch.randn(shape, requires_grad=True)
        assert_same(run(model, (x,), 4), run(Grouped(), (x,), 4))
    with pytest.raises(
        InputError,
        match=r"none of the 3 variants .*variant 0 .*x\.shape\[0\].* is 10; expected 4 \* n.*variant 1 .* expected 8",
    ):
        model(torch.randn(10, 6))
    with pytest.raises(InputError, match=r"variant 0 .*: x\.shape\[0\] is 4; expected at least 8 and at most 64"):
        model(torch.randn(4, 6))
    with pytest.raises(InputError, match=r"variant 2 .*: x has size 16 in dimension 0; expected 12"):
        model(torch.randn(16, 5))


def test_ten_thousand_rejected_calls_keep_memory_flat(package: Path) -> None:
    """Case 37. No bad call crashes the process: the subprocess turns a signal into a failure."""
    script = """
import gc, os, sys, torch
from aot_backward_runtime import load, InputError
model = load(sys.argv[1]).module()
x, extra = torch.randn(4, 6), {"bias": torch.randn(4, 3)}
bad = [(x.double(), extra), (x[:, :5], extra), (x.t(), extra), (x[:1], extra), (x, None), (None,), (x.to("meta"), extra), (x.sum(), extra)]
expected = model(x, extra)[0].detach().clone()
def resident():
    gc.collect()
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
def rejected(n):
    for i in range(n):
        try:
            model(*bad[i % len(bad)])
        except InputError:
            continue
        raise SystemExit(f"{i % len(bad)} was taken")
rejected(1000)
before, descriptors = resident(), len(os.listdir("/proc/self/fd"))
rejected(10000)
assert resident() - before < 4 << 20, resident() - before
assert len(os.listdir("/proc/self/fd")) == descriptors
assert torch.equal(model(x, extra)[0], expected)
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script, str(package)], capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr


def test_every_error_has_one_base() -> None:
    assert issubclass(InputError, AotBackwardError) and issubclass(InputError, ValueError)
