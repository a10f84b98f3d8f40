"""``export``'s effects on its arguments, its refusals, and a self-check that no wrong gradient passes."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import os
import random
import re
import shutil
import zipfile
from collections import namedtuple
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

import aot_backward as ab
from aot_backward.capture import partition
from aot_backward.checks import eager_check, named_results, step_check
from aot_backward.checks.eager_check import compare_results
from aot_backward.checks.tolerance import Reference, norm
from aot_backward.checks.verify import verify_package
from aot_backward_runtime import ExportError, InputError, PackageError, load
from aot_backward_runtime.native.library import Library
from aot_backward_runtime.package.archive import open_package

from ..support import golden_files
from ..support.oracle import assert_same, run

Point = namedtuple("Point", "x y")


class Tree(nn.Module):
    """Every nesting of inputs and outputs, an output that is a view of an input, one returned twice, and a parameter as
    output."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))

    def forward(self, point: Point, more: list[Any], *, flag: bool, scale: torch.Tensor) -> Any:
        h = point.x * self.weight + more[0]["a"] * scale
        return Point(h, [h, (point.y.view(-1), None)]), {"weight": self.weight, 1: more[1], "flag": flag}


def _tree_arguments() -> tuple[tuple[Any, ...], dict[str, Any]]:
    torch.manual_seed(0)
    x, y, a = torch.randn(2, 3, requires_grad=True), torch.randn(2, 3, requires_grad=True), torch.randn(2, 3)
    return (Point(x, y), [{"a": a}, torch.tensor([1, 2])]), {"flag": True, "scale": torch.tensor(2.0)}


def test_what_the_compiler_assumes_of_a_size_is_a_guard_also_from_its_cache(tmp_path: Path) -> None:
    """The first export compiles, and the second uses the cache. A diagonal is as long as the shorter side."""
    found = []
    for i in range(2):
        path = ab.export_grad(
            lambda x: x.diagonal().square().sum(),
            (torch.randn(5, 8),),
            dynamic_shapes=({0: Dim.AUTO(min=2)},),
            path=tmp_path / f"{i}.pt2",
        )
        found.append(open_package(path).manifest.entries["grad"].variants[0].guards)
        grad, x = load(path).grad(), torch.randn(8, 8, requires_grad=True)
        torch.testing.assert_close(grad(x)[1]["x"], torch.autograd.grad(x.diagonal().square().sum(), x)[0])
        with pytest.raises(InputError, match=r"x\.shape"):
            grad(torch.randn(9, 8))
    assert found[0] == found[1] and "(s0 <= 8)" in found[0]


def test_any_tree_of_inputs_and_outputs(tmp_path: Path) -> None:
    args, kwargs = _tree_arguments()
    module = Tree()
    path = ab.export_module(module, args, kwargs, path=tmp_path / "tree.pt2")
    loaded = load(path, types=[Point]).module()
    out, rest = loaded(*args, **kwargs)
    assert type(out) is Point and list(rest) == ["weight", 1, "flag"] and rest["flag"] is True and out.y[1][1] is None
    assert rest[1] is args[1][1] and rest["weight"] is loaded.weight
    assert type(load(path).module()(*args, **kwargs)[0]).__name__ == "Point"
    assert_same(run(loaded, args, 4, kwargs), run(module, args, 4, kwargs))


def test_the_program_is_left_as_it_was(tmp_path: Path) -> None:
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).train()
    module[0].bias.requires_grad_(False)
    module[2].eval()
    x = torch.randn(3, 4)
    module(x).sum().backward()
    state = {n: t.clone() for n, t in module.state_dict().items()}
    gradients = {n: None if p.grad is None else p.grad.clone() for n, p in module.named_parameters()}
    torch.manual_seed(77)
    draw = torch.rand(3)
    torch.manual_seed(77)
    random.seed(3)
    ab.export(tmp_path / "a.pt2", {"net": ab.Module(module, [ab.Variant((x,), mode="eval", requires_grad=["input"])])})
    assert torch.equal(torch.rand(3), draw)
    assert [m.training for m in module.modules()] == [True, True, True, False]
    assert all(torch.equal(t, state[n]) for n, t in module.state_dict().items())
    assert [p.requires_grad for p in module.parameters()] == [True, False, True, True]
    for name, parameter in module.named_parameters():
        assert (parameter.grad is None) == (gradients[name] is None)
        if parameter.grad is not None:
            assert torch.equal(parameter.grad, gradients[name])
    assert (
        not torch.is_autocast_enabled("cpu")
        and torch.backends.mkldnn.enabled
        and torch.backends.nnpack.is_available() is not None
    )


