"""``python -m tests.tools.hosts --docs docs/benchmarks/DATE-hosts``: force fields and optimal control in their
programs, from the shipped adapters.

A package of a small message-passing potential runs 200 steps of molecular dynamics in ASE, OpenMM and LAMMPS, and a
package of learned dynamics runs model predictive control in CasADi. No program imports PyTorch. Forces are compared
with eager PyTorch at the last positions. Writes DOCS.md and DOCS.json.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aot_backward_native as abn
import ase.io
import numpy as np
import torch
from torch import nn

import aot_backward as ab
from tests.hosts import potential

from . import lammps_input

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
NATIVE = Path(abn.__file__).parent
WITHOUT_TORCH = (
    "import runpy, sys; sys.modules['torch'] = None; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
)
"""A program for ``python -c`` that runs another one, in which PyTorch cannot be imported: vesin does so where it
can."""
PYTHON = [sys.executable, "-c", WITHOUT_TORCH]
COLUMNS = [
    "ms a step",
    "native call",
    "neighbors",
    "rest",
    "rest %",
    "drift, eV/atom",
    "kinetic, eV/atom",
    "forces, relative",
]


class Dynamics(nn.Module):
    """The next of four states of a system with two controls."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4)).double()

    def forward(self, x: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        return x + 0.1 * self.net(torch.cat([x, u], -1))


def model(dtype: torch.dtype) -> potential.Potential:
    torch.manual_seed(0)
    return potential.Potential(width=32, radial=12).to(dtype).eval()


class Hosts:
    """One run of all programs; ``folder`` holds what they read and write."""

    def __init__(self, folder: Path, steps: int, side: int):
        self.folder, self.steps = folder, steps
        self.atoms = potential.crystal(side)
        for name, dtype in (("double", torch.float64), ("single", torch.float32)):
            self.progress(f"exporting {name}.pt2")
            entry = ab.forcefield(
                model(dtype), potential.crystal(), cutoff=potential.CUTOFF, species=potential.SPECIES, layers=2
            )
            ab.export(folder / f"{name}.pt2", {"potential": entry}, runtime="standalone")
        ase.io.write(folder / "atoms.xyz", self.atoms, format="extxyz")
        ase.io.write(folder / "atoms.data", self.atoms, format="lammps-data", specorder=potential.SPECIES, masses=True)
        self.library = NATIVE / "lib" / "libaot_backward.so"
        include = ["-I", str(NATIVE / "include")]
        self.run("gcc", "-O2", "-shared", "-fPIC", *include, HERE / "timed.c", "-o", folder / "timed.so", "-ldl")
        self.run("cmake", "-S", ROOT / "examples" / "lammps", "-B", folder / "plugin")
        self.run("cmake", "--build", folder / "plugin")
        self.dynamics = folder / "dynamics.pt2"
        self.progress("exporting the dynamics")
        network = Dynamics()
        example = torch.randn(8, 4).double(), torch.randn(8, 2).double()
        ab.export(
            self.dynamics,
            ab.derivatives(network, example, ["value", "jacobian", "vjp", "hessian"]),
            runtime="standalone",
        )
        np.savez(folder / "weights.npz", **{k: v.numpy() for k, v in network.state_dict().items()})
        source = ROOT / "examples" / "casadi" / "external.c"
        options = [
            f'-DPACKAGE="{self.dynamics}"',
            "-DPOINTS=20",
            *include,
            "-L",
            str(NATIVE / "lib"),
            "-laot_backward",
            f"-Wl,-rpath,{NATIVE / 'lib'}",
        ]
        self.run("gcc", "-O2", "-shared", "-fPIC", source, "-o", folder / "dynamics.so", *options)

    def progress(self, what: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {what}", flush=True)

    def run(self, *argv: object, env: Mapping[str, str] | None = None) -> str:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        given = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **(env or {})}
        done = subprocess.run(
            list(map(str, argv)),
            cwd=self.folder,
            env=given,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(
                f"{argv[0]} {argv[1]}: expected exit code 0, got {done.returncode}.\n{done.stdout}{done.stderr}"
            )
        return done.stdout

    def timed(self, *argv: object) -> tuple[str, float]:
        """Run a program. Return its output, and the seconds of its calls of ``aotb_run``."""
        report = self.folder / "timed.txt"
        report.unlink(missing_ok=True)
        env = {"LD_PRELOAD": str(self.folder / "timed.so"), "TIMED": str(report), "TIMED_LIBRARY": str(self.library)}
        out = self.run(*argv, env=env)
        return out, float(report.read_text().split()[1])

    def in_python(self, name: str) -> dict[str, Any]:
        self.progress(name)
        out = self.folder / f"{name}.npz"
        text, native = self.timed(*PYTHON, HERE / f"{name}.py", "double.pt2", "atoms.xyz", self.steps, out)
        last = np.load(out)
        return json.loads(text) | {"native": native, "positions": last["positions"], "forces": last["forces"]}

    def fix_external(self) -> dict[str, Any]:
        self.progress("LAMMPS, fix external")
        dump = self.folder / "external.dump"
        text, native = self.timed(*PYTHON, HERE / "in_lammps.py", "double.pt2", "atoms.data", self.steps, dump)
        return (
            lammps_input.read(text, dump)
            | {"native": native}
            | {"neighbors": float(text.split("seconds of neighbors:")[1].split()[0])}
        )

    def pair_style(self, package: str, ranks: int) -> dict[str, Any]:
        self.progress(f"LAMMPS, pair_style aotb, {package}, {ranks} ranks")
        dump, script = self.folder / f"{package}{ranks}.dump", self.folder / f"in.{package}{ranks}"
        plugin = lammps_input.PLUGIN.format(plugin=self.folder / "plugin" / "aotbplugin.so", package=f"{package}.pt2")
        text = (
            lammps_input.SETTINGS.format(data="atoms.data")
            + plugin
            + lammps_input.DYNAMICS.format(steps=self.steps, out=dump)
        )
        script.write_text(text)
        out, native = self.timed(
            *(["mpiexec", "-n", ranks] if ranks > 1 else []), "lmp", "-in", script, "-log", "none", "-nocite"
        )
        return lammps_input.read(out, dump) | {"native": native}

    def error(self, row: Mapping[str, Any], dtype: torch.dtype) -> float:
        """Return the largest difference of forces from eager's in float64, relative to the largest force."""
        there = self.atoms.copy()
        there.positions = np.array(row["positions"])
        net = model(torch.float64)
        net.load_state_dict(model(dtype).state_dict())
        _, _, expected, _ = potential.eager(there, net)
        return float(np.abs(np.array(row["forces"]) - expected).max() / np.abs(expected).max())

    def row(self, found: Mapping[str, Any], dtype: torch.dtype = torch.float64) -> dict[str, float]:
        times = [1e3 * found[k] / self.steps for k in ("seconds", "native", "neighbors")]
        rest = times[0] - times[1] - times[2]
        of_atoms = [found[k] / len(self.atoms) for k in ("drift", "kinetic")]
        return dict(
            zip(COLUMNS, [*times, rest, 100 * rest / times[0], *of_atoms, self.error(found, dtype)], strict=True)
        )


def measure(folder: Path, steps: int, side: int) -> dict[str, Any]:
    hosts = Hosts(folder, steps, side)
    one, two = hosts.pair_style("double", 1), hosts.pair_style("double", 2)
    rows = {
        "ASE": hosts.row(hosts.in_python("in_ase")),
        "OpenMM, PythonForce": hosts.row(hosts.in_python("in_openmm")),
        "LAMMPS, fix external": hosts.row(hosts.fix_external()),
        "LAMMPS, pair_style aotb": hosts.row(one),
        "LAMMPS, pair_style aotb, float32": hosts.row(hosts.pair_style("single", 1), torch.float32),
        "LAMMPS, pair_style aotb, 2 MPI ranks": hosts.row(two),
    }
    ranks = {k: float(np.abs(np.array(one[k]) - np.array(two[k])).max()) for k in ("positions", "forces")}
    hosts.progress("CasADi")
    ways = json.loads(hosts.run(*PYTHON, HERE / "in_casadi.py", hosts.dynamics, "./dynamics.so", "weights.npz"))
    own = np.array(ways["CasADi's own SX"]["states"])
    control = {
        name: {
            "ms a step": way["ms"],
            "iterations": way["iterations"],
            "difference": float(np.abs(np.array(way["states"]) - own).max()),
        }
        for name, way in ways.items()
    }
    return {"atoms": len(hosts.atoms), "steps": steps, "dynamics": rows, "ranks": ranks, "control": control}


def page(found: Mapping[str, Any], seconds: float) -> str:
    """Return the results as a page in Markdown."""

    def table(corner: str, rows: Mapping[str, Mapping[str, float]]) -> list[str]:
        columns = list(next(iter(rows.values())))
        head = [f"| {corner} | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
        return head + [f"| {name} | {' | '.join(f'{v:.3g}' for v in row.values())} |" for name, row in rows.items()]

    processor = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        "?",
    )
    lines = [
        "# Force fields and optimal control in their programs",
        "",
        f"`make hosts`, {datetime.date.today()}, torch {torch.__version__}, {processor}, one thread a process, "
        f"{seconds:.0f} s. No program imports PyTorch.",
        "",
        f"{found['steps']} steps of molecular dynamics of {found['atoms']} atoms, by the shipped adapters and examples. Milliseconds are wall time.",
        "`drift` is the largest change of the total energy. `forces` compares the last forces with eager PyTorch in float64.",
        "",
        *table("program", found["dynamics"]),
        "",
        f"One and two MPI ranks: after the last step, positions differ by {found['ranks']['positions']:.2g} Å "
        f"and forces by {found['ranks']['forces']:.2g} eV/Å.",
        "",
        "Model predictive control by IPOPT in CasADi, 20 steps, horizon 20, exact Hessians; states, controls and costs compared with CasADi's own.",
        "",
        *table("way", found["control"]),
        "",
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--docs", type=Path, required=True, help="path of the results, without suffix")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--side", type=int, default=8, help="atoms along an edge of the box")
    options = parser.parse_args()
    start = time.time()
    with tempfile.TemporaryDirectory(prefix="aot-backward-hosts-") as folder:
        found = measure(Path(folder), options.steps, options.side)
    text = page(found, time.time() - start)
    options.docs.parent.mkdir(parents=True, exist_ok=True)
    options.docs.with_suffix(".md").write_text(text)
    options.docs.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
