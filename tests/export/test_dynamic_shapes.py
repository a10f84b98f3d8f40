"""``dynamic_shapes`` in the spellings that ``torch.export`` accepts, and in others that are common."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import AdditionalInputs, Dim, ShapesCollection

import aot_backward as ab
from aot_backward_runtime import ExportError, InputError, load

from ..conftest import aot_backward

PROGRAM = """
import torch
from torch import nn
from torch.export import Dim, ShapesCollection
import aot_backward as ab

class Several(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 2)
    def forward(self, *args):
        return torch.tanh(self.layer(args[0])) * args[1]

class Fixed(Several):
    def forward(self, x, y, **more):
        width = 2 if x.shape[1] == 3 else 3
        return (torch.tanh(self.layer(x))[:, :width] * y - more["target"]).square().sum()

def entries():
    x, y, t = torch.randn(5, 3), torch.randn(5, 2), torch.randn(5, 2)
    natural = ab.Variant((x, y), dynamic_shapes=({0: Dim.DYNAMIC(min=3, max=9)}, {0: Dim.DYNAMIC}))
    named = ab.Variant((x, y), dynamic_shapes={"args": ({0: Dim("rows", min=2)}, {-2: Dim("rows", min=2)})}, mode="eval")
    shapes = ShapesCollection()
    for tensor in (x, y, t):
        shapes[tensor] = {0: Dim.AUTO}
    auto = ({0: Dim.AUTO, 1: Dim.AUTO}, {0: Dim.AUTO, 1: 2})
    net = Several()
    return {
        "net": ab.Module(net, [natural, named]),
        "slope": ab.Grad(Fixed(), [ab.Variant((x, y), {"target": t}, dynamic_shapes=shapes)], wrt="x"),
        "fit": ab.Step(net, [ab.Variant((x, y, t), dynamic_shapes=(*auto, {0: Dim.AUTO}))], torch.optim.SGD(net.parameters(), lr=0.1),
                       loss_fn=nn.functional.mse_loss),
    }
