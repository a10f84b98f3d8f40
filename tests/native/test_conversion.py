"""Arguments of other dtypes and kinds, arrays that receive results, and scaled gradients."""

from __future__ import annotations

import ctypes
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import aot_backward_native as abn
import numpy as np
import pytest
import torch

from ..support import c_library, golden_files
from ..support.c_library import GRADIENTS, INPUT, NAME, DLTensor, dl_tensor, library, tensor_of
from ..support.golden_packages import arguments
from ..support.golden_packages import samples as step_samples
from .test_structure import PAIR, STEP, hosted, rewritten, samples

pytestmark = golden_files.needed


def converting(called: c_library.Function) -> c_library.Function:
    c_library.check(library().aotb_convert(called.handle, 1))
    return called


FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


@pytest.mark.parametrize("given", [*FLOATS, *INTEGERS, torch.bool], ids=str)
def test_other_dtypes_are_converted(given: torch.dtype) -> None:
    """The float64 input takes every real dtype, the int64 input every integer dtype; eager's ``to`` gives the expected
    values."""
    positions, kinds = samples(6)
    x = (3 * positions).to(torch.bool if given == torch.bool else given if given in FLOATS else torch.int8).to(given)
    others = kinds.to(given) if given in INTEGERS else kinds
    with c_library.function(hosted(), "energy", "standalone") as called:
        if given != torch.float64:
            with pytest.raises(c_library.Failed, match=rf"positions: expected float64, got {str(given)[6:]}\."):
                called.run(x, kinds)
        converting(called)
        found, expected = called.run(x.t().contiguous().t(), others), called.run(x.to(torch.float64), kinds)
        assert all(f is not None and e is not None and torch.equal(f, e) for f, e in zip(found, expected, strict=True))


DTYPES = [*FLOATS, *INTEGERS, torch.bool, torch.complex64, torch.complex128]


@pytest.mark.parametrize("wanted", DTYPES, ids=str)
def test_every_conversion_gives_what_eager_gives(wanted: torch.dtype, tmp_path: Path) -> None:
    """The entry returns its input, which was converted to the dtype that it declares."""

    def change(manifest: Any) -> None:
        entry = manifest["entries"]["loss"]
        entry.update(wrt=[], names=[])
        for variant in entry["variants"]:
            variant["inputs"][0]["dtype"] = str(wanted)[6:]
            variant.update(
                outputs=variant["inputs"],
                out_tree={"kind": "tensor", "index": 0},
                gradient={"call": None, "outputs": ["input:0"]},
            )

    numbers = torch.tensor(
        [0.1, -7.9, 100.3, 1 / 3, -0.0, 65.47, 3e-6, 1.0, 1.00390625, 1.01171875, 2.7, 5.5], dtype=torch.float64
    ).view(4, 3)
    with c_library.function(rewritten(PAIR, tmp_path / "x.pt2", change), "loss") as loss:
        for given in DTYPES:
            whole = wanted in (*INTEGERS, torch.bool) or given in (*INTEGERS, torch.bool)
            x = (numbers.abs() if whole else numbers).to(given)
            allowed = (
                given == wanted
                or (given in FLOATS and (wanted in FLOATS or wanted.is_complex))
                or (given.is_complex and wanted.is_complex)
            )
            if allowed or (given in (*INTEGERS, torch.bool) and wanted != torch.bool):
                assert torch.equal(converting(loss).run(x)[0], x.to(wanted)), given  # type: ignore[arg-type]
            else:
                with pytest.raises(
                    c_library.Failed,
                    match=rf"x: expected {str(wanted)[6:]}, got {str(given)[6:]}\. .* are not converted to",
                ):
                    converting(loss).run(x)


def test_conversions_to_narrower_dtypes_round_as_in_eager() -> None:
    x = torch.cat(
        [
            torch.randn(60, 3, dtype=torch.float64),
            torch.tensor([[1e300, -0.0, math.nan], [1e-46, 3.0, math.inf]], dtype=torch.float64),
        ]
    )
    with c_library.function(PAIR, "loss") as loss:
        for given in (x, x.half(), x.bfloat16()):
            found, expected = converting(loss).run(given), loss.run(given.float())
            assert all(
                torch.equal(f.nan_to_num(), e.nan_to_num())
                for f, e in zip(found, expected, strict=True)
                if f is not None and e is not None
            )


