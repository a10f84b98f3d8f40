"""What tests of the container format share."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..support.packages import write_tiny


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A code cache of the test's own, for this process and those that it starts."""
    monkeypatch.setenv("AOT_BACKWARD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """The smallest package: a linear layer and tanh."""
    write_tiny(tmp_path / "tiny.pt2")
    return tmp_path / "tiny.pt2"
