"""Build and run the examples without PyTorch as their first lines say: molecular dynamics and a resumed training in C,
a training with NumPy, gradients in Rust, and a function in a zip."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from ..support import c_library
from .test_examples import exported

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def run(*argv: object, folder: Path | None = None) -> str:
    done = subprocess.run(list(map(str, argv)), capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def commands(file: Path) -> list[str]:
    """Return the commands in the first comment of ``file``, with the paths of the tests' library and header."""
    found = re.findall(
        r"^(?: \*|//!)? {2,5}(?:\* {4})?((?:python|gcc|rustc|unzip|\./) ?.*)$",
        file.read_text().replace("\\\n", ""),
        re.MULTILINE,
    )
    return [
        c.replace("build/native", str(c_library.build())).replace(
            "runtime/native/include", str(ROOT / "runtime" / "native" / "include")
        )
        for c in found
    ]


def follow(file: Path, folder: Path) -> str:
    """Run these commands in ``folder``, with a link to ``examples``. Return the output of the last one."""
    if not (folder / "examples").exists():
        (folder / "examples").symlink_to(EXAMPLES)
    printed = ""
    for command in commands(file):
        if export := re.fullmatch(r"python examples/(\w+)/export\.py (\w+\.pt2)", command):
            if not (folder / export[2]).exists():
                (folder / export[2]).symlink_to(exported(export[1]))
            continue
        printed = run("sh", "-c", command.replace("python ", f"{sys.executable} ", 1), folder=folder)
    return printed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("examples")


def test_molecular_dynamics_in_c_keeps_the_energy(folder: Path) -> None:
    assert len(commands(EXAMPLES / "molecular_dynamics" / "export.py")) == 3
    said = follow(EXAMPLES / "molecular_dynamics" / "export.py", folder)
    found = re.search(
        r"512 atoms, (\d+) pairs, neighbours found (\d+) times; the energy drifted by (\S+) at most", said
    )
    assert found and int(found[1]) > 6 * 512 and int(found[2]) > 3 and float(found[3]) < 2e-3


def test_molecular_dynamics_has_eagers_forces(folder: Path) -> None:
    """The energy from the program's pairs equals the energy from all atoms and all images."""
    import torch

    text = (EXAMPLES / "molecular_dynamics" / "export.py").read_text()
    names: dict[str, object] = {}
    exec(compile(text.partition("def entries")[0], "export.py", "exec"), names)
    follow(EXAMPLES / "molecular_dynamics" / "export.py", folder)
    said = run("./md", "metal.pt2", 8, 0, folder=folder)
    points = torch.cartesian_prod(*[torch.arange(8.0, dtype=torch.float64)] * 3) * 1.1
    shifts = torch.cartesian_prod(*[torch.tensor([-8.8, 0.0, 8.8], dtype=torch.float64)] * 3)
    first, second, shift = [], [], []
    for move in shifts:
        i, j = torch.where((points[None] + move - points[:, None]).square().sum(2) < 2.2**2)
        keep = (i < j) | ((i == j) & bool(move.any()) & bool((move[move != 0][:1] > 0).all()))
        first, second, shift = [*first, i[keep]], [*second, j[keep]], [*shift, move.expand(int(keep.sum()), 3)]
    expected = names["energy"](points, torch.cat(first), torch.cat(second), torch.cat(shift))  # type: ignore[operator]
    energy, motion = map(float, re.findall(r"energy (\S+)  of it motion (\S+)", said)[0])
    assert energy - motion == pytest.approx(float(expected), abs=1e-5)


def test_digits_are_trained_and_resumed_in_c(folder: Path) -> None:
    said = follow(EXAMPLES / "digits_native" / "train.c", folder)
    accuracy = re.search(r"test accuracy ([0-9.]+) %", said)
    assert accuracy and float(accuracy[1]) > 97
    epochs = re.findall(r"epoch (\d+): (loss .*)", said)
    assert len(epochs) == 30 and epochs[:15] == epochs[15:] and said.endswith("bit for bit: yes\n")


def test_digits_are_trained_by_numpy(folder: Path) -> None:
    said = follow(EXAMPLES / "digits_native" / "train.py", folder)
    accuracy = re.search(r"test accuracy ([0-9.]+) %", said)
    assert accuracy and float(accuracy[1]) > 96 and "330 steps" in said


@pytest.mark.skipif(shutil.which("rustc") is None, reason="rustc is not installed")
def test_gradients_from_rust(folder: Path) -> None:
    said = follow(EXAMPLES / "rust_client" / "main.rs", folder)
    assert re.findall(r"^ *(\d+) atoms: energy", said, re.MULTILINE) == ["8", "27", "64", "125"]
    assert "has no entry 'nothing' that can be called from C; it has energy" in said


def test_a_function_in_a_zip(folder: Path) -> None:
    answer = ast.literal_eval(follow(EXAMPLES / "cold_start" / "build.py", folder))
    forces = [sum(f[d] for f in answer["forces"]) for d in range(3)]
    assert forces == pytest.approx([0, 0, 0], abs=1e-12) and len(answer["forces"]) == 3 and answer["energy"] > 1
    with zipfile.ZipFile(folder / "function.zip") as archive:
        assert (folder / "function.zip").stat().st_size < 600_000 and "forces.pt2" in archive.namelist()