@pytest.mark.parametrize(
    ("kinds", "words"),
    [
        (
            torch.ones(6),
            r"kinds: expected int64, got float32\. Floating-point numbers are not converted to integers: round them first",
        ),
        (
            torch.ones(6, dtype=torch.complex64),
            r"kinds: expected int64, got complex64\. Complex numbers are not converted to real ones",
        ),
    ],
)
def test_conversions_that_lose_more_than_digits_are_refused(kinds: torch.Tensor, words: str) -> None:
    positions, right = samples(6)
    with c_library.function(hosted(), "energy", "standalone") as called:
        for _ in range(2):
            with pytest.raises(c_library.Failed, match=words) as caught:
                called.run(positions, kinds)
            assert caught.value.status == INPUT
            converting(called)
        with pytest.raises(c_library.Failed, match=r"positions: expected float64, got complex128\. Complex numbers"):
            called.run(positions + 1j, right)
    energy = abn.load(hosted()).grad(cast=True)
    with pytest.raises(abn.InputError, match=r"kinds: expected numbers that fit int64, got 9223372036854775809\."):
        energy(positions, np.full(6, 2**63 + 1, "uint64"))


def test_an_integer_that_does_not_fit_is_named(tmp_path: Path) -> None:
    def change(manifest: Any) -> None:
        for variant in manifest["entries"]["energy"]["variants"]:
            variant["inputs"][1]["dtype"] = "int8"
        for library_spec in manifest["libraries"].values():
            for spec in library_spec["inputs"]:
                if spec["dtype"] == "int64":
                    spec["dtype"] = "int8"

    positions, _ = samples(6)
    with c_library.function(rewritten(hosted(), tmp_path / "x.pt2", change), "energy", "standalone") as called:
        for value in (128, -129, 2**40):
            kinds = torch.ones(6, dtype=torch.int64)
            kinds[3] = value
            with pytest.raises(c_library.Failed, match=rf"kinds: expected numbers that fit int8, got {value}\."):
                converting(called).run(positions, kinds)
    energy = abn.load(tmp_path / "x.pt2", unchecked=True).grad()
    with pytest.raises(abn.InputError, match=r"kinds: expected numbers that fit int8, got 128\."):
        energy(positions, [1, 2, 128, 1, 1, 1])


def test_a_variant_of_the_given_dtypes_comes_first(tmp_path: Path) -> None:
    """The first variant is for float64 (it cannot run), the second for float32."""

    def change(manifest: Any) -> None:
        variants = manifest["entries"]["loss"]["variants"]
        variants.append(spoilt := {**variants[0], "inputs": [{**variants[0]["inputs"][0]}]})
        variants[0], variants[1] = spoilt, variants[0]
        spoilt["inputs"][0]["dtype"] = "float64"
        spoilt["gradient"] = {"call": None, "outputs": [""], "gradients": []}
        spoilt["outputs"], spoilt["out_tree"], spoilt["gradient"]["outputs"] = [], {"kind": "constant"}, []

    loss, x = abn.load(rewritten(PAIR, tmp_path / "x.pt2", change), unchecked=True).grad(cast=True), np.ones((4, 3))
    assert loss(x.astype("f"))[0].dtype == np.float32 and loss._function.served == 1
    assert loss(x)[0] is None and loss._function.served == 0
    loss.use_variant(1)
    assert loss(x)[0].dtype == np.float32 == loss(x.astype("f2"))[0].dtype


class Interface:
    """An array that only NumPy takes."""

    def __init__(self, array: np.ndarray[Any, Any]):
        self.array = array

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray[Any, Any]:
        return self.array


def test_arrays_that_numpy_takes() -> None:
    positions, kinds = (t.numpy() for t in samples(6))
    energy, casting = abn.load(hosted()).grad(), abn.load(hosted()).grad(cast=True)
    (expected, _), _ = energy(positions, kinds)
    for given in (
        positions.tolist(),
        tuple(map(tuple, positions)),
        positions.astype(">f8"),
        Interface(positions),
        positions[::-1].copy()[::-1],
    ):
        for other in (kinds, kinds.tolist(), kinds.astype(">i8")):
            assert energy(given, other)[0][0] == expected
    assert casting(positions.astype("g"), kinds.astype(">i2"))[0][0] == expected
    whole = casting(positions.round().astype(">i4"), kinds)
    assert (
        whole[0][0]
        == energy(positions.round(), kinds)[0][0]
        == energy(positions.round().astype(int).tolist(), kinds)[0][0]
    )
    module = abn.load(PAIR, unchecked=True).module()
    x, more = arguments()
    first = module.forward(x.detach().tolist(), more["bias"].tolist())
    gradient = module.backward(np.ones_like(first["out"]).tolist(), None)
    module.forward(x.detach(), more["bias"])
    assert all(
        np.array_equal(g, gradient[n])
        for n, g in module.backward(np.ones_like(first["out"]), None).items()
        if g is not None
    )
    module.forward(x.detach(), more["bias"])
    with pytest.raises(abn.InputError, match=r"expected float32, got float64\. Convert it"):
        module.backward(np.ones((4, 3)), None)
    casting_module = abn.load(PAIR, unchecked=True).module(cast=True)
    casting_module.forward(x.detach().double(), more["bias"])
    assert np.array_equal(casting_module.backward(np.ones((4, 3)), None)["x"], gradient["x"])


