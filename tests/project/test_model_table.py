"""Test the table of models: its comparison can fail, its models run, and the tool measures one of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ..tools.model_table import __main__ as table
from ..tools.model_table import models, one

DOCS = Path(__file__).parents[2] / "docs"


def test_the_measure_can_fail() -> None:
    right = {"a": torch.randn(5), "b": None, "loss": torch.ones(())}
    one._compared(right, right)
    for wrong, words in (
        ({"a": right["a"] * 1.01}, "a is off by"),
        ({"a": None}, "a is None"),
        ({"b": torch.zeros(2)}, "b is not None"),
    ):
        with pytest.raises(one.Wrong, match=words):
            one._compared(right | wrong, right)


@pytest.mark.parametrize("name", models.NAMES)
def test_the_models_run_at_each_size(name: str) -> None:
    case = models.make(name)
    case.module.train(case.mode == "train")
    for size in case.sizes:
        case.module(*case.args(size))


def test_one_model_in_two_ways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A second run measures nothing again."""
    monkeypatch.setattr(table, "SHAPES", ("dynamic",))
    rows, ways = tmp_path / "rows.jsonl", ["ours", one.PEERS[0]]
    argv = [
        "model_table",
        "--names",
        "mlp",
        "--ways",
        ",".join(ways),
        "--resume",
        str(rows),
        "--docs",
        str(tmp_path / "models"),
    ]
    for lines in (2, 0):
        monkeypatch.setattr("sys.argv", argv)
        table.main()
        assert len(capsys.readouterr().out.splitlines()) == lines
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [(r["way"], r["shapes"], r["verdict"]) for r in found] == [(w, "dynamic", "pass") for w in ways]
    assert "| mlp | pass | pass |" in (tmp_path / "models.md").read_text()


def test_the_table_in_the_docs() -> None:
    """The table holds every model, and aot-backward passes each."""
    rows = [r for r in json.loads((DOCS / "models.json").read_text()) if r["way"] == "ours"]
    assert {r["model"] for r in rows} == {*models.NAMES} and len(models.NAMES) >= 25
    assert [r for r in rows if r["verdict"] != "pass"] == []
