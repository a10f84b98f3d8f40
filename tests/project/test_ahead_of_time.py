"""Test the tool that compares ways to compile gradients ahead of time: it finds differences, and its page in docs/ is
complete."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.export import Dim

from ..tools.ahead_of_time import __main__ as tool
from ..tools.ahead_of_time import one, ways

DOCS = Path(__file__).parents[2] / "docs" / "benchmarks"


def test_what_differs_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare a way that always computes from the values of the capture. The tool must report every later change that
    it ignores."""

    def load(folder: Path, program: Callable[[], torch.nn.Module]) -> tuple[ways.Program, torch.nn.Module]:
        captured, module = program(), program()

        def call(*args: torch.Tensor) -> torch.Tensor:
            loss = captured(*args)
            for parameter, gradient in zip(
                module.parameters(), torch.autograd.grad(loss, list(captured.parameters())), strict=True
            ):
                parameter.grad = gradient
            return loss.detach()

        return call, module

    monkeypatch.setitem(ways.WAYS, "deaf", ways.Way(ways.WAYS["eager"].write, load))
    found = {case: one.changed("deaf", case)["verdict"] for case in one.CASES}
    assert found.pop("an input of float64") == "refused"
    deaf = (
        "new values in the parameters' `.data`",
        "a hook on each parameter",
        "a parameter that is frozen",
        "`module.eval()` with dropout",
    )
    assert found == {case: "differs" if case in deaf else "eager's" for case in found}


@pytest.mark.parametrize("case", one.CASES)
def test_ours_is_eager_or_refused(case: str) -> None:
    assert one.changed("ours", case)["verdict"] in ("eager's", "refused")


def test_ours_at_a_size_that_is_dynamic(tmp_path: Path) -> None:
    x = torch.randn(7, 8)
    ways.WAYS["ours"].write(one.Small(), (x[:3],), [{0: Dim("rows", min=1, max=9)}], tmp_path)
    call, module = ways.WAYS["ours"].load(tmp_path, one.Small)
    eager = one.Small()
    eager.load_state_dict(module.state_dict())
    loss = eager(x)
    loss.backward()
    torch.testing.assert_close(call(x), loss.detach())
    for actual, expected in zip(module.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, expected.grad)


def test_the_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    argv = [
        "--models",
        "mlp",
        "--rounds",
        "1",
        "--ways",
        "eager,ours",
        "--cases",
        "a hook on each parameter",
        "--docs",
        str(tmp_path / "page"),
    ]
    monkeypatch.setattr("sys.argv", ["ahead_of_time", *argv])
    with pytest.raises(SystemExit, match=r"^0$"):
        tool.main()
    found = json.loads((tmp_path / "page.json").read_text())
    assert {r["way"]: [e["right"] for e in (*r["compiler"], *r["none"])] for r in found["first"]} == {
        "eager": [True] * 2,
        "ours": [True] * 2,
    }
    assert next(e["compilers"] for r in found["first"] if r["way"] == "ours" for e in r["none"]) == []
    assert "| a hook on each parameter | eager's |" in (tmp_path / "page.md").read_text()


def test_the_page_in_the_docs() -> None:
    found = json.loads((DOCS / "ahead-of-time.json").read_text())
    assert (DOCS / "ahead-of-time.md").read_text() == tool.page(found)
    assert {r["case"] for r in found["changed"]} == {*one.CASES}
    assert {r["verdict"] for r in found["changed"] if r["way"] == "ours"} == {"eager's", "refused"}
