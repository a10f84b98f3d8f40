"""README.md and the guides in docs/ are true: their commands and programs are run, in order, in one folder each."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
_BLOCK = re.compile(r"^```(\w+)(?: file=(\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[tuple[str, str, str]]:
    return [(m[1], m[2] or "", m[3]) for m in _BLOCK.finditer(page.read_text())]


def commands(text: str) -> list[str]:
    lines = text.splitlines()
    assert all(line.startswith("$ ") for line in lines), text
    return [line.removeprefix("$ ") for line in lines]


def run(argv: list[str], folder: Path) -> None:
    # the command that was installed with this interpreter, wherever it is called from
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, f"{shlex.join(argv)}\n{done.stdout}{done.stderr}"


PAGES = ("README.md", "docs/usage.md", "docs/replay.md", "docs/training.md", "docs/rebuild.md", "docs/signatures.md", "docs/onnx.md", "docs/cuda.md")


@pytest.mark.parametrize("page", PAGES)
def test_every_command_and_program_of_a_page_works(page: str, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for kind, file, text in blocks(ROOT / page):
        if kind == "python" and file:
            (tmp_path / file).write_text(text)
        elif kind == "python":
            run([sys.executable, "-W", "error", "-c", text], tmp_path)
        elif kind == "console":
            for command in commands(text):
                if not command.startswith("make "):  # those are below
                    run(shlex.split(command), tmp_path)
        else:
            assert kind == "text"


def test_the_makes_that_the_readme_names_are_there() -> None:
    named = [c for kind, _, text in blocks(ROOT / "README.md") if kind == "console" for c in commands(text) if c.startswith("make ")]
    assert named == ["make demo", "make test"]
    for command in named:  # `make test` is this run; `make demo` is run by test_examples.py
        run([*shlex.split(command), "-n"], ROOT)


def test_the_start_page_gives_commands_that_other_tests_run() -> None:
    demo = subprocess.run(["make", "-n", "demo", "BIN=BIN"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    tested = {line.replace("BIN/", "").replace("build/", "") for line in demo.splitlines()}  # by test_examples.py
    tested |= {c for kind, _, text in blocks(ROOT / "README.md") if kind == "console" for c in commands(text)}
    named = [c for kind, _, text in blocks(ROOT / "docs/index.md") if kind == "console" for c in commands(text)]
    assert len(named) == 2
    assert set(named) - tested == set()


def test_links_lead_somewhere() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
