"""README.md and the guides in docs/ are true: their commands and programs are run, in order, in one folder each. The
tests and files that docs/reliability.md and CONTRIBUTING.md name are there."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from ..support import c_library

ROOT = Path(__file__).parents[2]
LIBTORCH = f"{torch.__path__[0]}/lib"
_BLOCK = re.compile(r"^```(\w+)(?: file=(\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[tuple[str, str, str]]:
    return [(m[1], m[2] or "", m[3]) for m in _BLOCK.finditer(page.read_text())]


def commands(text: str) -> list[str]:
    lines = text.splitlines()
    assert all(line.startswith("$ ") for line in lines), text
    return [line.removeprefix("$ ") for line in lines]


def run(argv: list[str], folder: Path) -> str:
    # the command that was installed with this interpreter, wherever it is called from
    env = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "AOT_BACKWARD_LIBTORCH": LIBTORCH,
    }
    done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, f"{shlex.join(argv)}\n{done.stdout}{done.stderr}"
    return done.stdout


PAGES = [
    "README.md",
    *(
        page.relative_to(ROOT).as_posix()
        for part in (".", "tutorials", "how-to")
        for page in sorted((ROOT / "docs" / part).glob("*.md"))
    ),
]
PAGES = [page for page in PAGES if any(kind != "text" for kind, _, _ in blocks(ROOT / page))]
PAGES = [page for page in PAGES if page not in ("docs/index.md", "docs/format.md")]  # the start page is tested below


NEEDED = {
    "docs/how-to/lammps.md": ("lmp", "mpiexec", "cmake"),
    "docs/how-to/fortran.md": ("gfortran",),
    "docs/how-to/browser.md": ("em++", "node"),
    "docs/how-to/raspberry-pi.md": ("aarch64-linux-gnu-gcc", "qemu-aarch64"),
    "docs/how-to/mace.md": ("lmp", "cmake", "mace_run_train"),
    "docs/how-to/train-mace.md": ("mace_run_train",),
}
"""Programs that a page needs and that the test dependencies do not install everywhere."""


@pytest.mark.parametrize("page", PAGES)
def test_every_command_and_program_of_a_page_works(page: str, tmp_path: Path) -> None:
    for program in NEEDED.get(page, ()):
        if shutil.which(program, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}") is None:
            pytest.skip(f"{program} is not installed")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "runtime").symlink_to(ROOT / "runtime")
    if "build/native" in (ROOT / page).read_text():  # what a clone has after `make native`
        (tmp_path / "build").mkdir()
        (tmp_path / "build" / "native").symlink_to(c_library.build())
    printed = ""
    for kind, file, text in blocks(ROOT / page):
        if file:
            (tmp_path / file).write_text(text)
        elif kind == "python":
            run([sys.executable, "-W", "error", "-c", text], tmp_path)
        elif kind == "console":
            for command in commands(text):
                if not command.startswith("make "):  # those are below
                    printed = run(shlex.split(command), tmp_path)
        elif kind == "output":
            assert text == printed
        else:
            assert kind in ("text", "html")


def test_the_makes_that_the_readme_names_are_there() -> None:
    named = [
        c
        for kind, _, text in blocks(ROOT / "README.md")
        if kind == "console"
        for c in commands(text)
        if c.startswith("make ")
    ]
    assert named == ["make demo", "make test"]
    for command in named:  # `make test` is this run; `make demo` is run by test_examples.py
        run([*shlex.split(command), "-n"], ROOT)


def test_the_start_page_gives_commands_that_other_tests_run() -> None:
    demo = subprocess.run(
        ["make", "-n", "demo", "BIN=BIN"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    tested = {line.replace("BIN/", "").replace("build/", "") for line in demo.splitlines()}  # by test_examples.py
    tested |= {c for kind, _, text in blocks(ROOT / "README.md") if kind == "console" for c in commands(text)}
    named = [c for kind, _, text in blocks(ROOT / "docs/index.md") if kind == "console" for c in commands(text)]
    assert len(named) == 2
    assert set(named) - tested == set()


def test_links_lead_somewhere() -> None:
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def files_of_tests() -> dict[str, list[Path]]:
    """The files that define each test function."""
    out: dict[str, list[Path]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for name in re.findall(r"^def (test_\w+)\(", path.read_text(), re.MULTILINE):
            out.setdefault(name, []).append(path)
    return out


def wrong_tests(text: str) -> list[str]:
    """Of a page in docs/, the links ``[test_name](../tests/FILE.py)`` that lead to a file without a test of that name,
    each with where it is."""
    tests, out = files_of_tests(), []
    for name, target in re.findall(r"\[(test_\w+)\]\(([^)]*)\)", text):
        if (ROOT / "docs" / target).resolve() not in tests.get(name, []):
            there = ", ".join(path.relative_to(ROOT).as_posix() for path in tests.get(name, []))
            out.append(f"{name} is not in {target}, but in: {there or 'no file'}")
    return out


def rows_without_their_tests(text: str, names: Iterable[str]) -> list[str]:
    """Of ``names``, those called ``test_row_NN_…`` that row NN of the tables does not link to."""
    rows = {m[1]: m[0] for m in re.finditer(r"^\| (\d+) \|.*$", text, re.MULTILINE)}
    return sorted(n for n in names if (m := re.match(r"test_row_(\d+)_", n)) and f"[{n}](" not in rows.get(m[1], ""))


def test_the_fault_table_and_the_tests_agree() -> None:
    text = (ROOT / "docs" / "reliability.md").read_text()
    assert wrong_tests(text) == []
    assert rows_without_their_tests(text, files_of_tests()) == []
    rows = [int(n) for n in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)]
    assert sorted(rows) == list(range(1, len(rows) + 1))


def test_what_slow_txt_names_is_there() -> None:
    """Files and tests; not the single cases of a test."""
    named = {line.partition("[")[0] for line in (ROOT / "tests" / "slow.txt").read_text().splitlines()}
    there = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")}
    there |= {
        f"{path.relative_to(ROOT).as_posix()}::{name}" for name, paths in files_of_tests().items() for path in paths
    }
    assert named - there == set()


def test_the_check_of_the_fault_table_can_fail() -> None:
    text = (ROOT / "docs" / "reliability.md").read_text()
    assert wrong_tests(text.replace("[test_nan_and_inf_are_as_in_eager]", "[test_nan_and_inf_are_not]"))
    (wrong,) = wrong_tests("[test_links_lead_somewhere](../tests/conftest.py)")
    assert wrong.startswith("test_links_lead_somewhere is not in ../tests/conftest.py, but in: tests/")
    assert wrong.endswith("test_docs.py")
    names = ["test_row_32_two_exporters_one_target", "test_row_33_two_exporters_one_target"]
    assert rows_without_their_tests(text, names) == names[1:]


def missing_paths(text: str) -> list[str]:
    """Files and folders of the repository that a page names in backticks and that are not there; NAMES in capitals
    stand for something else."""
    named = {
        p for p in re.findall(r"`([\w.-]+(?:/[\w.-]*)*)`", text) if re.search(r"/|\.(?:py|md|toml|txt|json|pt2)$", p)
    }
    missing = {p for p in named if not re.search(r"\b[A-Z]+\.(?!md)", p) and not (ROOT / p).exists()}
    return sorted(p for p in missing if "/" in p or not p.endswith(".py") or missing_modules(f"`{p}`"))


def missing_modules(text: str) -> list[str]:
    """Modules that a page names in backticks, from their distribution's folder or from the room they are in, and that
    are not there."""
    there = [
        f"/{p.relative_to(ROOT).as_posix()}"
        for folder in ("aot_backward", "exporters", "runtime", "tests")
        for p in (ROOT / folder).rglob("*.py")
    ]
    return sorted(n for n in set(re.findall(r"`([\w/]+\.py)`", text)) if not any(p.endswith(f"/{n}") for p in there))


def test_the_modules_that_the_architecture_names_are_there() -> None:
    assert missing_modules((ROOT / "docs" / "architecture.md").read_text()) == []
    assert missing_modules("`capture/trace.py` `capture/none.py` `one.py`") == ["capture/none.py"]


def test_the_paths_that_contributing_names_are_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert missing_paths(text) == []
    makes = set(re.findall(r"(?:^\$ |`)make ([a-z-]+)", text, re.MULTILINE))
    assert makes <= set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = "`tests/golden/` `tests/golden/none.pt2` `aot_backward/none.py` `FILE.py` `a / b`"
    assert missing_paths(named) == ["aot_backward/none.py", "tests/golden/none.pt2"]
