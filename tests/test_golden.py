"""Packages of every format version so far are read as they were meant; where native code cannot run here, it is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from aot_backward_runtime import IncompatibleError, load
from aot_backward_runtime.archive import open_package
from aot_backward_runtime.manifest import FORMAT_VERSION
from aot_backward_runtime.weights import load_weights

from .golden_packages import Pair, arguments
from .oracle import assert_same, run

GOLDEN = Path(__file__).parent / "golden"
FILES = sorted(GOLDEN.glob("*.pt2"))


def test_the_present_format_has_a_golden_package() -> None:
    assert [p for p in FILES if p.name.startswith(f"{FORMAT_VERSION[0]}.{FORMAT_VERSION[1]}-")]
    listed = (GOLDEN / "README.md").read_text()
    assert all(f"`{p.name}`" in listed for p in FILES)


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_it_is_read(path: Path) -> None:
    archive = open_package(path)
    archive.verify_digests()
    weights = load_weights(archive)
    expected = Pair()
    torch.testing.assert_close(weights["first.weight"], expected.first.weight.detach())
    entry = archive.manifest.entries["pair"]
    assert [s.name for s in entry.state if s.weight == "first.weight"] == ["first.weight", "second.weight"]
    assert [(s.label, s.minimum, s.maximum) for s in entry.variants[0].symbols] == [("rows", 2, 64)]
    assert entry.variants[0].verdict.status == "verified"


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_it_runs_on_the_torch_that_it_was_built_for(path: Path) -> None:
    built = open_package(path).manifest.torch.split(".")[:2]
    if built != torch.__version__.split(".")[:2]:
        with pytest.raises(IncompatibleError, match=rf"torch {'.'.join(built)}"):
            load(path)
        return
    package = load(path)
    assert_same(run(package.module("pair"), arguments(), 2), run(Pair(), arguments(), 2))
    x = arguments()[0]
    value, gradients = package.grad("loss")(x.detach())
    first = Pair().first
    expected = first(x).square().sum()
    expected.backward()
    torch.testing.assert_close(value, expected.detach())
    torch.testing.assert_close(gradients, {"x": x.grad, "net.first.weight": first.weight.grad})
