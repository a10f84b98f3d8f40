"""Packages that tests share. The first process that asks exports each once in a test run."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import aot_backward as ab

from . import zoo


def shared(name: str, make: Callable[[Path], object]) -> Path:
    """Return ``NAME.pt2`` in the folder that this test run shares (tests/conftest.py). If it does not exist,
    ``make(path)`` makes it."""
    path = Path(os.environ["AOT_BACKWARD_TEST_FOLDER"]) / f"{name}.pt2"
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            make(path)
    return path


def module(name: str, *, dynamic: bool) -> Path:
    """Return a package of the zoo's module of that name."""

    def make(path: Path) -> None:
        case = zoo.make(name)
        ab.export_module(
            case.module.train(case.mode == "train"),
            case.args(case.sizes[0]),
            dynamic_shapes=case.dynamic_shapes if dynamic else None,
            path=path,
        )

    return shared(f"{name}-{'dynamic' if dynamic else 'static'}", make)
