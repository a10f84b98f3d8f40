"""``aot_backward_native``: packages from Python without PyTorch and NumPy, and with either."""

from __future__ import annotations

import array
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import aot_backward_native as abn
import numpy as np
import pytest
import torch

from aot_backward_runtime import load

from ..support import golden_files
from ..support.golden_packages import arguments, samples

pytestmark = golden_files.needed
PAIR, STEP = (golden_files.FOLDER / f"{name}.pt2" for name in ("1.0-pair", "1.2-step"))


def alone(program: str, *arguments: object) -> str:
    """Return the output of a program in a separate process."""
    argv = [sys.executable, "-W", "error", "-c", program, *map(str, arguments)]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_imports_neither_numpy_nor_torch() -> None:
    program = """
import array, sys
import aot_backward_native as abn
loss = abn.load(sys.argv[1], unchecked=True).grad()
x = memoryview(array.array("f", range(12))).cast("B").cast("f", (4, 3))
value, gradients = loss(x)
assert value.shape == () and value.dtype == "float32"
assert memoryview(gradients["x"]).shape == (4, 3) and list(gradients) == ["x", "net.first.weight"]
assert not {"numpy", "torch"} & set(sys.modules)
print(memoryview(value).tolist(), memoryview(gradients["x"]).tolist())
"""
    package = load(PAIR)
    x = torch.arange(12.0).view(4, 3)
    value, gradients = package.grad()(x)
    found_value, found_gradient = eval(alone(program, PAIR).replace("] ", "],").replace(" [[", ",[["))
    assert found_value == pytest.approx(value.item(), rel=1e-6)
    torch.testing.assert_close(torch.tensor(found_gradient), gradients["x"])


def test_arrays_of_every_kind() -> None:
    loss = abn.load(PAIR, unchecked=True).grad()
    x = torch.randn(4, 3)
    value, gradients = loss(x)
    assert isinstance(value, np.ndarray) and gradients["x"].shape == (4, 3) and gradients["x"].dtype == np.float32
    for given in (x.numpy(), memoryview(x.numpy())):
        again, others = loss(given)
        assert again == value and np.array_equal(others["x"], gradients["x"])
    assert np.array_equal(loss(x=x.numpy())[1]["x"], gradients["x"])


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda f: f(object()), abn.InputError, "x: expected float32, got object of dtype object"),
        (
            lambda f: f(np.zeros((4, 3))),
            abn.InputError,
            r"x: expected float32, got float64\. Convert it, or let .* in Python cast=True",
        ),
        (lambda f: f(np.zeros((4, 2), "f")), abn.InputError, "x has size 2 in dimension 1; expected 3"),
        (lambda f: f(np.zeros(4, dtype="U3")), abn.InputError, "x: expected float32, got ndarray of dtype str96"),
        (lambda f: f(), abn.InputError, "0 inputs; expected 1"),
        (lambda f: f(y=1), abn.InputError, "no argument 'y'"),
        (lambda f: f(torch.zeros(4, 3, requires_grad=True)), BufferError, "require gradient"),
    ],
)
def test_bad_arguments_are_named(call: Any, error: type[Exception], words: str) -> None:
    loss = abn.load(PAIR, unchecked=True).grad()
    with pytest.raises(error, match=words):
        call(loss)
    assert loss(np.zeros((4, 3), "f"))[0].shape == ()


def test_errors_have_the_names_of_the_runtime(tmp_path: Path) -> None:
    import aot_backward_runtime.errors as of_torch

    for error in (
        abn.PackageError,
        abn.IncompatibleError,
        abn.SignatureError,
        abn.InputError,
        abn.ExecutionError,
        abn.StateError,
    ):
        assert issubclass(error, abn.AotBackwardError) and hasattr(of_torch, error.__name__)
    with pytest.raises(abn.PackageError, match="No such file"):
        abn.load(tmp_path / "nothing.pt2")
    (tmp_path / "cut.pt2").write_bytes(PAIR.read_bytes()[:5000])
    with pytest.raises(abn.PackageError, match="end record"):
        abn.load(tmp_path / "cut.pt2")
    with pytest.raises(abn.SignatureError, match=r"key\.pem cannot be read"):
        abn.load(PAIR, public_key=tmp_path / "key.pem")
    with pytest.raises(abn.IncompatibleError, match="no backend 'nothing'"):
        abn.load(PAIR, backend="nothing")
    with pytest.raises(abn.PackageError, match="expected a step entry 'fit', got module 'pair', grad 'loss'"):
        abn.load(PAIR).step("fit")
    with pytest.raises(
        abn.PackageError,
        match=r"1\.0-pair\.pt2: expected a step entry, got module 'pair', grad 'loss'\. Call load\(path\)\.module\('pair'\) or load\(path\)\.grad",
    ):
        abn.load(PAIR).step()
    assert abn.load(PAIR).entries == {"pair": "module", "loss": "grad"}


def test_a_module_and_its_backward() -> None:
    module, loaded = abn.load(PAIR, unchecked=True).module(), load(PAIR).module()
    x, more = arguments()
    expected = loaded(x, more)
    result = module.forward(x.detach(), more["bias"])
    (out, h), empty = (result["out"], result["h"][0]), result["h"][1]
    assert list(result) == ["out", "h", "rows"] and result["rows"] == len(x) and empty is None
    torch.testing.assert_close(torch.from_numpy(out), expected["out"].detach())
    (expected["out"].sum() + 2 * expected["h"][0].sum()).backward()
    found = module.backward(np.ones_like(out), np.full_like(h, 2))
    torch.testing.assert_close(torch.from_numpy(found["x"]), x.grad)
    torch.testing.assert_close(torch.from_numpy(found["first.weight"]), loaded.get_parameter("first.weight").grad)
    assert module.state["calls"] == 1
    module.state["scale"][:] = 0
    assert not module(x.detach(), more["bias"])["h"][0].any()  # inference reads the written value


