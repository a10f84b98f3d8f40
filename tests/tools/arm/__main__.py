"""``python -m tests.tools.arm --docs docs/benchmarks/DATE-arm``: code for aarch64, run in an emulator, beside x86-64's
and eager's results.

A package with code for both machines is exported and each entry run on both. A Python of Debian for aarch64 trains by
the wheel that ``make wheels`` builds, and calls each operator. PyTorch for aarch64 runs the package and exports
another. Then the tests of refusals and of a wrong library run. It needs Debian's g++-aarch64-linux-gnu and qemu-user,
and as root it fetches Python."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import torch

import aot_backward as ab
from aot_backward.checks import emulated, standalone, stored_results
from aot_backward_runtime.native.weights import load_examples
from aot_backward_runtime.package.archive import Archive, open_package
from aot_backward_runtime.package.targets import standalone_by_target
from tests.native import test_operators
from tests.native import test_other_machines as machines

from . import with_pytorch

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
ARM = "aarch64"
PYTHON = (
    "python3.11-minimal libpython3.11-minimal libpython3.11-stdlib libc6 zlib1g libexpat1 libffi8 libbz2-1.0 liblzma5 "
    "libstdc++6 libgcc-s1 libgomp1"
)
FIT = """
import aot_backward as ab, torch
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Dropout(0.05), nn.Linear(32, 2))
variant = ab.Variant((torch.randn(64, 2), torch.randint(2, (64,))))
step = ab.Step(net, [variant], torch.optim.AdamW(net.parameters(), lr=0.02), loss_fn=nn.functional.cross_entropy)
ab.export("fit.pt2", {"fit": step}, target="cpu:avx2,cpu:neon", runtime="standalone")
"""


def progress(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def run(*argv: object, cwd: Path | None = None, **environment: str) -> str:
    done = subprocess.run(
        list(map(str, argv)), cwd=cwd, capture_output=True, text=True, check=False, env=os.environ | environment
    )
    if done.returncode:
        raise RuntimeError(f"{argv[0]} failed: {(done.stdout + done.stderr)[-2000:]}")
    return done.stdout


def compared(archive: Archive, path: Path, name: str, folder: Path) -> dict[str, Any]:
    """The verdicts of an entry, the largest error as a part of its tolerance for each machine, and how far the two are
    apart."""
    entry, examples = archive.manifest.entries[name], load_examples(archive)
    worst = dict.fromkeys((platform.machine(), ARM), 0.0)
    apart = 0.0
    for number in range(len(entry.variants)):
        prefix = f"{name}/{number}/"
        stored = {key.removeprefix(prefix): tensor for key, tensor in examples.items() if key.startswith(prefix)}
        found = {}
        for machine in worst:
            found[machine] = standalone.results_of(path, folder / "results", name, entry, number, stored, machine)
            for result in stored_results.names_of(stored):
                comparison = stored_results.compare_stored(
                    result, found[machine][result], stored, as_stored=entry.kind == "step"
                )
                worst[machine] = max(worst[machine], comparison.ratio)
        here, there = found.values()
        for result, tensor in here.items():
            other = there[result]
            if tensor is not None and other is not None and tensor.is_floating_point() and tensor.numel():
                scale = float(tensor.double().abs().max())
                apart = max(apart, float((tensor.double() - other.double()).abs().max()) / scale if scale else 0.0)
    return {"verdicts": standalone_by_target(archive.manifest, name), "errors": worst, "apart": apart}


def entries(folder: Path) -> dict[str, Any]:
    path = folder / "machines.pt2"
    ab.export(path, machines.entries(), target=machines.BOTH, tune="none")
    archive = open_package(path)
    return {name: compared(archive, path, name, folder) for name in archive.manifest.entries}


def python_of_debian(folder: Path) -> list[str]:
    """Return the command of a Python for aarch64 in the emulator; [] if it cannot be fetched."""
    root = folder / "root"
    program = root / "usr/bin/python3.11"
    if not program.exists():
        try:
            root.mkdir(exist_ok=True)
            run("dpkg", "--add-architecture", "arm64")
            run("apt-get", "update", "-q")
            run("apt-get", "download", "-q", *(f"{name}:arm64" for name in PYTHON.split()), cwd=root)
        except (RuntimeError, OSError) as error:
            progress(f"no Python for aarch64: {error}")
            return []
        for archive in root.glob("*.deb"):
            run("dpkg-deb", "-x", archive, root)
    return [emulated.emulator(ARM)[0], "-cpu", "cortex-a53", "-L", str(root), str(program)]


def tests_of_operators(command: list[str]) -> str:
    """Each operator of the core there, in the emulated Python, beside libtorch's here."""
    if not command:
        return "not run: no Python for aarch64"
    emulated_python = [command[0], "-E", f"PYTHONPATH={ROOT}", *command[1:]]
    return tests_of(test_operators.__file__, AOT_BACKWARD_TEST_PYTHON=shlex.join(emulated_python))


