"""Fixtures for tests of the container format."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set a separate code cache for this process and its children."""
    monkeypatch.setenv("AOT_BACKWARD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"
