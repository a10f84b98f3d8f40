"""Control flow whose bodies return a value twice, over dynamic lengths. A refusal names the operator, the line and the
alternative."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._higher_order_ops import map as mapped
from torch._higher_order_ops import scan, while_loop
from torch.export import Dim

import aot_backward as ab
from aot_backward_exporters import torch_api
from aot_backward_runtime import ExportError, load

# From Dynamo, which control flow calls
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


class Program(nn.Module):
    def __init__(self, program: Callable[[torch.Tensor], Any]):
        super().__init__()
        self.program = program

    def forward(self, x: torch.Tensor) -> Any:
        return self.program(x)


class Recurrent(nn.Module):
    """A scan whose step ends in operators that save their result for the backward, so the step returns it twice."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.u = nn.Parameter(0.3 * torch.randn(width, width))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        def step(state: tuple[torch.Tensor, torch.Tensor], row: torch.Tensor) -> Any:
            h = torch.tanh(row + state[0] @ self.u)
            gate = torch.sigmoid(state[1] * row)
            return (h, gate), (h.clone(), torch.exp(-row * h))

        (h, gate), results = scan(step, (0 * x[0], 0 * x[0]), x)
        return h, gate, *results


@pytest.mark.skipif(not torch_api.at_least("2.13"), reason="a loop's body takes other inputs than it is given")
@pytest.mark.parametrize("before", ["nothing", "scans in eager", "another export"])
def test_a_scan_whose_step_ends_in_tanh_sigmoid_or_exp(before: str, tmp_path: Path) -> None:
    """Scans that Dynamo compiled ``before`` do not fix the dynamic sizes of this one."""
    torch.compiler.reset()
    if before == "scans in eager":
        for width in (5, 7):
            scan(
                lambda h, row: ((n := torch.tanh(h + row)), n.clone()), torch.zeros(3, width), torch.randn(6, 3, width)
            )
    elif before == "another export":
        ab.export_module(Recurrent(width=5), (torch.randn(6, 3, 5, requires_grad=True),), path=tmp_path / "other.pt2")
    torch.manual_seed(0)
    module, sizes = Recurrent(), {"x": {0: Dim("length", min=1, max=20), 1: Dim("batch", min=1, max=9)}}
    ab.export_module(
        module, (torch.randn(6, 3, 4, requires_grad=True),), dynamic_shapes=sizes, path=tmp_path / "scan.pt2"
    )
    loaded = load(tmp_path / "scan.pt2").module()
    for shape in ((6, 3, 4), (1, 1, 4), (20, 9, 4)):
        x, found = torch.randn(shape), []
        for one in (module, loaded):
            leaf = x.clone().requires_grad_()
            torch.compiler.reset()  # otherwise eager's scan may fail at a batch of 1
            results = one(leaf)
            loss = sum((r * torch.arange(4).cos()).sum() for r in results)
            found.append([*results, *torch.autograd.grad(loss, [leaf, *one.parameters()])])
        torch.testing.assert_close(found[1], found[0])


class BothWays(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.u = nn.Parameter(0.5 * torch.randn(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        def step(state: torch.Tensor, row: torch.Tensor) -> Any:
            return torch.tanh(row * self.u + state), state * row

        last, along = scan(step, 0 * x[0], x)
        return last, along, *scan(step, 0 * x[0], x + along, reverse=True)


@pytest.mark.skipif(not torch_api.at_least("2.13"), reason="a loop's body takes other inputs than it is given")
def test_scans_in_both_directions_over_a_dynamic_length(tmp_path: Path) -> None:
    module, sizes = BothWays(), {"x": {0: Dim("length", min=1, max=20), 1: Dim("batch", min=1, max=9)}}
    ab.export_module(
        module, (torch.randn(6, 3, 4, requires_grad=True),), dynamic_shapes=sizes, path=tmp_path / "both.pt2"
    )
    loaded = load(tmp_path / "both.pt2").module()
    for shape in ((6, 3, 4), (1, 1, 4), (20, 9, 4)):
        x, found = torch.randn(shape), []
        for one in (module, loaded):
            leaf = x.clone().requires_grad_()
            torch.compiler.reset()
            results = one(leaf)
            found.append(
                [
                    *results,
                    *torch.autograd.grad(
                        sum((r * torch.arange(4).cos()).sum() for r in results), [leaf, *one.parameters()]
                    ),
                ]
            )
        torch.testing.assert_close(found[1], found[0])


def _twice(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.tanh(), x > 0


REFUSED: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "an input": (
        lambda x: torch.cond(x.sum() > 0, lambda a: a, lambda a: a.sin(), (x,)),
        r"body of torch\.cond returns one of its inputs.*x\.clone\(\)",
    ),
    "one tensor twice": (
        lambda x: scan(lambda h, r: ((n := h + r), n), 0 * x[0], x),
        r"body of scan .*or the same tensor twice.*x\.clone\(\)",
    ),
    "booleans": (
        lambda x: mapped(_twice, x)[0],
        r"body of map returns a tensor of integers or booleans.*x\.to\(torch\.float32\)",
    ),
    "a number carried": (
        lambda x: while_loop(lambda i, v: i < 3, lambda i, v: (i + 1, v.sin()), (0, x))[1],
        r"while_loop carries a Python number.*torch\.tensor\(0\)",
    ),
}


@pytest.mark.skipif(torch_api.minor() != "2.13", reason="each torch refuses others, and words them otherwise")
@pytest.mark.parametrize("case", REFUSED)
def test_what_eager_refuses_names_the_operator_the_line_and_the_way_out(case: str, tmp_path: Path) -> None:
    program, message = REFUSED[case]
    x = torch.randn(3, 4, requires_grad=True)
    with pytest.raises(Exception):  # noqa: B017  whatever eager raises
        first = program(x)
        torch.autograd.grad((first if isinstance(first, torch.Tensor) else first[0]).sum(), x)
    with pytest.raises(ExportError, match=message + r".*; it is called in .*\(test_control_flow\.py:\d+: .*"):
        ab.export_module(Program(program), (x,), path=tmp_path / "no.pt2")
