"""The site of docs/ is whole: what `make docs`, which fails on a link or an anchor that leads nowhere, would not miss by itself."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import aot_backward
import aot_backward_runtime

ROOT = Path(__file__).parents[2]
NAVIGATION = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2].partition("\n\n")[0]


def test_the_navigation_has_every_page() -> None:
    listed = [path for entry in re.findall(r"[\w./*-]+\.md", NAVIGATION) for path in sorted((ROOT / "docs").glob(entry)) or [ROOT / "docs" / entry]]
    assert set((ROOT / "docs").rglob("*.md")) - set(listed) == set()


@pytest.mark.parametrize("package", [aot_backward, aot_backward_runtime])
def test_the_api_pages_have_every_public_name(package: object) -> None:
    pages = "".join(page.read_text() for page in (ROOT / "docs/api").glob("*.md"))
    documented = set(re.findall(r"^::: aot_backward(?:_runtime)?\.(\w+)$", pages, re.MULTILINE))
    assert set(package.__all__) - {"__version__"} - documented == set()  # type: ignore[attr-defined]
