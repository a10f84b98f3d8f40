"""The site of docs/ is whole: what `make docs`, which fails on a link or an anchor that leads nowhere, would not miss
by itself."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import aot_backward
import aot_backward_runtime

from ..tools.benchmarks import summary

ROOT = Path(__file__).parents[2]
CONFIG = (ROOT / "mkdocs.yml").read_text()


def pages(part: str) -> set[Path]:
    """The pages that a part of mkdocs.yml lists."""
    listed = CONFIG.partition(f"\n{part}:")[2].partition("\n\n")[0]
    patterns = [entry.lstrip("/") for entry in re.findall(r"[\w./*-]+\.md", listed)]
    return {path for pattern in patterns for path in sorted((ROOT / "docs").glob(pattern)) or [ROOT / "docs" / pattern]}


def test_the_navigation_has_every_page_for_readers_and_one_index_has_the_measurements() -> None:
    shown, hidden = pages("nav"), pages("not_in_nav")
    assert set((ROOT / "docs").rglob("*.md")) - shown - hidden == set() and not shown & hidden
    index = ROOT / "docs" / "benchmarks" / "README.md"
    linked = {(index.parent / target).resolve() for target in re.findall(r"\]\(([^)#:]+)\)", index.read_text())}
    assert hidden - linked == set()


@pytest.mark.parametrize("package", [aot_backward, aot_backward_runtime])
def test_the_api_pages_have_every_public_name(package: object) -> None:
    pages = "".join(page.read_text() for page in (ROOT / "docs/api").glob("*.md"))
    documented = set(re.findall(r"^::: aot_backward(?:_runtime)?\.(\w+)$", pages, re.MULTILINE))
    assert set(package.__all__) - {"__version__"} - documented == set()  # type: ignore[attr-defined]


def test_the_readme_has_the_newest_figures() -> None:
    """`python -m tests.tools.benchmarks.summary --write` puts them there."""
    readme, made = (ROOT / "README.md").read_text(), summary.lines(ROOT / "docs")
    assert summary.written(readme, made) == readme
    with pytest.raises(ValueError, match="expected <!-- speed -->"):
        summary.written("no marks", made)


def releases_between(older: str, newer: str) -> int:
    (a, b), (c, d) = (map(int, version.split(".")[:2]) for version in (older, newer))
    return d - b if a == c else 100


def test_the_figures_are_not_older_than_the_release_before() -> None:
    path, _ = summary.newest(ROOT / "docs", "doors")
    # The first files have no version
    measured = dict(summary.measurements(ROOT / "docs"))[path]["machine"].get("version", "0.1.0")
    assert releases_between(measured, aot_backward.__version__) <= 1
    assert releases_between("0.1.0", "0.3.0") == 2 and releases_between("0.9.1", "1.0.0") > 1
