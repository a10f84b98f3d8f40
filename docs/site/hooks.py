"""Hooks of mkdocs. docs/ is Markdown that GitHub renders too; these hooks add the parts that only the site has.

- A plot replaces `<!-- figure: NAME -->`, and a table `<!-- table: NAME -->`. Most are made from the committed JSON
  files.
- A link to a file or folder outside docs/ (`../tests/entries/test_grad.py`) leads to a page that shows it.
- A built page that would load anything from another host causes a warning. Strict mode turns it into an error.
"""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path

import figures
import tables
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
log = logging.getLogger("mkdocs.hooks.site")  # below "mkdocs": strict mode turns its warnings into errors

_MARK = re.compile(r"^<!-- (figure|table): ([\w-]+) -->$", re.MULTILINE)
_LINK = re.compile(r"(?<=\]\()([^()#:\s]+)(?=[#)])")
_CODE = re.compile(r"(^ *```.*?^ *```$|``.+?``|`[^`]+`)", re.MULTILINE | re.DOTALL)
_LITERAL = re.compile(r"<(?=[A-Za-z](?!ttps?:))|(?<=\])\[")  # error messages in the tables: `<class …>`, `[N][N]`
_FENCE_WITH_FILE = re.compile(r"^(```\w+) file=(\S+)$", re.MULTILINE)
_LOADED = re.compile(
    r"""<(?:script|img|iframe)\b[^>]*\bsrc=["'](?:https?:)?//|<link\b(?![^>]*rel=["']?canonical)[^>]*\bhref=["'](?:https?:)?//"""
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, svg in figures.draw(ROOT / "docs").items():
        files.append(File.generated(config, f"figures/{name}.svg", content=svg))
    links = {
        target
        for file in files.documentation_pages()
        for target in _targets(file.content_string, f"docs/{file.src_uri}")
    }
    todo = {"CHANGELOG.md", *links}
    while todo:
        path = todo.pop()
        if path.startswith(("docs/", "../")) or not (ROOT / path).exists() or files.get_file_from_path(_uri(path)):
            continue
        text = (ROOT / path).read_text() if (ROOT / path).is_file() else "\n".join(_names(ROOT / path))
        if path.endswith(".md"):
            todo |= set(_targets(text, path))
        content = text if path.endswith(".md") else _listing(path, text)
        files.append(File.generated(config, _uri(path), content=content, inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    source = page.file.src_uri
    if "<!-- table: operators -->" in markdown:
        page.meta["hide"] = ["toc"]  # it would be empty; GitHub would show front matter
    path = source.removeprefix("repository/") if source.startswith("repository/") else f"docs/{source}"
    markdown = _FENCE_WITH_FILE.sub(r'\1 title="\2"', markdown)
    parts = _CODE.split(markdown)
    for i in range(0, len(parts), 2):  # the parts that are not code
        parts[i] = _LITERAL.sub(r"\\\g<0>", _LINK.sub(lambda match: _link(match[1], path, source), parts[i]))
    markdown = "".join(parts)
    return _MARK.sub(lambda match: _content(match[1], match[2], source), markdown)


def on_post_build(config: MkDocsConfig) -> None:
    for page in Path(config.site_dir).rglob("*.html"):
        if loaded := _LOADED.search(page.read_text()):
            log.warning(f"{page.relative_to(config.site_dir)} would load something from another host: {loaded[0]}")


def _targets(markdown: str, path: str) -> list[str]:
    return [_target(link, path) for link in _LINK.findall(markdown)]


def _target(link: str, path: str) -> str:
    """Return the target of a link on the page at ``path``. Both are paths in the repository."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(path), link))


def _uri(path: str) -> str:
    """Return the site's path of the repository's file at ``path``."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"repository/{path}" if path.endswith(".md") else f"repository/{path}.md"


def _link(link: str, path: str, source: str) -> str:
    target = _target(link, path)
    if (ROOT / target).is_dir() and (ROOT / target / "README.md").is_file():
        target += "/README.md"
    if not (ROOT / target).is_file() and (target.startswith(("docs/", "../")) or not (ROOT / target).is_dir()):
        return link  # if it is a link, mkdocs reports it
    return posixpath.relpath(_uri(target), posixpath.dirname(source) or ".")


def _names(folder: Path) -> list[str]:
    return sorted(
        f"{child.name}/" if child.is_dir() else child.name
        for child in folder.iterdir()
        if not child.name.startswith((".", "__pycache__"))
    )


def _listing(path: str, text: str) -> str:
    language = {
        ".py": "python",
        ".toml": "toml",
        ".json": "json",
        "": "make" if path.endswith("Makefile") else "text",
    }.get(Path(path).suffix, "text")
    fence = "`" * 6
    return f"---\nsearch:\n  exclude: true\n---\n# `{path}`\n\n{fence}{language}\n{text.rstrip()}\n{fence}\n"


def _content(kind: str, name: str, source: str) -> str:
    here = posixpath.dirname(source) or "."
    if kind == "table":
        return tables.make(name, ROOT / "docs", lambda path: posixpath.relpath(path, here))
    text, folder = figures.FIGURES[name].text, posixpath.relpath("figures", here)
    return "\n".join(f"![{text}]({folder}/{name}-{theme}.svg#only-{theme})" for theme in figures.THEMES)
