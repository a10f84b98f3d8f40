"""Metadata, functions without gradients, and results in the caller's structure, from C and from Python without
PyTorch."""

from __future__ import annotations

import copy
import ctypes
import json
from pathlib import Path
from typing import Any, NamedTuple

import aot_backward_native as abn
import numpy as np
import pytest
import torch
from torch.export import Dim

import aot_backward as ab
from aot_backward_runtime import load

from ..support import c_library, golden_files
from ..support.c_library import FORMAT, INPUT, NAME, library
from ..support.exports import shared
from ..support.golden_packages import samples as step_samples
from ..tools.fuzz import spoiling

PAIR, STEP = (golden_files.FOLDER / f"{name}.pt2" for name in ("1.0-pair", "1.2-step"))


class Bonds(NamedTuple):
    lengths: torch.Tensor
    stiff: float


def energy(positions: torch.Tensor, kinds: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    each = (positions[1:] - positions[:-1]).square().sum(1) * kinds[1:]
    return each.sum(), {"energies": each, "charges": [kinds * 0.5, None]}


def bonds(positions: torch.Tensor) -> dict[str, Any]:
    lengths = (positions[1:] - positions[:-1]).square().sum(1)
    return {
        "bonds": Bonds(lengths, 2.5),
        "atoms": positions.shape[0],
        "centre": (positions.mean(0),),
        "axes": [positions.argmax(1)],
    }


def samples(atoms: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(atoms)
    return torch.randn(atoms, 3, dtype=torch.float64, generator=generator), torch.randint(
        1, 3, (atoms,), generator=generator
    )


def export_hosted(path: Path) -> None:
    atoms, (positions, kinds) = {0: Dim("atoms", min=2, max=100)}, samples(4)
    variant = ab.Variant((positions, kinds), dynamic_shapes=(atoms, atoms))
    entries = {
        "energy": ab.Grad(
            energy, [variant], wrt=["positions"], has_aux=True, metadata={"cutoff": 5.0, "species": ["H", "C"]}
        ),
        "bonds": ab.Function(bonds, [ab.Variant((positions,), dynamic_shapes=(atoms,))]),
    }
    ab.export(path, entries, runtime="standalone", metadata={"author": "é", "layers": [1, None]})


def hosted() -> Path:
    """Return a package of an energy with an auxiliary result, and of a function without gradients."""
    return shared("native-hosted", export_hosted)


def rewritten(path: Path, out: Path, change: Any) -> Path:
    """Write the package of ``path`` with another manifest to ``out``."""
    parts = spoiling.parts(path)
    manifest = spoiling._copied(parts.manifest)
    change(manifest)
    out.write_bytes(spoiling.put_together(parts.members, spoiling.to_bytes(manifest)))
    return out


def test_metadata_of_a_package_and_of_its_entries() -> None:
    package = abn.load(hosted())
    assert package.metadata == {"author": "é", "layers": [1, None]} == load(hosted()).metadata
    assert package.grad().metadata == {"cutoff": 5.0, "species": ["H", "C"]} and package.function().metadata == {}
    assert package.path == hosted().absolute() and package.entries == {"energy": "grad", "bonds": "function"}
    with c_library.opened(hosted()) as opened:
        assert library().aotb_metadata(opened.handle, b"energy") == b'{"cutoff": 5.0, "species": ["H", "C"]}'
        assert library().aotb_metadata(opened.handle, b"bonds") == b"{}"
        assert (
            library().aotb_metadata(opened.handle, b"nonsuch") is None
            and b"no entry 'nonsuch'" in library().aotb_error()
        )


@golden_files.needed
@pytest.mark.parametrize(("text", "words"), [("[1]", "expected an object, got an array"), ("{", "is not JSON")])
@pytest.mark.parametrize("entry", [False, True])
def test_metadata_that_is_not_an_object(text: str, words: str, entry: bool, tmp_path: Path) -> None:
    def change(manifest: Any) -> None:
        (manifest["entries"]["loss"] if entry else manifest).update(metadata=text)

    path = rewritten(PAIR, tmp_path / "x.pt2", change)
    with pytest.raises(c_library.Failed, match=words) as caught, c_library.opened(path):
        pass
    assert caught.value.status == FORMAT and "metadata" in str(caught.value)


def test_a_function_without_gradients() -> None:
    with c_library.function(hosted(), "bonds", "standalone") as called:
        assert called.kind == "function" and called.count(c_library.GRADIENTS) == 0
        assert [n for n, _ in called.describe(c_library.OUTPUTS)] == ["bonds.lengths", "centre[0]", "axes[0]"]
        for atoms in (2, 9):
            positions, _ = samples(atoms)
            expected = bonds(positions)
            lengths, centre, axes = called.run(positions)
            torch.testing.assert_close(lengths, expected["bonds"].lengths)
            torch.testing.assert_close(centre, expected["centre"][0])
            assert axes is not None and torch.equal(axes, expected["axes"][0])
        with pytest.raises(c_library.Failed, match="bonds is of kind function; only a module has a forward"):
            called.forward(samples(4)[0])
    function = abn.load(hosted()).function("bonds")
    with pytest.raises(abn.InputError, match="positions has size 2 in dimension 1"):
        function(np.zeros((4, 2)))
    with pytest.raises(
        abn.PackageError,
        match=r"expected a function entry 'energy', got grad 'energy', function 'bonds'\. Call load\(path\)\.grad",
    ):
        abn.load(hosted()).function("energy")
    handle = ctypes.c_void_p()
    with c_library.opened(hosted()) as opened:
        assert library().aotb_get(opened.handle, b"nonsuch", ctypes.byref(handle)) == NAME
        assert b"it has energy (grad), bonds (function)" in library().aotb_error()


@golden_files.needed
def test_parameters_have_the_names_of_pytorch() -> None:
    step, theirs = abn.load(STEP, unchecked=True).step(), load(STEP).step()
    names = {*theirs.parameters, *theirs.buffers}
    assert names < {*step.parameters}
    assert {n for n in step.parameters if n not in names} > {"numbers", "optimizer.exp_avg.0.weight"}
    with pytest.raises(abn.PackageError, match=r"no state 'module\.0\.weight'"):
        step._function.state("module.0.weight")


@golden_files.needed
def test_a_parameter_with_the_name_of_an_optimizer_state(tmp_path: Path) -> None:
    """The parameter has the name; the state that the step adds gets another one."""
    text = json.dumps(spoiling.parts(STEP).manifest).replace('"optimizer.exp_avg.3.bias"', '"3.bias"')

    def change(manifest: Any) -> None:
        manifest.update(json.loads(text))

    path = rewritten(STEP, tmp_path / "x.pt2", change)
    mine, theirs = abn.load(path, unchecked=True).step(), load(STEP).step()
    assert mine.parameters["3.bias"].any() and not mine.parameters["step/3.bias"].any()
    x, y = step_samples(8)
    mine(x, y)
    theirs(x, y)
    np.testing.assert_allclose(mine.parameters["3.bias"], theirs.parameters["3.bias"].detach(), rtol=1e-5)
    mine.save(tmp_path / "mine.state")
    assert theirs.resume(tmp_path / "mine.state") is None
    bias = theirs.parameters["3.bias"]
    state = theirs.state_dict()["optimizer"]["state"]
    assert any(
        np.array_equal(s["exp_avg"], mine.parameters["step/3.bias"])
        for s in state.values()
        if s["exp_avg"].shape == bias.shape
    )
    mine.resume(tmp_path / "mine.state")


def test_results_have_the_callers_structure() -> None:
    package, (positions, kinds) = abn.load(hosted()), samples(7)
    found, expected = package.function()(positions), bonds(positions)
    assert (
        list(found) == list(expected)
        and found["atoms"] == 7
        and type(found["axes"]) is list
        and type(found["centre"]) is tuple
    )
    assert type(found["bonds"]).__name__ == "Bonds"
    assert type(found["bonds"]) is type(package.function()(positions)["bonds"])
    assert found["bonds"].stiff == 2.5
    np.testing.assert_allclose(found["bonds"].lengths, expected["bonds"].lengths)
    (value, more), gradients = package.grad()(positions, kinds)
    # wrt was a list
    assert list(more) == ["energies", "charges"] and more["charges"][1] is None and list(gradients) == ["positions"]
    np.testing.assert_allclose(value, more["energies"].sum())
    np.testing.assert_allclose(gradients["positions"], load(hosted()).grad()(positions, kinds)[1]["positions"])
    with c_library.function(hosted(), "energy", "standalone") as called:
        assert [n for n, _ in called.describe(c_library.OUTPUTS)] == ["output[0]", "energies", "charges[0]"]
        size = ctypes.c_int64()
        assert (
            library().aotb_size(called.handle, b"s0", ctypes.byref(size)) == INPUT
            and b"call it first" in library().aotb_error()
        )
        called.run(positions, kinds)
        c_library.check(library().aotb_size(called.handle, b"2*s0 + 1", ctypes.byref(size)))
        assert size.value == 15
        assert library().aotb_size(called.handle, b"s0 +", ctypes.byref(size)) == INPUT
        assert library().aotb_structure(called.handle, 1) is None and b"no variant 1" in library().aotb_error()
        assert json.loads(library().aotb_structure(called.handle, 0))["children"][1]["children"] == [
            {"kind": "tensor", "index": 3}
        ]


@golden_files.needed
@pytest.mark.parametrize(
    "tree",
    [
        {"kind": "tensor", "index": 3},
        {"kind": "tensor", "index": -1},
        {"kind": "tensor"},
        {"kind": "set", "children": []},
        {"kind": "dict", "keys": ["a"], "children": []},
        {"kind": "namedtuple", "type_name": "x.class", "keys": [], "children": []},
        {"kind": "namedtuple", "type_name": "x.A", "keys": ["import os"], "children": [{"kind": "tensor", "index": 0}]},
    ],
    ids=str,
)
def test_a_structure_that_lies_is_refused(tree: dict[str, Any], tmp_path: Path) -> None:
    def change(manifest: Any) -> None:
        for variant in manifest["entries"]["loss"]["variants"]:
            variant.update(out_tree={"kind": "tuple", "children": [tree]})

    loss = abn.load(rewritten(PAIR, tmp_path / "x.pt2", change), unchecked=True).grad()
    with pytest.raises(abn.PackageError, match="structure of the results"):
        loss(np.zeros((4, 3), "f"))


@golden_files.needed
def test_variants_with_other_numbers_of_results(tmp_path: Path) -> None:
    """The first variant gives fewer results than the second."""

    def change(manifest: Any) -> None:
        variants = manifest["entries"]["loss"]["variants"]
        more = copy.deepcopy(variants[0])
        variants[0]["symbols"][0]["maximum"] = 4
        more["outputs"].append(more["outputs"][0])
        more["gradient"]["outputs"].append(more["gradient"]["outputs"][0])
        more["out_tree"] = {
            "kind": "list",
            "children": [{"kind": "tensor", "index": 0}, {"kind": "tensor", "index": 1}],
        }
        variants.append(more)

    path, theirs = rewritten(PAIR, tmp_path / "x.pt2", change), load(PAIR).grad()
    loss = abn.load(path, unchecked=True).grad()
    for rows in (3, 6, 4, 5):
        x = torch.randn(rows, 3)
        value, gradients = loss(x)
        expected, wanted = theirs(x)
        np.testing.assert_allclose(value, [expected] * 2 if rows > 4 else expected, rtol=1e-6)
        np.testing.assert_allclose(gradients["x"], wanted["x"], rtol=1e-6, atol=1e-6)
    with pytest.raises(
        abn.InputError, match=r"out: the variants return different structures\. Select one by use_variant"
    ):
        loss(np.zeros((4, 3), "f"), out=(None, {}))
    receiver = np.zeros((3, 3), "f")
    assert loss.use_variant(0)(np.ones((3, 3), "f"), out=(None, {"x": receiver}))[1]["x"] is receiver and receiver.any()
