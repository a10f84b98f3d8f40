"""``examples/fortran``: a Fortran program's gradient, module and training equal those of Python's runtime and of eager
PyTorch."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import aot_backward as ab

from ..support import c_library

EXAMPLE = Path(__file__).parents[2] / "examples" / "fortran"

if shutil.which("gfortran") is None:
    pytest.skip("gfortran is not installed: apt-get install gfortran", allow_module_level=True)


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """Return a function that compiles a program with the module ``aot_backward``, as the page says."""

    def compiled(source: Path) -> Path:
        folder, library = tmp_path_factory.mktemp("fortran"), c_library.build()
        command = [
            "gfortran",
            "-std=f2018",
            "-Wall",
            "-Wextra",
            "-Wno-unused-variable",
            "-Werror",
            "-O2",
            EXAMPLE / "aot_backward.f90",
            source,
            "-o",
            folder / "program",
        ]
        done = subprocess.run(
            [*map(str, command), f"-L{library}", "-laot_backward", f"-Wl,-rpath,{library}"],
            cwd=folder,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return folder / "program"

    return compiled


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("package") / "network.pt2"
    ab.export(path, runpy.run_path(str(EXAMPLE / "export.py"))["entries"](), runtime="standalone")
    return path


def run(program: Path, *arguments: object, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(program), *map(str, arguments)], cwd=folder, capture_output=True, text=True)


def test_the_example_computes_what_eager_computes(build: Callable[[Path], Path], package: Path, tmp_path: Path) -> None:
    done = run(build(EXAMPLE / "network.f90"), package, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    said = done.stdout

    def number(name: str) -> float:
        found = re.search(rf"^{name} +(\S+)$", said, re.MULTILINE)
        assert found, said
        return float(found[1])

    example = runpy.run_path(str(EXAMPLE / "export.py"))
    positions = torch.arange(1, 37, dtype=torch.float64).sin().view(12, 3).requires_grad_()
    points = torch.arange(1, 129, dtype=torch.float64).cos().view(64, 2).requires_grad_()
    targets = (3 * points[:, :1]).sin().detach() * points[:, 1:].detach()
    energy = example["energy"](positions)
    (gradient,) = torch.autograd.grad(energy, positions)
    assert '{"length": "Bohr"}' in said
    assert number("energy") == pytest.approx(energy.item(), rel=1e-14)
    assert number("force") == pytest.approx(-gradient[0, 0].item(), rel=1e-13)

    net = example["network"]()
    loss = torch.nn.functional.mse_loss(net(points), targets)
    assert number("loss") == pytest.approx(loss.item(), rel=1e-14)
    assert number("by point") == pytest.approx(torch.autograd.grad(loss, points)[0][0, 0].item(), rel=1e-12)

    step = ab.load(package).step()
    points = points.detach()
    losses = []
    for i in range(1, 201):
        if i == 101:
            step.param_groups[0]["lr"] = 0.002
        losses.append(float(step(points, targets)))
    printed = {int(i): float(value) for i, value in re.findall(r"^step +(\d+) +(\S+)$", said, re.MULTILINE)}
    assert printed.keys() == {1, 50, 100, 150, 200}
    for i, value in printed.items():
        assert value == pytest.approx(losses[i - 1], rel=1e-10)
    assert losses[-1] < losses[0] / 2 and number("updates") == 200
    (extra, same) = re.findall(r"^resumed from (.*\}) +(\w)$", said, re.MULTILINE)[0]
    assert json.loads(extra) == {"step": 150} and same == "T"
    assert re.search(r"^trained +T$", said, re.MULTILINE)
    assert re.search(r"^error +6 entry energy: positions has size 2 in dimension 1; expected 3", said, re.MULTILINE)


PROGRAM = """
program wrong
  use aot_backward
  use, intrinsic :: iso_fortran_env, only: real32, real64
  implicit none
  type(aotb_package) :: package
  type(aotb_function) :: f
  character(256) :: path
  real(real64), target :: x(3, 4) = 1, value
  real(real32), target :: single(3, 4) = 1
  call get_command_argument(1, path)
  {lines}
end program
"""


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ('call package%open("none.pt2")', "none.pt2"),
        ('call package%open(path)\n  call package%get("none", f)', "has no entry 'none'"),
        ('call package%open(path)\n  call package%get("energy", f)\n  call f%run([tensor(single)])', "float64"),
        ('call package%open(path)\n  call package%get("energy", f)\n  call f%run([tensor(x), tensor(x)])', "input"),
        (
            'call package%open(path)\n  call package%get("energy", f)\n  call f%run([tensor(x)], [tensor(x)])',
            "output[0]",
        ),
        ("call f%run([tensor(x)], [tensor(value)])", "NULL"),
        ('call package%open(path)\n  call package%get("step", f)\n  call f%number("speed", 1d0)', "speed"),
        ('call package%open(path)\n  call package%get("step", f)\n  call f%resume("none.state")', "none.state"),
        (
            'call package%open(path)\n  call package%get("network", f)\n  call aotb_copy(f%state("0.weight"), tensor(x))',
            "expected the same type and sizes",
        ),
    ],
)
def test_errors_stop_the_program_with_their_message(
    build: Callable[[Path], Path], package: Path, lines: str, words: str, tmp_path: Path
) -> None:
    source = tmp_path / "wrong.f90"
    source.write_text(PROGRAM.replace("{lines}", lines))
    done = run(build(source), package, folder=tmp_path)
    assert done.returncode == 1 and words in done.stderr
