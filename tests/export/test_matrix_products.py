"""Large matrix products by MKL and by oneDNN: equal to eager's up to rounding, in each layout, wherever the results are
stored."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch._higher_order_ops import scan
from torch.export import Dim

import aot_backward as ab
from aot_backward.commands import doctor
from aot_backward_exporters.toolchain import products
from aot_backward_runtime import compatibility, load

from ..support.exports import shared

# From Dynamo, which scan calls
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

PROGRAM = """
import sys, torch
from aot_backward_runtime import compatibility, load
package, calls = load(sys.argv[1]), torch.load(sys.argv[2])
torch.save({name: [package.grad(name)(*arguments) for arguments in each] for name, each in calls.items()}, sys.argv[3])
"""


WITHOUT_PYTORCH = """
import sys, numpy, aot_backward_native
value, gradients = aot_backward_native.load(sys.argv[1]).grad("recurrent")(*numpy.load(sys.argv[2]).values())
numpy.savez(sys.argv[3], numpy.asarray(value), numpy.asarray(gradients["x"]))
"""


def layers(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return ((x @ a).tanh() @ b).square().mean()


def parts(x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The products are written into parts of one tensor."""
    joined = torch.cat([x @ a, x @ b.t()], 0)
    return joined.tanh().square().sum(), joined.detach()