"""


def test_through_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    done = aot_backward("export", f"{tmp_path}/program.py:entries", "-o", tmp_path / "all.pt2")
    assert done.returncode == 0, done.stderr
    made: dict[str, Any] = {}
    exec(PROGRAM, made)
    eager = made["Several"]()
    loaded = load(tmp_path / "all.pt2")
    net, slope, step = loaded.module("net"), loaded.grad("slope"), load(tmp_path / "all.pt2").step("fit")
    optimizer = torch.optim.SGD(eager.parameters(), lr=0.1)
    for mode, rows in (("train", 3), ("train", 9), ("eval", 2), ("eval", 14)):
        x, y = torch.randn(rows, 3), torch.randn(rows, 2)
        results = []
        for own in (net.train(mode == "train"), eager):
            own.zero_grad()
            value = own(x, y)
            value.sin().sum().backward()
            results.append([value.detach(), *(p.grad for p in own.parameters())])
        torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)
    for rows in (2, 10):
        with pytest.raises(InputError, match=rf"args\[0\]\.shape\[0\].* is {rows}; expected at least 3 and at most 9"):
            net.train()(torch.randn(rows, 3), torch.randn(rows, 2))
    for rows in (5, 1, 12):
        x, y, t = torch.randn(rows, 3, requires_grad=True), torch.randn(rows, 2), torch.randn(rows, 2)
        expected = made["Fixed"]()(x, y, target=t)
        value, gradient = slope(x.detach(), y, target=t)
        torch.testing.assert_close(
            [value, gradient], [expected.detach(), *torch.autograd.grad(expected, x)], rtol=1e-4, atol=1e-5
        )
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(eager(x.detach(), y), t)
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(step(x.detach(), y, t), loss.detach())
    torch.testing.assert_close(
        [p.detach() for p in step.parameters.values()], [p.detach() for p in eager.parameters()], rtol=1e-4, atol=1e-5
    )
    variant = loaded.manifest.entries["fit"].variants[0]
    assert [t.shape[1] for t in variant.inputs] == [3, 2, 2]  # AUTO, and fixed by the layer
    assert all(isinstance(t.shape[0], str) for t in variant.inputs)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor, n: int = 1) -> torch.Tensor:
        return self.layer(x) * y if x.shape[0] == 5 else self.layer(x) + y


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, first: torch.Tensor, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        return self.layer(first) + args[0] * args[1] + kwargs["last"]


ROWS = {0: Dim("rows", min=2)}
X, Y = torch.randn(5, 3), torch.randn(5, 3)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (
            ({0: Dim.DYNAMIC}, None),
            r"x\.shape\[0\] is Dim\.DYNAMIC, and the program.* is valid only for 5 \(guard: x\.shape\[0\] == 5\): say Dim\.AUTO",
        ),
        (({1: Dim.DYNAMIC}, None), r"x\.shape\[1\] is Dim\.DYNAMIC, and the program.* is valid only for 3"),
        (
            ({0: Dim.AUTO(min=6)}, None),
            r"dimension 0 of the example at \['x'\] is 5, not within DimHint\(AUTO, min=6\)",
        ),
        (({0: Dim.DYNAMIC(max=4)}, None), r"dimension 0 of the example at \['x'\] is 5, not within DimHint"),
        (({0: "batch"}, None), r"index 0 .*dynamic_shapes\['x'\].* got 'batch' instead"),
        (({3: Dim.AUTO}, None), r"the tensor at \['x'\] has 2 dimensions and no dimension 3"),
        (({"rows": Dim.AUTO}, None), r"the tensor at \['x'\] has 2 dimensions and no dimension 'rows'"),
        (({0: Dim.AUTO, -2: Dim.AUTO}, None), r"dimension 0 of the tensor at \['x'\] is given twice"),
        ((ROWS,), "it has 1 elements for 2 arguments"),
        ({"x": ROWS}, r"must be the arg names \['x', 'y'\]"),
        ({"x": ROWS, "z": ROWS}, r"must be the arg names \['x', 'y'\]"),
        ((Dim.AUTO, None), r"dynamic_shapes\['x'\]"),
        (((Dim.AUTO,), None), r"dynamic_shapes\['x'\].* same length"),
        ("batch", "it is a str"),
        (7, r"it is a int\. Give sizes by argument"),
        ({"x": {0: Dim.STATIC}, "y": {0: object()}}, r"dynamic_shapes\['y'\]"),
    ],
)
def test_what_does_not_fit_is_named(shapes: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=message):
        ab.export_module(Two(), (X, Y), dynamic_shapes=shapes, path=tmp_path / "no.pt2")
    assert not list(tmp_path.iterdir())


def test_what_is_no_tensor_has_no_size(tmp_path: Path) -> None:
    for hint in (Dim.DYNAMIC, Dim("n")):
        with pytest.raises(ExportError, match=r"dynamic_shapes\['n'\]` to non-tensor type"):
            ab.export_module(Two(), (X, Y, 4), dynamic_shapes=(None, None, hint), path=tmp_path / "no.pt2")
    strange = ShapesCollection()
    strange[torch.randn(5, 3)] = {0: Dim.AUTO}
    with pytest.raises(ExportError, match="not found in args"):
        ab.export_module(Two(), (X, Y), dynamic_shapes=strange, path=tmp_path / "no.pt2")


def test_spellings_that_mean_the_same() -> None:
    from aot_backward.capture.shapes.dynamic_shapes import normalized

    module = Both()
    args, kwargs = (X, Y, Y + 1), {"last": Y + 2}
    wanted = {"first": ROWS, "args": (ROWS, None), "kwargs": {"last": ROWS}}
    collection = ShapesCollection()
    for tensor in (X, Y, kwargs["last"]):
        collection[tensor] = ROWS
    for shapes in (
        wanted,
        {"first": ROWS, "args": (ROWS, None), "last": ROWS},
        (ROWS, (ROWS, None), {"last": ROWS}),
        (ROWS, ROWS, None, {"last": ROWS}),
        [ROWS, ROWS, None, {"last": ROWS}],
        ((ROWS[0], Dim.STATIC), {-2: ROWS[0]}, None, {"last": ROWS}),
        collection,
    ):
        found = normalized(shapes, module.forward, args, kwargs)
        assert found is not None
        sizes = [
            {d: s for d, s in (f or {}).items() if s is not Dim.STATIC}
            for f in (found["first"], *found["args"], found["kwargs"]["last"])
        ]
        assert sizes == [ROWS, ROWS, {}, ROWS], shapes
    more = AdditionalInputs()
    more.add((torch.randn(6, 3), torch.randn(6, 3), torch.randn(6, 3)), {"last": torch.randn(6, 3)})
    found = normalized(more, module.forward, args, kwargs)
    assert found is not None and found["first"] == {0: Dim.DYNAMIC, 1: Dim.STATIC}
    for nothing in (None, {}, (), []):
        assert normalized(nothing, module.forward, args, kwargs) is None
    assert not hasattr(X, "_dynamo_dynamic_indices")  # your own tensors are unchanged


def test_a_size_that_was_left_to_the_trace_and_came_out_fixed_is_said(tmp_path: Path) -> None:
    said: list[str] = []
    shapes = ({0: Dim.AUTO, 1: Dim.AUTO}, {0: Dim.AUTO})
    ab.export_module(
        Two(), (X, Y), dynamic_shapes=shapes, path=tmp_path / "a.pt2", progress=lambda what, *_: said.append(what)
    )
    assert [s.partition("static, ")[2] for s in said if "Dim.AUTO" in s] == [
        "x.shape[0] = 5",
        "x.shape[1] = 3",
        "y.shape[0] = 5",
    ]
    done = aot_backward("inspect", tmp_path / "a.pt2")
    assert "5" in done.stdout and done.returncode == 0
