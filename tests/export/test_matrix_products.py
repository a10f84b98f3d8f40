"""Large matrix products by MKL and by oneDNN: equal to eager's up to rounding, in each layout, wherever the results are stored."""

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
from torch.export import Dim

import aot_backward as ab
from aot_backward.commands import doctor
from aot_backward_runtime import load

from ..support.exports import shared

PROGRAM = """
import sys, torch
from aot_backward_runtime import load
package, calls = load(sys.argv[1]), torch.load(sys.argv[2])
torch.save({name: [package.grad(name)(*arguments) for arguments in each] for name, each in calls.items()}, sys.argv[3])
"""


WITHOUT_PYTORCH = """
import sys, numpy, aot_backward_native
value, gradients = aot_backward_native.load(sys.argv[1]).grad("layers")(*numpy.load(sys.argv[2]).values())
numpy.savez(sys.argv[3], numpy.asarray(value), numpy.asarray(gradients["x"]))
"""


def layers(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return ((x @ a).tanh() @ b).square().mean()


def expanded(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The incoming gradients of the products are one number, expanded."""
    return (x @ a).sum() + (x @ b.t()).mean()


def parts(x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The products are written into parts of one tensor."""
    joined = torch.cat([x @ a, x @ b.t()], 0)
    return joined.tanh().square().sum(), joined.detach()


def slices(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The rows of left and of right operands are further apart than their length."""
    wide, twice = torch.cat([x, a.t()], 0), torch.cat([a, a.sin()], 1)
    left = (wide[:64] @ a).sin().sum() + (wide[:, :256] @ b).cos().sum() + (wide[64:] @ wide[3:67].t()).tanh().sum()
    return left + (x @ twice[:, 256:]).tanh().sum() + (x[:, :256] @ twice[:, :256].t()).cos().sum()


def returned(x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Products are results, too, and one is read twice."""
    y = x @ a
    return (y.tanh() @ b).sum() + y.square().sum(), (y.detach(), (y @ b).detach())


STATIC: dict[str, Callable[..., Any]] = {f.__name__: f for f in (layers, expanded, parts, slices, returned)}
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
    differ = [any(not torch.equal(a, b) for a, b in zip(flat(m), flat(o), strict=True)) for m, o in zip(*(e["open"] for e in both), strict=True)]
    assert differ == [False, False, True, True]


def test_doctor_names_the_library_that_is_used() -> None:
    (found,) = (finding.found for finding in doctor.examine() if finding.what == "matrix products")
    library = "onednn" if found.startswith("oneDNN") else "mkl"
    static = [[flat(results(used)[name]) for name in STATIC] for used in (library, "")]
    assert all(torch.equal(a, b) for mine, default in zip(*static, strict=True) for a, b in zip(mine, default, strict=True))


def test_an_unknown_library_is_refused() -> None:
    with pytest.raises(subprocess.CalledProcessError) as error:
        results("blis")
    assert "AOT_BACKWARD_PRODUCTS: expected mkl or onednn, got blis" in error.value.stderr


@pytest.mark.parametrize("preloaded", ["", str(Path(torch.__file__).parent / "lib/libtorch_cpu.so")], ids=["alone", "beside PyTorch"])
def test_the_c_library_computes_them_itself(tmp_path: Path, preloaded: str) -> None:
    """PyTorch's functions for oneDNN, which a program linked with it has, are not for the tensors of the C library."""
    path = ab.export(tmp_path / "one.pt2", {"layers": ab.Grad(layers, [ab.Variant(arguments())])}, runtime="standalone")
    (entry,) = load(path).manifest.entries.values()
    assert entry.standalone == "verified"
    numpy.savez(tmp_path / "x.npz", *(a.numpy() for a in arguments()))
    env = {**os.environ, "AOT_BACKWARD_BACKEND": "standalone", "AOT_BACKWARD_PRODUCTS": "onednn", "LD_PRELOAD": preloaded}
    subprocess.run([sys.executable, "-c", WITHOUT_PYTORCH, path, tmp_path / "x.npz", tmp_path / "y.npz"], check=True, env=env)
    value, gradients = numpy.load(tmp_path / "y.npz").values()
    leaves = [a.requires_grad_() for a in arguments()]
    loss = layers(*leaves)
    torch.testing.assert_close(torch.from_numpy(value), loss.detach())
    torch.testing.assert_close(torch.from_numpy(gradients), torch.autograd.grad(loss, leaves)[0], rtol=1e-4, atol=1e-9)
