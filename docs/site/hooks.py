"""What mkdocs does not do by itself for these pages, which are first of all Markdown that reads well where it lies (mkdocs' hooks).

- `<!-- figure: NAME -->` and `<!-- table: NAME -->` stand for a plot and a table of committed figures, drawn while the site is built.
- A link to a file of the repository that is no page (`../tests/test_grad.py`) leads to a page that shows it.
- In the navigation, `FOLDER/*.md` stands for the pages of that folder, the newest first.
- A built page that would load anything from elsewhere is an error.
"""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path
from typing import Any

import figures
import tables
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
log = logging.getLogger("mkdocs.hooks.site")  # below "mkdocs", whose warnings are errors with strict

_MARK = re.compile(r"^<!-- (figure|table): ([\w-]+) -->$", re.MULTILINE)
_LINK = re.compile(r"(?<=\]\()([^()#:\s]+)(?=[#)])")
_CODE = re.compile(r"(^```.*?^```$|``.+?``|`[^`]+`)", re.MULTILINE | re.DOTALL)
_LITERAL = re.compile(r"<(?=[A-Za-z](?!ttps?:))|(?<=\])\[")  # error messages in the tables: `<class …>`, `[N][N]`
_FENCE_WITH_FILE = re.compile(r"^(```\w+) file=(\S+)$", re.MULTILINE)
_LOADED = re.compile(r"""<(?:script|img|iframe)\b[^>]*\bsrc=["'](?:https?:)?//|<link\b(?![^>]*rel=["']?canonical)[^>]*\bhref=["'](?:https?:)?//""")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.nav = _expanded(config.nav, Path(config.docs_dir))
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, drawn in figures.draw(ROOT / "docs").items():
        files.append(File.generated(config, f"figures/{name}.svg", content=drawn))
    wanted = ["CHANGELOG.md"]
    sources = {f"docs/{file.src_uri}": file.content_string for file in files.documentation_pages()}
    while wanted or sources:
        for path, text in sources.items():
            wanted += [target for target in _targets(text, path) if not target.startswith("docs/") and (ROOT / target).is_file()]
        sources = {}
        for path in wanted:
            if files.get_file_from_path(_uri(path)) is None:
                text = (ROOT / path).read_text()
                shown = text if path.endswith(".md") else _listing(path, text)
                files.append(File.generated(config, _uri(path), content=shown, inclusion=InclusionLevel.NOT_IN_NAV))
                if path.endswith(".md"):
                    sources[path] = text
        wanted = []
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    source = page.file.src_uri
    if "<!-- table: operators -->" in markdown:
        page.meta["hide"] = ["toc"]  # which would be empty; front matter would show where the page lies
    path = source.removeprefix("repository/") if source.startswith("repository/") else f"docs/{source}"
    markdown = _FENCE_WITH_FILE.sub(r'\1 title="\2"', markdown)
    parts = _CODE.split(markdown)
    for i in range(0, len(parts), 2):  # what is not code
        parts[i] = _LITERAL.sub(r"\\\g<0>", _LINK.sub(lambda match: _link(match[1], path, source), parts[i]))
    markdown = "".join(parts)
    return _MARK.sub(lambda match: _generated(match[1], match[2], source), markdown)


def on_post_build(config: MkDocsConfig) -> None:
    for page in Path(config.site_dir).rglob("*.html"):
        if loaded := _LOADED.search(page.read_text()):
            log.warning(f"{page.relative_to(config.site_dir)} would load something from elsewhere: {loaded[0]}")


def _expanded(nav: Any, docs: Path) -> Any:
    if isinstance(nav, dict):
        return {title: _expanded(item, docs) for title, item in nav.items()}
    if isinstance(nav, list):
        return [_expanded(item, docs) for item in nav]
    if "*" not in nav:
        return nav
    return [page.relative_to(docs).as_posix() for page in sorted(docs.glob(nav), reverse=True) if page.name != "README.md"]


def _targets(markdown: str, path: str) -> list[str]:
    return [_target(link, path) for link in _LINK.findall(markdown)]


def _target(link: str, path: str) -> str:
    """What a link on the page at ``path`` leads to; both as paths in the repository."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), link))


def _uri(path: str) -> str:
    """Where the site has the file of the repository at ``path``."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"repository/{path}" if path.endswith(".md") else f"repository/{path}.md"


def _link(link: str, path: str, source: str) -> str:
    target = _target(link, path)
    if (ROOT / target).is_dir() and (ROOT / target / "README.md").is_file():
        target += "/README.md"
    if not (ROOT / target).is_file():
        return link  # for mkdocs to complain of, where it is a link
    return posixpath.relpath(_uri(target), posixpath.dirname(source) or ".")


def _listing(path: str, text: str) -> str:
    language = {".py": "python", ".toml": "toml", ".json": "json", "": "make" if path.endswith("Makefile") else "text"}.get(Path(path).suffix, "text")
    fence = "`" * 6
    return f"---\nsearch:\n  exclude: true\n---\n# `{path}`\n\n{fence}{language}\n{text.rstrip()}\n{fence}\n"


def _generated(kind: str, name: str, source: str) -> str:
    here = posixpath.dirname(source) or "."
    if kind == "table":
        return tables.make(name, ROOT / "docs", lambda path: posixpath.relpath(path, here))
    text, folder = figures.FIGURES[name].text, posixpath.relpath("figures", here)
    return "\n".join(f"![{text}]({folder}/{name}-{theme}.svg#only-{theme})" for theme in figures.THEMES)