def tests_of(file: str, **environment: str) -> str:
    text = run(sys.executable, "-m", "pytest", "-q", "-m", "", "-p", "no:cacheprovider", file, cwd=ROOT, **environment)
    return text.strip().split("\n")[-1].partition(" in ")[0]


def trained(folder: Path, command: list[str]) -> dict[str, Any]:
    """300 steps on both machines, by aot_backward_native."""
    run("make", "wheels", f"DIST={folder / 'dist'}", cwd=ROOT)
    (wheel,) = (folder / "dist").glob(f"aot_backward_native*{ARM}.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "wheel")
    run(sys.executable, "-c", FIT, cwd=folder)
    here = json.loads(run(sys.executable, HERE / "train.py", "fit.pt2", "state", cwd=folder))
    out = {"wheel": wheel.name, "resumed": here["resumed"] == here["losses"][200:]}
    if command:
        text = run(
            *command,
            HERE / "train.py",
            "fit.pt2",
            "state",
            cwd=folder,
            PYTHONPATH=str(folder / "wheel"),
            AOT_BACKWARD_CACHE=str(folder / "cache"),
        )
        there = json.loads(text)
        pairs = [abs(a - b) / abs(a) for a, b in zip(here["losses"], there["losses"], strict=True)]
        out |= {
            "20 steps": max(pairs[:20]),
            "300 steps": max(pairs),
            "resumed there": there["resumed"] == there["losses"][200:],
        }
    return out


def page(data: dict[str, Any]) -> str:
    rows = []
    pytorch = data["PyTorch"]
    for name, entry in data["entries"].items():
        verdicts = ", ".join(f"{target} {verdict}" for target, verdict in entry["verdicts"].items())
        here, there = entry["errors"].values()
        by_torch = pytorch["entries"][name] if pytorch else {"wrong": ["not run"], "error": 0.0}
        error = ", ".join(by_torch["wrong"]) or f"{by_torch['error']:.2g}"
        rows.append(f"| {name} | {verdicts} | {here:.2g} | {there:.2g} | {error} | {entry['apart']:.1e} |")
    table = "\n".join(rows)
    steps = "\n".join(
        f"| {name} | {value:.1e} |" if isinstance(value, float) else f"| {name} | {value} |"
        for name, value in data["training"].items()
    )
    return f"""# Code for aarch64

`make arm`, {data["date"]}, torch {data["torch"]}, {data["compiler"]}, {data["emulator"]}, {data["seconds"]:.0f} s. One package with code for both
machines; x86-64 runs its own, the emulator the other, without PyTorch and with it. Errors are parts of the tolerance of `verify`, the largest of all
results.

| entry | verdicts | error, x86-64 | error, aarch64 | error, aarch64 with PyTorch | largest difference of the first two, relative |
|---|---|---|---|---|---|
{table}

Training by `aot_backward_native` in Python, here and in Debian's Python for aarch64, from the wheel: largest difference of a loss, relative.

| AdamW with dropout | |
|---|---|
{steps}

Tests of refusals on both machines, and of a library made wrong: {data["tests"]}. Tests of each operator in the emulator
(`tests/native/test_operators.py`), compared with libtorch on x86-64: {data["operators"]}.

{of_pytorch(pytorch)}
"""


def of_pytorch(found: dict[str, Any]) -> str:
    if not found:
        return "PyTorch for aarch64 was not run: its wheel could not be fetched."
    return f"""torch {found["torch"]} for {found["machine"]} is PyPI's CUDA build with empty libraries in place of CUDA's
(`tests/tools/arm/with_pytorch.py`). Its import takes {found["import"]:.0f} s in the emulator. There, `aot_backward` also exported a training step
with AdamW and dropout, in {found["export"]:.0f} s; the compiler was the cross compiler under the name g++. Twenty losses differ from eager's there
by {found["20 steps"]:.1e}, relative. In C over that libtorch, the same losses have {"equal" if found["C"]["equal"] else "OTHER"} bits, and
resumed ones {"equal" if found["C"]["resumed"] else "OTHER"}."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder", type=Path, default=Path("build/arm"), help="where packages, wheels and Debian's Python go"
    )
    parser.add_argument("--docs", type=Path, required=True)
    options = parser.parse_args()
    folder = options.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    data: dict[str, Any] = {"date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}", "torch": torch.__version__}
    data["compiler"] = run(machines.CROSS, "--version").split("\n")[0]
    data["emulator"] = (
        run(emulated.emulator(ARM)[0], "--version").split("\n")[0].replace(" version", "").partition(" (")[0]
    )
    progress("entries")
    data["entries"] = entries(folder)
    progress("training")
    command = python_of_debian(folder)
    data["training"] = trained(folder, command)
    progress("operators")
    data["operators"] = tests_of_operators(command)
    progress("PyTorch")
    data["PyTorch"] = with_pytorch.results(folder, command, folder / "machines.pt2")
    progress("tests")
    data["tests"] = tests_of(machines.__file__)
    data["seconds"] = time.perf_counter() - began
    options.docs.with_suffix(".md").write_text(page(data))
    print(page(data))


if __name__ == "__main__":
    main()