def slices(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The rows of left and of right operands are further apart than their length; incoming gradients of two products are
    one number, expanded."""
    wide, twice = torch.cat([x, a.t()], 0), torch.cat([a, a.sin()], 1)
    left = (wide[:64] @ a).sin().sum() + (wide[:, :256] @ b).cos().sum() + (wide[64:] @ wide[3:67].t()).tanh().sum()
    right = (x @ twice[:, 256:]).tanh().sum() + (x[:, :256] @ twice[:, :256].t()).cos().sum()
    return left + right + (x @ a).sum() + (x @ b.t()).mean()


def returned(x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Products are results, too, and one is read twice."""
    y = x @ a
    return (y.tanh() @ b).sum() + y.square().sum(), (y.detach(), (y @ b).detach())


def recurrent(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Each step of a loop multiplies 4 rows by one weight of 512 x 512, and each step of the gradient by its
    transpose."""
    weights = [(a @ b).t(), a @ b]
    return (
        torch.rnn_tanh(x.view(16, 4, 512), x.new_zeros(1, 4, 512), weights, False, 1, 0.0, True, False, False)[0]
        .square()
        .mean()
    )


def changing(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The right operand of a loop's products is another one in each step: a part of a tensor, and the result of the
    last step."""
    weights = torch.stack([(a @ b).sin(), a @ b, (a @ b).cos() / 8])
    last, rows = scan(lambda h, weight: ((h @ weight.t()).tanh(), h.sin()), x[:8], weights)
    powers, outputs = scan(lambda y, row: (y * 0.9, row @ y.t()), a @ b, x.view(8, 8, 512))
    return rows.square().mean() + last.square().mean() + powers.sum() + outputs.square().mean()


STATIC: dict[str, Callable[..., Any]] = {f.__name__: f for f in (parts, slices, returned, recurrent, changing)}
ROWS = (1, 64, 2048, 2400)


def arguments(rows: int = 64, inner: int = 512, columns: int = 256) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(rows)
    return torch.randn(rows, inner), torch.randn(inner, columns) / 16, torch.randn(columns, inner) / 16


def calls() -> dict[str, list[tuple[Tensor, ...]]]:
    return {**{name: [arguments()] for name in STATIC}, "open": [arguments(rows, 256) for rows in ROWS]}


def package() -> Path:
    def make(path: Path) -> None:
        entries = {n: ab.Grad(f, [ab.Variant(arguments())], has_aux=f in (parts, returned)) for n, f in STATIC.items()}
        rows = Dim("rows", min=1, max=4096)
        entries["open"] = ab.Grad(layers, [ab.Variant(arguments(64, 256), dynamic_shapes=({0: rows}, None, None))])
        with pytest.MonkeyPatch.context() as patch:  # otherwise the export itself might mend what is wrong
            patch.setenv("AOT_BACKWARD_PRODUCTS", "mkl")
            ab.export(path, entries)

    return shared("matrix-products", make)


@cache
def results(library: str) -> Any:
    """Return all results in a new process, with products by ``library``; "" leaves the choice to the processor."""
    path = package()
    files = [path.with_suffix(f".{name}") for name in ("calls", f"results-{library}")]
    torch.save(calls(), files[0])
    env = {**os.environ, "AOT_BACKWARD_PRODUCTS": library}
    subprocess.run([sys.executable, "-c", PROGRAM, path, *files], check=True, capture_output=True, text=True, env=env)
    return torch.load(files[1])


def flat(value: Any) -> list[Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(value) if isinstance(t, Tensor)]


@pytest.mark.parametrize("library", ["mkl", "onednn"])
@pytest.mark.parametrize("name", [*STATIC, "open"])
def test_equal_to_eager(name: str, library: str) -> None:
    function = STATIC.get(name, layers)
    for each, ours in zip(calls()[name], results(library)[name], strict=True):
        leaves = [a.double().requires_grad_() for a in each]
        value = function(*leaves)
        loss, aux = value if isinstance(value, tuple) else (value, ())
        expected = [loss, *flat(aux), *torch.autograd.grad(loss, leaves)]
        for e, a in zip(expected, flat(ours), strict=True):
            assert a.dtype is torch.float32 and a.is_contiguous()
            torch.testing.assert_close(a.double(), e, rtol=1e-4, atol=3e-6 * float(e.detach().abs().max()))


def test_the_two_libraries_differ_in_rounding_for_large_products_alone() -> None:
    both = [results(library) for library in ("mkl", "onednn")]
    for name in STATIC:
        assert any(not torch.equal(a, b) for a, b in zip(*(flat(each[name]) for each in both), strict=True)), name
    differ = [
        any(not torch.equal(a, b) for a, b in zip(flat(m), flat(o), strict=True))
        for m, o in zip(*(e["open"] for e in both), strict=True)
    ]
    assert differ == [False, False, True, True]


def test_a_loop_keeps_the_layout_of_a_weight() -> None:
    """oneDNN reports what it does."""
    results("onednn")
    files = [package().with_suffix(f".{name}") for name in ("calls", "reported")]
    env = {**os.environ, "AOT_BACKWARD_PRODUCTS": "onednn", "ONEDNN_VERBOSE": "1"}
    lines = subprocess.run(
        [sys.executable, "-c", PROGRAM, package(), *files], check=True, capture_output=True, text=True, env=env
    ).stdout.split("\n")
    steps = [line for line in lines if ",mb4ic512oc512" in line]
    transposed = [line for line in steps if "wei:f32::blocked:ba:" in line]
    assert len(steps) == 32 and len(transposed) == 16  # the gradient's
    assert len([line for line in lines if ",reorder," in line and ",512x512" in line]) == 1


OPERANDS = {
    "input_3": True,  # the loop's own name for ``weight``
    "wrap_with_raii_handle_if_needed(reinterpret_tensor_wrapper(input_3, 2, int_array_1, int_array_2, 4096L))": True,
    # A row for each step
    "wrap_with_raii_handle_if_needed(reinterpret_tensor_wrapper(input_3, 2, int_array_1, int_array_2, 4096L*u0))": False,
    "input_4": False,  # a carry
    "input_5": False,  # computed in an outer loop's step
    "step_buf1": False,
}


@pytest.mark.parametrize("operand", OPERANDS)
def test_only_an_operand_that_no_step_changes_is_kept(operand: str) -> None:
    body = f"""
        AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_assign_tensors_out(weight, &input_3_handle));
        AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_assign_tensors_out(buf3, &input_4_handle));
        RAIIAtenTensorHandle buf4(buf4_handle);
        AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_assign_tensors_out(buf4, &input_5_handle));
        RAIIAtenTensorHandle step_buf1(step_buf1_handle);
        RAIIAtenTensorHandle step_buf2(step_buf2_handle);
        AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_mm_out(step_buf2, input_4, {operand}));
        buf3.reset();
        buf3 = std::move(step_buf2);
"""
    text = products.source(f"namespace torch::aot_inductor {{\n    while (1) {{{body}    }}\n}}\n", 2**23)
    assert (f"product_0(step_buf2, input_4, {operand});" in text) == OPERANDS[operand]
    assert (f"matrix_product(step_buf2, input_4, {operand});" in text) != OPERANDS[operand]


def test_doctor_names_the_library_that_is_used() -> None:
    (found,) = (finding.found for finding in doctor.examine() if finding.what == "matrix products")
    library = "onednn" if found.startswith("oneDNN") else "mkl"
    same = [
        torch.equal(a, b) for a, b in zip(*(flat(results(used)["open"][-1]) for used in (library, "")), strict=True)
    ]
    assert same == [True, True, *[not found.endswith("(AMD Zen 4)")] * 2]  # the last two are gradients of weights
    inspected = subprocess.run(
        [sys.executable, "-m", "aot_backward.cli", "inspect", package()], capture_output=True, text=True, check=True
    ).stdout
    assert "\nNote: matrix products: large float32 ones by MKL or by oneDNN" in inspected


def test_doctor_does_not_name_mkl_on_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch for aarch64 has no MKL."""
    monkeypatch.setattr(compatibility, "processor_vendor", lambda: "")
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    assert [f.found for f in doctor.examine() if f.what == "matrix products"] == ["PyTorch's own"]


def test_an_unknown_library_is_refused() -> None:
    with pytest.raises(subprocess.CalledProcessError) as error:
        results("blis")
    assert "AOT_BACKWARD_PRODUCTS: expected mkl or onednn, got blis" in error.value.stderr


@pytest.mark.parametrize(
    "preloaded", ["", str(Path(torch.__file__).parent / "lib/libtorch_cpu.so")], ids=["alone", "beside PyTorch"]
)
def test_the_c_library_computes_them_itself(tmp_path: Path, preloaded: str) -> None:
    """PyTorch's functions for oneDNN, which a program linked with it has, are not for the tensors of the C library."""
    entries = {"recurrent": ab.Grad(recurrent, [ab.Variant(arguments())])}
    path = ab.export(tmp_path / "one.pt2", entries, runtime="standalone")
    assert load(path).manifest.entries["recurrent"].standalone == "verified"
    numpy.savez(tmp_path / "x.npz", *(a.numpy() for a in arguments()))
    env = {
        **os.environ,
        "AOT_BACKWARD_BACKEND": "standalone",
        "AOT_BACKWARD_PRODUCTS": "onednn",
        "LD_PRELOAD": preloaded,
    }
    subprocess.run(
        [sys.executable, "-c", WITHOUT_PYTORCH, path, tmp_path / "x.npz", tmp_path / "y.npz"], check=True, env=env
    )
    value, gradients = numpy.load(tmp_path / "y.npz").values()
    leaves = [a.requires_grad_() for a in arguments()]
    loss = recurrent(*leaves)
    torch.testing.assert_close(torch.from_numpy(value), loss.detach())
    torch.testing.assert_close(torch.from_numpy(gradients), torch.autograd.grad(loss, leaves)[0], rtol=1e-4, atol=1e-9)