def test_a_training_goes_on_in_either_runtime(tmp_path: Path) -> None:
    mine, theirs = abn.load(STEP, unchecked=True).step(), load(STEP).step()
    for rows in (8, 5, 17):
        x, y = samples(rows)
        assert mine(x, y) == pytest.approx(theirs(x, y).item(), rel=1e-5)
        mine.param_groups[0]["lr"] = theirs.param_groups[0]["lr"] = theirs.param_groups[0]["lr"] * 1.5
    assert dict(mine.param_groups[0])["lr"] == theirs.param_groups[0]["lr"] and mine.clipping["clip_norm"] == 0.5
    assert mine.grad_norm == pytest.approx(theirs.grad_norm.item(), rel=1e-4)
    assert (mine.count, mine.skipped, mine.accumulated) == (3, 0, 0)
    x, y = samples(8)
    x[0, 0] = np.inf
    mine(x, y), theirs(x, y)
    assert (mine.count, mine.skipped) == (theirs.count, theirs.skipped) == (3, 1)
    mine.save(tmp_path / "a.state", {"epoch": 2})
    assert theirs.resume(tmp_path / "a.state") == {"epoch": 2}
    assert all(np.array_equal(mine.parameters[n], p.detach().numpy()) for n, p in theirs.parameters.items())
    mine(*samples(6), update=False)
    assert mine.accumulated == 1
    mine.step()
    theirs(*samples(6), update=False)
    theirs.step()
    theirs.save(tmp_path / "b.state")
    assert mine.resume(tmp_path / "b.state") is None and mine.count == 4
    with pytest.raises(abn.InputError, match="no number 'speed'"):
        mine.param_groups[0]["speed"] = 1
    with pytest.raises(abn.StateError):
        mine.resume(PAIR)


def test_results_and_states_outlive_what_made_them() -> None:
    step = abn.load(STEP, unchecked=True).step()
    weight, loss = step.parameters["0.weight"], step(*samples(8))
    kept = loss.copy()
    del step
    junk = [abn.load(STEP, unchecked=True).step()(*samples(5)) for _ in range(3)]
    assert len(junk) == 3 and loss == kept and np.isfinite(weight).all()


def test_one_caller_at_a_time_and_several_functions_side_by_side() -> None:
    package, x = abn.load(PAIR, unchecked=True), np.ones((64, 3), "f")
    functions = [package.grad() for _ in range(4)]
    expected = functions[0](x)[1]["x"]
    busy, wrong = [], []

    def call(function: abn.Grad) -> None:
        for _ in range(300):
            try:
                if not np.array_equal(function(x)[1]["x"], expected):
                    wrong.append(1)
            except abn.InputError as error:
                busy.append(str(error))

    for ours in (functions, functions[:1] * 4):
        threads = [threading.Thread(target=call, args=(f,)) for f in ours]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        if ours is functions:
            assert not busy
    assert not wrong and all("another thread" in words for words in busy)


@pytest.mark.parametrize("first", ["standalone", "torch"])
def test_torch_and_standalone_in_one_process_whichever_comes_first(first: str) -> None:
    program = """
import array, sys
import aot_backward_native as abn
x = memoryview(array.array("f", range(12))).cast("B").cast("f", (4, 3))
def standalone():
    return memoryview(abn.load(sys.argv[1], backend="standalone", unchecked=True).grad()(x)[0]).tolist()
def eager():
    import torch
    from aot_backward_runtime import load
    return load(sys.argv[1]).grad()(torch.arange(12.0).view(4, 3))[0].item()
def libtorch():
    return memoryview(abn.load(sys.argv[1], backend="libtorch", unchecked=True).grad()(x)[0]).tolist()
order = [standalone, eager, libtorch, standalone] if sys.argv[2] == "standalone" else [eager, standalone, libtorch, eager]
print(*(f() for f in order))
"""
    values = list(map(float, alone(program, PAIR, first).split()))
    assert len(values) == 4 and values == pytest.approx([values[0]] * 4, rel=1e-6)


def test_where_its_files_are_and_a_program_built_by_them(tmp_path: Path) -> None:
    (tmp_path / "main.c").write_text(
        '#include <aot_backward.h>\n#include <stdio.h>\nint main(void) { aotb_package *p; printf("%d", aotb_open("nothing.pt2", NULL, &p)); }\n'
    )
    pc = Path(abn.library_dir()) / "pkgconfig" / "aot_backward.pc"
    text = pc.read_text()
    values = {
        k: v
        for k, _, v in (
            line.partition("=") for line in text.splitlines() if "=" in line and ":" not in line.partition("=")[0]
        )
    }
    prefix = values["prefix"].replace("${pcfiledir}", str(pc.parent))
    flags = [
        f
        for line in text.splitlines()
        if line.startswith(("Cflags", "Libs"))
        for f in line.partition(": ")[2].replace("${prefix}", prefix).split()
    ]
    subprocess.run(["gcc", "main.c", "-o", "main", *flags], cwd=tmp_path, check=True)
    assert subprocess.run([tmp_path / "main"], capture_output=True, text=True, cwd=tmp_path).stdout == "1"
    assert (Path(abn.include_dir()) / "aot_backward.h").exists()
    assert (Path(abn.cmake_dir()) / "aot_backward-config.cmake").exists()
    assert array.array("f", [1.0])
