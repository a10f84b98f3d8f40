"""What tests of the container format share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A code cache of the test's own, for this process and those that it starts."""
    monkeypatch.setenv("AOT_BACKWARD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"