class Root(nn.Module):
    """A module whose parameter has the gradient Inf."""

    def __init__(self) -> None:
        super().__init__()
        self.zero = nn.Parameter(torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.zero.sqrt()


@pytest.mark.parametrize(
    ("spoil", "last", "width"),
    [
        *itertools.product(["a dropped gradient", "a scaled gradient", "a swapped pair"], [nn.Identity, Root], [4]),
        ("a scaled gradient", nn.Identity, 160),
        ("a swapped pair", nn.Identity, 160),
    ],
)
def test_a_wrong_gradient_fails_the_export_and_names_the_tensor(
    spoil: str, last: type[nn.Module], width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spoil the graph between capture and compiler, as a wrong pass would: the old package remains. An infinite
    gradient of another parameter does not hide the error. Large gradients, which are compared one at a time, are also
    checked."""
    target = tmp_path / "net.pt2"
    shutil.copy(golden_files.PAIR, target)
    finish = partition._finish_backward

    def spoilt(pieces: partition.Partitions, cut: Any, *rest: Any) -> Any:
        graph = cut.graph.graph
        output = next(iter(graph.find_nodes(op="output")))
        results = list(output.args[0])
        places = [i for i, r in enumerate(results) if isinstance(r, torch.fx.Node) and len(r.meta["val"].shape) == 2]
        with graph.inserting_before(output):
            if spoil == "a swapped pair":
                results[places[0]], results[places[1]] = results[places[1]], results[places[0]]
            else:
                factor = 0.0 if spoil == "a dropped gradient" else 1.001
                made = graph.call_function(torch.ops.aten.mul.Tensor, (results[places[0]], factor))
                made.meta = dict(results[places[0]].meta)
                results[places[0]] = made
        output.args = (tuple(results),)
        return finish(pieces, cut, *rest)

    monkeypatch.setattr(partition, "_finish_backward", spoilt)
    net = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), last())
    with pytest.raises(
        ExportError, match=r"gradient of (0|2)\.weight is wrong: off by .* is allowed; nothing was written"
    ):
        ab.export_module(net, (torch.randn(3, width),), path=target)
    assert target.read_bytes() == golden_files.PAIR.read_bytes() and list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize(
    ("role", "what", "words"),
    [
        ("backward", "a weight", r"module variant 0: the compiled code writes to 2.weight, which it should only read"),
        ("forward", "the input", r"module variant 0: the compiled code writes to input, which it should only read"),
        (
            "inference",
            "the result",
            r"module variant 0: output\[0\] without gradients is wrong: off by .* is allowed; nothing was written",
        ),
    ],
)
def test_what_no_comparison_of_gradients_sees_fails_the_export(
    role: str, what: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither export nor ``verify`` accepts code that writes to read-only inputs, or code that does so only under
    ``no_grad``."""
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.randn(3, 4)
    export = partial(ab.export, entries={"module": ab.Module(net, [ab.Variant((x,), mode="eval")])}, tune="none")
    good = export(tmp_path / "good.pt2")
    loaded = Library._load

    class Spoiling:
        """A runner that changes something at each call."""

        def __init__(self, runner: Any):
            self.runner, self.constants = runner, runner.constants

        def bind(self, tensors: dict[str, torch.Tensor]) -> None:
            self.bound = list(tensors.values())
            self.runner.bind(tensors)

        def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
            results: list[torch.Tensor] = self.runner.run(inputs)
            with torch.no_grad():
                changed = {
                    "a weight": self.bound,
                    "the input": [t for t in inputs if t.shape == x.shape],
                    "the result": results,
                }[what]
                changed[0].detach().mul_(1.01)
            return results

    def load_spoilt(library: Library) -> Any:
        its_role = (
            "inference"
            if len(library.spec.outputs) == 1
            else "forward"
            if len(library.spec.constants) == 4
            else "backward"
        )
        return Spoiling(loaded(library)) if its_role == role else loaded(library)

    monkeypatch.setattr(Library, "_load", load_spoilt)
    with pytest.raises(ExportError, match=words):
        export(tmp_path / "bad.pt2")
    (report,) = verify_package(good).variants
    assert re.search("writes to|without gradients, output", report.wrong[0]) and not (tmp_path / "bad.pt2").exists()


@pytest.mark.filterwarnings("ignore:.*support is experimental")
@pytest.mark.parametrize(
    "dtype", ["bool", "uint16", "uint32", "float8_e4m3fn", "bfloat16", "float64", "complex32", "complex128"]
)
def test_what_is_written_is_seen_in_every_dtype(dtype: str) -> None:
    tensor = torch.zeros(5, 3).to(getattr(torch, dtype))
    for written in (tensor, tensor.t()):
        with named_results._only_read({"it": written}):
            pass
        with (
            pytest.raises(named_results.Overwritten, match="writes to it, which"),
            named_results._only_read({"it": written}),
        ):
            tensor[4, 1] = 1
        tensor[4, 1] = 0


def few(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (torch.tanh(x) * weight).float().sum()


@pytest.mark.parametrize("seed", [4, 11, 17])
def test_a_sum_of_few_16_bit_numbers_that_cancel(seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With these seeds eager's sum is nearer to float64's by chance than 16-bit numbers are. The check blamed the
    multiplication for the difference."""
    torch.manual_seed(seed)
    numbers = tuple(torch.randn(40, dtype=torch.float16, requires_grad=True) for _ in range(2))
    length = {0: Dim("length", min=2)}
    ab.export_grad(
        few,
        numbers,
        dynamic_shapes=(length, length),
        path=tmp_path / "grad.pt2",
    )
    assert "gave other numbers" not in capsys.readouterr().err


GENERATOR = torch.Generator().manual_seed(0)
MANY = torch.randn(98_304, generator=GENERATOR), torch.randn(98_304, generator=GENERATOR)
"""Eager's sum of their products happens to be within 1.5e-6 of float64's, and the compiled one is off by 1e-3, of a sum
of absolute values of 6e4."""


class Product(nn.Module):
    def __init__(self, weight: torch.Tensor):
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x[:4] * 2, (x * self.weight).sum()


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (x * weight).sum()


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Add 2 % that change entirely with the last bit of the input, as rounding does, in float32."""
    return (x + (0.05 * (x.detach() * 1e8).sin() if x.dtype is torch.float32 else 0)).square().sum()


def another_in_float64(x: torch.Tensor) -> torch.Tensor:
    """Eager does not move by 5 % if its inputs are perturbed, so the compiled results must be eager's."""
    return (x.sin() * (1.05 if x.dtype is torch.float64 else 1.0)).sum()


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * self.weight, (x > 0).sum()


Change = Callable[[str, torch.Tensor], torch.Tensor]


def kept(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def moved(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Move a sum by 1e-4 of its absolute terms."""
    return tensor + 1e-4 * float((MANY[0] * MANY[1]).abs().sum()) if tensor.numel() == 1 else tensor


def scaled(factor: float, which: str = "") -> Change:
    return lambda name, tensor: tensor * factor if name.startswith(which) else tensor


HALVES = tuple(torch.rand(40, generator=GENERATOR).half().requires_grad_() for _ in range(2))
ROUNDED = ((torch.rand(400, generator=GENERATOR) + 1).requires_grad_(),)
CHANGED: dict[str, tuple[Any, tuple[torch.Tensor, ...], Change, str | None]] = {
    "a sum in a module": (Product(MANY[1]), MANY[:1], kept, None),
    "a moved sum in a module": (Product(MANY[1]), MANY[:1], moved, r"output\[1\] is wrong: off by .* is allowed"),
    "a sum": (product, MANY, kept, None),
    "a moved sum": (product, MANY, moved, r"output\[0\] is wrong: off by .* is allowed"),
    "16-bit numbers": (few, HALVES, scaled(1.01, "output"), r"output\[0\] is wrong: off by .* is allowed"),
    "within eager's own rounding": (rounded, ROUNDED, scaled(1.01, "gradient"), None),
    "beyond eager's own rounding": (rounded, ROUNDED, scaled(1.2, "gradient"), "gradient of x is wrong: off by"),
    "another computation in float64": (another_in_float64, ROUNDED, scaled(1.02), "is wrong: off by"),
    "an integer": (
        Counting(),
        (torch.randn(3, 2, generator=GENERATOR),),
        lambda name, tensor: tensor + 1 if name == "output[1]" else tensor,
        r"output\[1\] is wrong: off by 1 from eager, 0 is allowed",
    ),
}


@pytest.mark.parametrize("case", CHANGED)
def test_results_that_are_off_from_eagers(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled results may be off as far as eager's own rounding explains."""
    program, args, change, words = CHANGED[case]
    right = eager_check.results_of_entry

    def results(*given: Any, **options: Any) -> Any:
        return {n: t if t is None else change(n, t) for n, t in right(*given, **options).items()}

    monkeypatch.setattr(eager_check, "results_of_entry", results)
    export = ab.export_module if isinstance(program, nn.Module) else ab.export_grad
    with contextlib.nullcontext() if words is None else pytest.raises(ExportError, match=words):
        export(program, args, path=tmp_path / "x.pt2")


class Cast(nn.Module):
    """Its products are in bfloat16, so a gradient may be far from float64's."""

    def __init__(self, enabled: bool) -> None:
        super().__init__()
        self.first, self.last, self.enabled = nn.Linear(160, 160), nn.Linear(160, 160), enabled

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.enabled):
            return (self.last(self.first(x).tanh()).float() - x).square().mean()


@pytest.mark.parametrize(
    ("factor", "kind"),
    [(1.0, "reads another"), (3.0, "reads another"), (0.0, "reads another"), (1.0001, "was removed")],
)
def test_large_gradients_of_parameters_with_hooks_are_compared(
    factor: float, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hook may read a parameter that already has its gradient. A removed hook leaves an empty dict."""
    passes = partition.joint_passes

    def spoilt(*arguments: Any) -> Any:
        module = passes(*arguments)
        output = next(iter(module.graph.find_nodes(op="output")))
        results = list(output.args[0])
        place = next(i for i, r in enumerate(results) if isinstance(r, torch.fx.Node) and len(r.meta["val"].shape) == 2)
        with module.graph.inserting_before(output):
            made = module.graph.call_function(torch.ops.aten.mul.Tensor, (results[place], factor))
        made.meta = dict(results[place].meta)
        results[place] = made
        output.args = (tuple(results),)
        module.recompile()
        return module

    monkeypatch.setattr(partition, "joint_passes", spoilt)
    torch.manual_seed(0)
    net = Cast(enabled=kind == "reads another")
    hook = net.first.weight.register_hook(lambda g: g * net.last.weight.norm() if kind == "reads another" else g)
    if kind == "was removed":
        hook.remove()
    wrong = (
        pytest.raises(ExportError, match=r"gradient of first\.weight is wrong")
        if factor != 1
        else contextlib.nullcontext()
    )
    with wrong:
        ab.export_grad(net, (torch.randn(4, 160),), wrt="parameters", path=tmp_path / "net.pt2")


def test_the_measure() -> None:
    """Eager's own error and a few roundings are allowed, a real difference is not, and a zero gradient is compared with
    the largest."""
    t = {
        "gradient of w": torch.randn(1000, dtype=torch.float64),
        "gradient of zero": torch.zeros(4, dtype=torch.float64),
    }
    e = {n: (v + 1e-8 * torch.randn_like(v)).float() for n, v in t.items()}

    reference = Reference(t, dict.fromkeys(t, 0.0), float64=True)

    def worst(a: dict[str, torch.Tensor]) -> dict[str, float]:
        return {c.name: c.ratio for c in compare_results(a, e, reference)}  # type: ignore[arg-type]

    assert all(r <= 1 for r in worst({n: v.clone() for n, v in e.items()}).values())
    assert worst({**e, "gradient of w": e["gradient of w"] * 1.0001})["gradient of w"] > 1
    assert worst({**e, "gradient of zero": torch.full((4,), 1e-4)})["gradient of zero"] > 1
    with pytest.raises(ExportError, match="gradient of w is None in the artifact and a tensor in eager"):
        worst({**e, "gradient of w": None})  # type: ignore[dict-item]
    with pytest.raises(ExportError, match="has NaN or Inf where eager has none"):
        worst({**e, "gradient of w": e["gradient of w"] / 0})


def test_what_is_not_finite_is_in_no_norm() -> None:
    assert norm(torch.tensor([3.0, float("inf"), 4.0, float("nan")])) == 5
    before, after = {"parameter w": torch.zeros(3)}, {"parameter w": torch.tensor([1.0, 2.0, float("inf")])}
    eager = step_check.StepResults(losses={}, before=before, after=after, gradients=[])
    wrong = step_check.StepResults(
        losses={}, before=before, after={"parameter w": torch.tensor([1.0, 2.1, float("inf")])}, gradients=[]
    )
    reference = Reference(eager, {"parameter w": 0.0}, float64=False)
    for actual, expected in ((eager, False), (wrong, True)):
        assert [c.wrong for c in step_check._compare_steps(actual, eager, reference, reduced_precision=False)] == [
            expected
        ]


def test_an_output_with_inf_is_verified(tmp_path: Path) -> None:
    """Inf minus Inf is NaN, so eager's distance to itself must not set the tolerance of such an output."""

    class Masked(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x.sin().sum(), x.detach().masked_fill(torch.eye(3, dtype=torch.bool), float("-inf"))

    assert verify_package(
        ab.export_module(Masked(), (torch.randn(3, 3, requires_grad=True),), path=tmp_path / "masked.pt2")
    ).ok


class FirstRow(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x)[0]


def test_a_size_of_0_that_eager_refuses_is_refused(tmp_path: Path) -> None:
    """Compiled code would read out of bounds."""
    rows = ({0: Dim("rows", min=0, max=64)},)
    path = ab.export_module(FirstRow(), (torch.randn(5, 3),), dynamic_shapes=rows, path=tmp_path / "first.pt2")
    assert_same({"y": load(path).module()(x := torch.randn(1, 3))}, {"y": FirstRow()(x)})
    with pytest.raises(InputError, match=r"rows .* is 0; expected at least 1 and at most 64"):
        load(path).module()(torch.randn(0, 3))
    both = {"x": rows[0], "y": rows[0]}  # equal, so they can be 0 only together
    path = ab.export_grad(
        lambda x, y: (x * y)[0].sum(),
        (torch.randn(5, 3), torch.randn(5, 3)),
        dynamic_shapes=both,
        path=tmp_path / "both.pt2",
    )
    with pytest.raises(InputError, match=r"is 0; expected at least 1"):
        load(path).grad()(torch.randn(0, 3), torch.randn(0, 3))
    path = ab.export_module(nn.Tanh(), (torch.randn(5, 3),), dynamic_shapes=rows, path=tmp_path / "all.pt2")
    assert load(path).module()(torch.randn(0, 3)).shape == (0, 3)


def test_the_callers_autocast_at_several_sizes(tmp_path: Path) -> None:
    """Autocast's cache of cast weights outlives an eager pass."""
    torch.manual_seed(0)
    module, rows = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 2)), ({0: Dim("rows", min=2, max=64)},)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        path = ab.export_module(module, (torch.randn(4, 8),), dynamic_shapes=rows, path=tmp_path / "cast.pt2")
        assert torch.equal(module(torch.ones(1, 8)), copy.deepcopy(module)(torch.ones(1, 8)))
    x = torch.randn(6, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same(run(load(path).module(), (x,), 1), run(module, (x,), 1), 2e-2)


class Writes(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x * 2


class Odd(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return dataclasses.make_dataclass("Odd", ["value"])(x)


X = torch.randn(3, 3)
REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "input written in place": (Writes, {}, r"the forward changes its input 'x' in place; clone it first"),
    "args is no tuple": (lambda: nn.Linear(3, 3), {"args": X}, r"args is a Tensor; expected a tuple"),
    "wrong number of arguments": (lambda: nn.Linear(3, 3), {"args": (X, X)}, r"the example arguments do not fit"),
    "sparse input": (lambda: nn.Linear(3, 3), {"args": (X.to_sparse(),)}, r"has layout torch\.sparse_coo"),
    "object input": (lambda: nn.Linear(3, 3), {"args": (object(),)}, r"is a object; a package takes tensors"),
    "the program fails": (
        lambda: nn.Linear(4, 3),
        {},
        r"the program could not be traced: RuntimeError: .*\[3, 3\] X \[4, 3\]",
    ),
    "unknown output type": (Odd, {}, r"Odd"),
    "kwargs is no dict": (lambda: nn.Linear(3, 3), {"kwargs": [1]}, r"kwargs is a list; expected a dict"),
    "names are none": (lambda: nn.Linear(3, 3), {"requires_grad": [3]}, r"requires_grad is \[3\]; expected names"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_exported_is_refused_by_name(case: str, tmp_path: Path) -> None:
    make, options, message = REFUSED[case]
    options = dict(options)
    args = options.pop("args", (X.clone(),))
    with pytest.raises(ExportError, match=message):
        ab.export(tmp_path / "no.pt2", {"net": ab.Module(make(), [ab.Variant(args, **options)])})
    assert not list(tmp_path.iterdir())


def test_destinations_and_names_are_checked_before_the_work(tmp_path: Path) -> None:
    variant, model, text = ab.Variant((X,)), tmp_path / "my.model", tmp_path / "text.pt2"
    torch.save(nn.Linear(3, 3), model)
    text.write_text("mine")
    with zipfile.ZipFile(tmp_path / "backup.pt2", "w") as backup:
        backup.writestr("a/package/extra/aot_backward/manifest.json", "{}")
    os.mkfifo(tmp_path / "pipe.pt2")
    before = model.read_bytes()
    wrong = [(tmp_path, "is a directory"), (tmp_path / "a" / "b.pt2", "does not exist; make it first")]
    wrong += [
        (path, "expected a package or no file, got another file")
        for path in (model, text, tmp_path / "backup.pt2", tmp_path / "pipe.pt2")
    ]
    for path, message in wrong:
        with pytest.raises(ExportError, match=message):
            ab.export(path, {"net": ab.Module(nn.Linear(3, 3), [variant])})
    assert model.read_bytes() == before and text.read_text() == "mine"
    with pytest.raises(PackageError, match=r"A file of torch\.save has them: export the model"):
        load(model)
    for entries, message in (
        ({}, "entries is empty"),
        ({"a b": ab.Module(nn.Linear(3, 3), [variant])}, "use a Python identifier"),
    ):
        with pytest.raises(ExportError, match=message):
            ab.export(tmp_path / "x.pt2", entries)
    nonsense: list[tuple[Any, str]] = [
        ({3: None}, "an entry is named 3"),
        ([1], "entries is a list"),
        ({"a": nn.Linear(3, 3)}, "entry 'a' is a Linear; expected a Module"),
        ({"a": ab.Module(nn.Linear(3, 3), [(X,)])}, "entry 'a': variants is"),  # type: ignore[list-item]
        ({"a": ab.Module(nn.Linear(3, 3), variant)}, "entry 'a': variants is"),  # type: ignore[arg-type]
    ]
    for entries, message in nonsense:
        with pytest.raises(ExportError, match=message):
            ab.export(tmp_path / "x.pt2", entries)
    for path in (None, 3, "a\0"):
        with pytest.raises(ExportError, match=r"path is .*; expected the name of the file"):
            ab.export(path, {"net": ab.Module(nn.Linear(3, 3), [variant])})  # type: ignore[arg-type]
    with pytest.raises(ExportError, match=r"unknown target 'tpu'; known: cpu, cpu:sse4"):
        ab.export(tmp_path / "x.pt2", {"net": ab.Module(nn.Linear(3, 3), [variant])}, target="tpu")


def test_without_weights(tmp_path: Path) -> None:
    module = nn.Linear(3, 3)
    path = ab.export(tmp_path / "bare.pt2", {"net": ab.Module(module, [ab.Variant((X.clone(),))])}, weights=False)
    from aot_backward_runtime import WeightsError

    with pytest.raises(WeightsError, match=r"was written without weights: pass load\(path, weights="):
        load(path)
    with pytest.raises(WeightsError, match=r"weight has shape \(3, 4\); the package was compiled for \(3, 3\)"):
        load(path, weights={"weight": torch.randn(3, 4), "bias": module.bias.detach()})
    loaded = load(path, weights={n: p.detach().clone() for n, p in module.named_parameters()}).module()
    assert_same(run(loaded, (X,), 1), run(module, (X,), 1))