@pytest.mark.parametrize(
    ("positions", "kinds", "words"),
    [
        ([[1.0, 2.0], [3.0]], [1], r"positions: expected an array of float64, got list: "),
        (np.ones((2, 3), ">f4"), [1, 1], r"positions: expected float64, got float32\. Convert it"),
        (
            np.ones((2, 3), "g"),
            [1, 1],
            r"positions: expected float64, got float128\. Convert it, or let the function do it: cast=True",
        ),
        (np.ones((2, 3)), [1.5, 1.5], r"kinds: expected int64, got float64\. Floating-point numbers"),
        (np.ones((2, 3)), None, r"kinds: expected int64, got NoneType of dtype object\. Pass an array of numbers"),
        (np.ones((2, 3)), ["a"], r"kinds: expected int64, got list of dtype str32"),
        ([[1.0, 2.0]] * 2, [1, 1], r"positions has size 2 in dimension 1; expected 3"),
    ],
    ids=str,
)
def test_arrays_that_numpy_does_not_take_are_named(positions: Any, kinds: Any, words: str) -> None:
    with pytest.raises(abn.InputError, match=words):
        abn.load(hosted()).grad()(positions, kinds)


def test_lists_without_numpy() -> None:
    program = """
import sys
sys.modules["numpy"] = None
import aot_backward_native as abn
loss = abn.load(sys.argv[1], unchecked=True).grad()
try:
    loss([[1.0, 2.0, 3.0]] * 2)
except abn.InputError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program, str(PAIR)], capture_output=True, text=True, check=True)
    assert (
        done.stdout
        == "x: expected an array (buffer protocol or DLPack), got list. To pass lists and other arrays, install NumPy.\n"
    )


def test_results_go_into_arrays_of_the_caller() -> None:
    package, (positions, kinds) = abn.load(hosted()), samples(6)
    energy = package.grad()
    (value, more), gradients = energy(positions, kinds)
    forces = np.full((12, 3), np.nan)[::2]
    energies = torch.full((5,), math.nan, dtype=torch.float64)
    total = np.zeros(())
    result = energy(positions, kinds, out=((total, {"energies": energies}), {"positions": forces}))
    assert result[0][0] is total and result[0][1]["energies"] is energies and result[1]["positions"] is forces
    assert (
        total == value and np.array_equal(energies, more["energies"]) and np.array_equal(forces, gradients["positions"])
    )
    assert np.array_equal(result[0][1]["charges"][0], more["charges"][0])
    lengths = np.zeros(5)
    found = package.function()(positions, out={"bonds": (lengths, None)})
    assert found["bonds"].lengths is lengths and lengths.any() and found["atoms"] == 6
    module, (x, others) = abn.load(PAIR, unchecked=True).module(), arguments()
    out, into = np.zeros((4, 3), "f"), np.zeros((3, 3), "f")
    assert module.forward(x.detach(), others["bias"], out={"out": out})["out"] is out and out.any()
    assert module.backward(np.ones_like(out), None, out={"first.weight": into})["first.weight"] is into and into.any()
    step, loss = abn.load(STEP, unchecked=True).step(), np.zeros((), "f")
    assert step(*step_samples(8), out=loss) is loss and loss > 0


@pytest.mark.parametrize(
    ("out", "error", "words"),
    [
        (
            lambda: np.zeros((5, 3)),
            abn.InputError,
            r"the tensor for positions: expected float64 of shape \(6, 3\).*got float64 of shape \(5, 3\)",
        ),
        (
            lambda: np.zeros((6, 3), "f"),
            abn.InputError,
            r"the tensor for positions: expected float64 .*got float32 of shape \(6, 3\)",
        ),
        (lambda: np.zeros((6, 3), ">f8"), TypeError, "byte order"),
        (lambda: [0.0] * 18, TypeError, r"out: expected an array .* got <class 'list'>"),
        (
            lambda: np.broadcast_to(0.0, (6, 3)),
            abn.InputError,
            r"out\[1\]\['positions'\]: expected an array that can be written, got a read",
        ),
    ],
)
def test_arrays_that_cannot_take_a_result(out: Any, error: type[Exception], words: str) -> None:
    energy, given = abn.load(hosted()).grad(), samples(6)
    with pytest.raises(error, match=words):
        energy(*given, out=(None, {"positions": out()}))
    for structure, message in (
        (3, r"out: expected a tuple of 2 arrays, got int\. Put None"),
        (
            (None, {"x": None}),
            r"out\[1\]: expected a dict with keys of \['positions'\], got a dict with the keys \['x'\]",
        ),
        (((None,), None), r"out\[0\]: expected a tuple of 2 arrays, got tuple of 1"),
    ):
        with pytest.raises(abn.InputError, match=message):
            energy(*given, out=structure)


def test_a_step_checks_its_results_before_it_updates() -> None:
    step = abn.load(STEP, unchecked=True).step()
    before = step.parameters["0.weight"].copy()
    with pytest.raises(abn.InputError, match=r"output\[0\]"):
        step(*step_samples(8), out=np.zeros(3, "f"))
    assert step.count == 0 and np.array_equal(step.parameters["0.weight"], before)


def test_gradients_are_scaled() -> None:
    package, given = abn.load(hosted()), samples(6)
    expected = package.grad()(*given)[1]["positions"]
    forces = package.grad(scale={"positions": -1})
    into = np.zeros((6, 3))
    assert np.array_equal(forces(*given)[1]["positions"], -expected)
    assert np.array_equal(forces(*given, out=(None, {"positions": into}))[1]["positions"], -expected)
    with pytest.raises(abn.PackageError, match="entry energy has no gradient 'forces'; it has positions"):
        package.grad(scale={"forces": -1})
    with pytest.raises(abn.InputError, match="factor of positions: expected a finite number, got nan"):
        package.grad(scale={"positions": math.nan})


def test_gradients_of_a_module_are_scaled() -> None:
    x, more = arguments()
    plain, scaled = (abn.load(PAIR, unchecked=True).module(scale=s) for s in (None, {"first.weight": 0.5}))
    out = [m.forward(x.detach(), more["bias"])["out"] for m in (plain, scaled)]
    assert np.array_equal(*out)
    one, other = (m.backward(np.ones_like(out[0]), None) for m in (plain, scaled))
    assert np.array_equal(one["first.weight"] * np.float32(0.5), other["first.weight"])
    assert np.array_equal(one["x"], other["x"])


def test_scaled_gradients_in_c_belong_to_the_function_and_leave_other_results_alone(tmp_path: Path) -> None:
    """Both gradients and the output are the same result of the library, so a result in place would be scaled again."""

    def change(manifest: Any) -> None:
        for variant in manifest["entries"]["energy"]["variants"]:
            source = variant["gradient"]["gradients"][0]["source"]
            variant["outputs"][1] = {**variant["inputs"][0], "name": "copy"}
            variant["gradient"]["outputs"][1] = source

    positions, kinds = samples(6)
    with c_library.function(rewritten(hosted(), tmp_path / "x.pt2", change), "energy", "standalone") as called:
        _, expected, _, gradient = called.run(positions, kinds)
        assert gradient is not None and torch.equal(gradient, expected)  # type: ignore[arg-type]
        c_library.check(library().aotb_scale(called.handle, b"positions", ctypes.c_double(-2)))
        results, given = (DLTensor * 4)(), (DLTensor * 2)(dl_tensor(positions), dl_tensor(kinds))
        for _ in range(3):
            c_library.check(library().aotb_run(called.handle, given, 2, results, 4))
            assert torch.equal(tensor_of(results[1]), gradient) and torch.equal(tensor_of(results[3]), -2 * gradient)  # type: ignore[arg-type]
        forces = tensor_of(results[3])
        again = (DLTensor * 2)(results[3], dl_tensor(kinds))  # an input in a result of the last call
        c_library.check(library().aotb_run(called.handle, again, 2, results, 4))
        assert torch.equal(tensor_of(results[3]), called.run(forces, kinds)[3])  # type: ignore[arg-type]
        own = (DLTensor * 4)()
        own[3] = results[3]
        own[3].shape, own[3].strides = (ctypes.c_int64 * 2)(6, 3), None
        assert (
            library().aotb_run(called.handle, given, 2, own, 4) == INPUT
            and b"lies in a result of an earlier call" in library().aotb_error()
        )
        assert library().aotb_scale(called.handle, b"nonsuch", ctypes.c_double(1)) == NAME
        assert called.describe(GRADIENTS) == [("positions", ("s0", "3"))]
        c_library.check(library().aotb_scale(called.handle, b"positions", ctypes.c_double(1)))
        assert torch.equal(called.run(positions, kinds)[3], gradient)  # type: ignore[arg-type]
