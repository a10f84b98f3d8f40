"""Shared by all tests: a cache of compiled code apart from the user's, and one small package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

CACHE = "AOT_BACKWARD_CACHE"
SHARED = "AOT_BACKWARD_TEST_FOLDER"  # packages that tests share (exports.py), for all workers of a run
PROGRAM = Path(__file__).parent / "support" / "cli_program.py"
SLOW = Path(__file__).with_name("slow.txt")

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers share the cores, and OpenMP's threads spin while they wait for each other: a step of 3 ms would take 100
    # ms.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure(config: pytest.Config) -> None:
    """Keep compiled code for the next run, in a cache next to the user's or in ``AOT_BACKWARD_CACHE``. Parallel workers
    inherit the variables."""
    if SHARED not in os.environ:
        config.stash[_MADE] = os.environ[SHARED] = tempfile.mkdtemp(prefix="aot-backward-tests-")
    kept = Path.home() / ".cache" / "aot-backward-tests"
    writable = os.access(next(folder for folder in (kept, *kept.parents) if folder.exists()), os.W_OK)
    os.environ.setdefault(CACHE, str(kept) if writable else f"{os.environ[SHARED]}/cache")
    os.environ.setdefault("AOT_BACKWARD_TUNE", "none")  # timing is slow; test_tuning.py turns it on
    if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):  # or each exporting process compiles 840 modules of PyTorch, 2 s
        os.environ["PYTHONPYCACHEPREFIX"] = f"{os.environ[SHARED]}/bytecode"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the files, tests and single cases that slow.txt lists as ``slow``."""
    named = set(SLOW.read_text().split("\n"))
    for item in items:
        if not named.isdisjoint((item.nodeid, item.nodeid.partition("[")[0], item.nodeid.partition("::")[0])):
            item.add_marker("slow")


def pytest_unconfigure(config: pytest.Config) -> None:
    made = config.stash.get(_MADE, "")
    if made:
        shutil.rmtree(made, ignore_errors=True)


_MADE = pytest.StashKey[str]()


def aot_backward(
    *arguments: object, cwd: Path | None = None, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command line in another process."""
    argv = [sys.executable, "-m", "aot_backward.cli", *map(str, arguments)]
    return subprocess.run(
        argv, capture_output=True, text=True, cwd=cwd, env={**os.environ, **(env or {})}, stdin=subprocess.DEVNULL
    )


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return ``cli_program.py:entries``, exported by the command line. Do not write to it."""
    path = tmp_path_factory.mktemp("package") / "small.pt2"
    done = aot_backward("export", f"{PROGRAM}:entries", "-o", path)
    assert done.returncode == 0, done.stderr
    return path


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Run a test on one thread: threads of tiny kernels spin while they wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
