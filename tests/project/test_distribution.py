"""Build both wheels, install them outside this checkout, and use them."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

_USE = """
import sys
assert "torch" not in sys.modules
import aot_backward, aot_backward_exporters, aot_backward_runtime
for module in (aot_backward, aot_backward_exporters, aot_backward_runtime):
    assert module.__file__.startswith(sys.argv[1]), module.__file__
assert aot_backward.__version__ == aot_backward_runtime.__version__
import aot_backward.api, aot_backward.cli  # the wheels hold everything that these import
package = aot_backward_runtime.load(sys.argv[2])
value, gradient = package.grad("distance")(*map(__import__("torch").tensor, ([1.0, 2.0, 2.0], [0.0, 0.0, 0.0])))
assert value == 3 and gradient.tolist() == [1 / 3, 2 / 3, 2 / 3] or abs(gradient.sum() - 5 / 3) < 1e-6
"""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("wheels")
    for folder in (ROOT / "runtime", ROOT):
        done = subprocess.run(
            [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, folder],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
    return {path.name.split("-")[0]: path for path in out.iterdir()}


def content(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def sources(folder: Path, below: Path) -> set[str]:
    kept = (p for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
    return {str(p.relative_to(below)) for p in kept}


def test_the_wheels_hold_the_code_and_the_license_and_nothing_else(wheels: dict[str, Path]) -> None:
    assert wheels.keys() == {"aot_backward", "aot_backward_runtime"}
    expected = {
        "aot_backward": sources(ROOT / "aot_backward", ROOT)
        | sources(ROOT / "exporters" / "aot_backward_exporters", ROOT / "exporters"),
        "aot_backward_runtime": sources(ROOT / "runtime" / "aot_backward_runtime", ROOT / "runtime"),
    }
    for name, wheel in wheels.items():
        found = content(wheel)
        metadata = {n for n in found if ".dist-info/" in n}
        assert found - metadata == expected[name]
        assert {n.rpartition("/")[2] for n in metadata} >= {"LICENSE", "METADATA", "RECORD"}
    with zipfile.ZipFile(wheels["aot_backward"]) as archive:
        (entry_points,) = (n for n in archive.namelist() if n.endswith("entry_points.txt"))
        assert "aot-backward = aot_backward.cli:main" in archive.read(entry_points).decode()


def install(site: Path, *wheels: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", site, *wheels]
    subprocess.run(list(map(str, pip)), check=True, capture_output=True)


def test_installed_wheels_work(wheels: dict[str, Path], package: Path, tmp_path: Path) -> None:
    install(tmp_path / "site", *wheels.values())
    # Put the wheels before the editable installation of this checkout.
    argv = [
        sys.executable,
        "-c",
        f"import sys; sys.path.insert(0, sys.argv[1])\n{_USE}",
        str(tmp_path / "site"),
        str(package),
    ]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_runtime_alone_runs_a_package(wheels: dict[str, Path], package: Path, tmp_path: Path) -> None:
    """The process cannot import the rest of this project."""
    install(tmp_path / "site", wheels["aot_backward_runtime"])
    code = f"""
import sys
sys.path[:] = [sys.argv[1]] + [p for p in sys.path if not p.startswith({str(ROOT)!r}) or p.startswith(sys.prefix)]
sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in getattr(f, "__module__", "")]
import aot_backward_runtime, torch
model = aot_backward_runtime.load(sys.argv[2]).module()
model({{"x": torch.randn(4, 4), "weight": torch.rand(4, 1)}})["out"].sum().backward()
assert model.layer.weight.grad.abs().sum() > 0
try:
    import aot_backward
except ModuleNotFoundError:
    print("alone")
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "site"), str(package)], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.stdout == "alone\n", done.stderr
