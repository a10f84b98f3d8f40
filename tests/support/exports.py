"""Packages that tests share: each is exported once in a test run, whichever process asks first."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import aot_backward as ab

from . import zoo


def shared(name: str, make: Callable[[Path], object]) -> Path:
    """``NAME.pt2`` in the folder that this test run shares (tests/conftest.py), made by ``make(path)`` if it is not there."""
    path = Path(os.environ["AOT_BACKWARD_TEST_FOLDER"]) / f"{name}.pt2"
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            make(path)
    return path


def module(name: str, *, dynamic: bool) -> Path:
    """The zoo's module of that name."""

    def make(path: Path) -> None:
        case = zoo.make(name)
        ab.export_module(
            case.module.train(case.mode == "train"), case.args(case.sizes[0]), dynamic_shapes=case.dynamic_shapes if dynamic else None, path=path
        )

    return shared(f"{name}-{'dynamic' if dynamic else 'static'}", make)
