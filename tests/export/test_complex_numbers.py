"""Python complex numbers in programs: outputs, gradients and dtypes equal eager's, also after a rebuild from the
portable graphs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import aot_backward as ab
from aot_backward_runtime import load

pytestmark = pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
WINDOW = torch.hann_window(8)


def _spectrum(z: torch.Tensor) -> torch.Tensor:
    """Run a round trip through the short-time Fourier transform, with rotated phases."""
    window = WINDOW.to(z.dtype.to_real())
    spectrum = torch.stft(torch.view_as_real(z).reshape(1, -1), 8, 4, window=window, return_complex=True)
    turned = torch.polar(spectrum.abs(), spectrum.angle()) * torch.exp(0.1j * spectrum.real)
    return torch.istft(turned, 8, 4, window=window)[:, :16].reshape(4, 4)


def _written(z: torch.Tensor) -> torch.Tensor:
    out = z.masked_fill(z.real > 0, 1j) + torch.where(z.imag > 0, z, 2 - 1j)
    out[0].fill_(1j)
    out[1] = z[1] * torch.full((4,), 3j, dtype=z.dtype)
    return out.scatter(0, torch.zeros(1, 4, dtype=torch.long), 2j)


PROGRAMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "products": lambda z: (z * (0.6 - 0.8j) - 1j) / (1 + 2j) + 1j * z.real + (2 - 1j) / z,
    "differences": lambda z: z - z.mH - torch.sub(z, z.conj(), alpha=1j),
    "exponentials": lambda z: (
        torch.exp(1j * z.real) + z ** (1 + 2j) + z ** (2 + 0j) + (1 + 2j) ** z + z.real.abs() ** (0.5j)
    ),
    "scalars": lambda z: z[0, 0] * 0.6 + z[1, 1] * (1 + 2j) + 1j * z[0, 1].real + z[0, 0] / 2.0 + z[1, 0] ** (1 + 1j),
    "integers": lambda z: (torch.arange(4) * 1j) * z + (z.real == 1j),
    "double": lambda z: 1j * z.real.double() + z,
    "phases": lambda z: torch.sgn(z * 1j) * z.angle() + torch.view_as_complex(2 * torch.view_as_real(z)) * 1j,
    "matrices": lambda z: torch.addmm(z, z, z.mH, alpha=1j, beta=2 - 1j) + torch.addcmul(z, z, z, value=1j),
    "spectrum": _spectrum,
    "frequencies": lambda z: (
        torch.fft.fft(z) * torch.exp(-2j * torch.pi * torch.arange(4) / 4) + torch.fft.irfft(z * 1j, n=4)
    ),
    "written": _written,
    "decided": lambda z: torch.cond(z.real.sum() > 0, lambda a: a * 1j, lambda a: a * (2 - 1j), (z,)),
}


class Programs(nn.Module):
    def forward(self, z: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: program(z) for name, program in PROGRAMS.items()}


def _loss(z: torch.Tensor) -> torch.Tensor:
    return (1j * (z - z.conj() * (1 + 1j))).abs().square().sum()


class Rotated(nn.Module):
    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.w = nn.Parameter(torch.ones(4, dtype=dtype.to_real()))

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return ((self.w - 1j) * z * torch.exp(0.5j * z.real)).abs().square().mean()


def _sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def _compare(package: ab.Package, z: torch.Tensor) -> None:
    leaf = z.clone().requires_grad_()
    torch.testing.assert_close(package.grad()(z)[1], torch.autograd.grad(_loss(leaf), leaf)[0])
    step, eager = package.step(), Rotated(z.dtype)
    optimizer = _sgd(eager)
    for _ in range(3):
        optimizer.zero_grad()
        loss = eager(z)
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(step(z), loss.detach())


def _compare_module(package: ab.Package, z: torch.Tensor) -> None:
    found = []
    for module in (Programs(), package.module()):
        leaf = z.clone().requires_grad_()
        results = module(leaf)
        torch.manual_seed(0)
        gradients = [torch.autograd.grad(r, leaf, torch.randn_like(r), retain_graph=True)[0] for r in results.values()]
        found.append((results, dict(zip(results, gradients, strict=True))))
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_python_numbers_give_eagers_dtypes_and_gradients(dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    z = torch.randn(4, 4, dtype=dtype)
    entries: dict[str, ab.Grad | ab.Step | ab.Module] = {
        "grad": ab.Grad(_loss, [ab.Variant((z,))], wrt="z"),
        "step": ab.Step(rotated := Rotated(dtype), [ab.Variant((z,))], _sgd(rotated)),
    }
    if dtype is torch.complex64:  # one of the programs is in complex128
        entries["module"] = ab.Module(Programs(), [ab.Variant((z.clone().requires_grad_(),))])
    ab.export(tmp_path / "complex.pt2", entries)
    package = load(tmp_path / "complex.pt2")
    _compare(package, z)
    if dtype is torch.complex64:
        _compare_module(package, z)
        ab.rebuild(tmp_path / "complex.pt2", tmp_path / "again.pt2")
        _compare_module(load(tmp_path / "again.pt2"), z)
