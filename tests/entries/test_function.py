"""Functions without gradients, and the metadata of packages and entries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

import aot_backward as ab
from aot_backward_runtime import AotBackwardError, ExportError, InputError, load

from ..conftest import aot_backward
from ..support import exports
from ..support.oracle import tensors

X = torch.linspace(-2, 2, 15).reshape(5, 3)
METADATA = {"cutoff": 5.0, "species": ["H", "Ö"], "deep": {"a": [1, None, True, {"b": "c"}]}}


class Statistics(nn.Module):
    """A buffer that changes, a mode, nested outputs, an input that comes back, and a size."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 4)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor, scale: float = 2.0) -> dict[str, Any]:
        self.calls += 1
        h = self.drop(self.layer(x)) * scale
        return {"h": h, "more": (x, h.argmax(1), [x.shape[0], None]), "any": (h > 0).any()}


def slope(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A function that differentiates inside."""
    x = x.detach().requires_grad_()
    value = torch.sin(x).sum(1)
    return value, torch.autograd.grad(value.sum(), x)[0]


def make(path: Path) -> None:
    net = Statistics()
    rows = {0: Dim("rows", min=1, max=99)}

    def weighted(x: torch.Tensor) -> torch.Tensor:
        return net.layer(x) @ net.layer.weight

    entries: dict[str, Any] = {
        "statistics": ab.Function(
            net, [ab.Variant((X,), mode=m, dynamic_shapes={"x": rows}) for m in ("train", "eval")], metadata=METADATA
        ),
        "slope": ab.Function(slope, [ab.Variant((X,), dynamic_shapes=(rows,))]),
        "weighted": ab.Function(weighted, [ab.Variant((X,)), ab.Variant((X.double()[:, :0].float().new_ones(2, 3),))]),
        "loss": ab.Grad(
            lambda x: (weighted(x).sum(), {"h": net.layer(x)}), [ab.Variant((X,))], has_aux=True, wrt="x", metadata={}
        ),
    }
    ab.export(path, entries, metadata={"author": "A. N. Other", "version": [1, 2]})


@pytest.fixture(scope="module")
def package() -> Path:
    return exports.shared("function", make)


def assert_equal(actual: Any, expected: Any) -> None:
    ours, theirs = tensors(actual), tensors(expected)
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert (a.dtype, a.shape, a.stride(), a.requires_grad) == (b.dtype, b.shape, b.stride(), False)
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("rows", [1, 5, 31])
def test_equal_to_eager(rows: int, package: Path) -> None:
    loaded, x = load(package), torch.randn(rows, 3, requires_grad=True)
    net = Statistics()
    statistics = loaded.function("statistics")
    for training in (True, False, True):
        net.train(training)
        torch.manual_seed(1)
        with torch.no_grad():
            expected = net(x)
        torch.manual_seed(1)
        actual = statistics.train(training)(x)
        assert_equal({**actual, "more": actual["more"][1]}, {**expected, "more": expected["more"][1]})
        assert actual["more"][0] is x and actual["more"][2] == [rows, None]
    assert statistics.parameters["calls"].item() == net.calls.item() == 3
    assert_equal(loaded.function("slope")(x), [t.detach() for t in slope(x)])


def test_weights_are_shared_live_and_loadable(package: Path) -> None:
    loaded = load(package)
    weighted, statistics = loaded.function("weighted"), loaded.function("statistics")
    before = weighted(X)
    with torch.no_grad():
        weighted.parameters["net.layer.weight"].mul_(2)
    assert not torch.equal(weighted(X), before)
    assert torch.equal(statistics.parameters["layer.weight"], weighted.parameters["net.layer.weight"])
    statistics.load_state_dict(Statistics().state_dict())
    torch.testing.assert_close(weighted(X), before)
    assert weighted(torch.ones(2, 3)).shape == (2, 3)


def test_errors(package: Path) -> None:
    loaded = load(package)
    with pytest.raises(InputError, match="rows"):
        loaded.function("slope")(torch.randn(100, 3))
    with pytest.raises(
        AotBackwardError, match=r"expected a module entry, got .*Call load\(path\)\.function\('statistics'\)"
    ):
        loaded.module()
    with pytest.raises(
        ExportError, match=r"module: expected an nn\.Module, got a function\. For its outputs call export_function"
    ):
        ab.export_module(slope, (X,), path="never.pt2")  # type: ignore[arg-type]
    assert not Path("never.pt2").exists()


def test_export_function_with_all_options(tmp_path: Path) -> None:
    path = ab.export_function(
        slope,
        (X,),
        dynamic_shapes=({0: Dim("rows", min=1)},),
        metadata={"a": 1},
        runtime="torch",
        path=tmp_path / "s.pt2",
    )
    loaded = load(path)
    assert loaded.entries == {"function": "function"} and loaded.metadata == {"a": 1} and loaded.path == path
    assert_equal(loaded.function()(X), slope(X))


def test_metadata_and_names(package: Path) -> None:
    loaded = load(package)
    assert loaded.metadata == {"author": "A. N. Other", "version": [1, 2]}
    assert (
        loaded.function("statistics").metadata == METADATA
        and loaded.grad().metadata == {}
        and loaded.function("slope").metadata == {}
    )
    loaded.metadata["author"] = "changed"
    assert loaded.metadata["author"] == "A. N. Other"
    names = {n: [o.name for o in e.variants[0].outputs] for n, e in loaded.manifest.entries.items()}
    assert names["statistics"] == ["h", "more[0]", "more[1]", "any"] and names["slope"] == ["output[0]", "output[1]"]
    assert names["loss"] == ["output[0]", "h"]
    inspected = json.loads(aot_backward("inspect", package, "--json").stdout)
    assert inspected["metadata"] == loaded.metadata and inspected["entries"]["statistics"]["metadata"] == METADATA
    shown = aot_backward("inspect", package).stdout
    assert (
        '\nMetadata: {"author": "A. N. Other", "version": [1, 2]}' in shown
        and '\n  Metadata: {"cutoff": 5.0, "species": ["H", "Ö"]' in shown
    )


def test_equal_names_are_told_apart(tmp_path: Path) -> None:
    def twice(x: torch.Tensor) -> list[dict[str, torch.Tensor]]:
        return [{"a": x + 1}, {"a": x + 2}]

    path = ab.export_function(twice, (X,), path=tmp_path / "twice.pt2")
    assert [o.name for o in load(path).manifest.entries["function"].variants[0].outputs] == [
        "output[0].a",
        "output[1].a",
    ]


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ([1], "expected a dict of JSON values, got a list"),
        ({"a": torch.ones(1)}, "one that JSON cannot hold: Object of type Tensor"),
        ({"a": float("nan")}, "one that JSON cannot hold"),
        ({"a": (1, 2)}, "JSON would change it"),
        ({1: "a"}, "JSON would change it"),
        ({"a": "\ud800"}, "one that JSON cannot hold"),
    ],
)
def test_metadata_that_is_not_json(metadata: Any, message: str, tmp_path: Path) -> None:
    variants = [ab.Variant((X,))]
    for entries, own in (
        ({"f": ab.Function(slope, variants)}, metadata),
        ({"f": ab.Function(slope, variants, metadata=metadata)}, None),
    ):
        with pytest.raises(ExportError, match=message):
            ab.export(tmp_path / "never.pt2", entries, metadata=own)
    assert not list(tmp_path.iterdir())


def test_a_built_in_function_without_a_signature_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"sin: expected a function with named arguments, got .*: lambda x: sin\(x\)"):
        ab.export_function(torch.sin, (X,), path=tmp_path / "never.pt2")


def test_run_command(package: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save_file({"x": X}, tmp_path / "in.safetensors")
    files = ("--inputs", tmp_path / "in.safetensors", "--outputs", tmp_path / "out.safetensors")
    done = aot_backward("run", package, *files, "--entry", "slope")
    assert done.returncode == 0, done.stderr
    assert_equal(list(load_file(tmp_path / "out.safetensors").values()), slope(X))
    save_file({"x": X, "gradient of output[0]": X.clone()}, tmp_path / "in.safetensors")
    done = aot_backward("run", package, *files, "--entry", "slope")
    assert done.returncode and "computes outputs without gradients, and takes no incoming ones" in done.stderr
