"""``python -m tests.tools.plain_words [PATH...] [-v]``: count phrases that plain technical English rarely needs, per
10,000 words.

It counts them in comments, docstrings and strings of the sources, and in the pages. It exits with 1 above
:data:`LIMITS`. A hit is a hint, not an error: ``where`` for a place is fine. ``-v`` prints each line. `make lint` runs
this tool. Lower a limit when the text allows it; never raise one.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

LIMITS = {"sources": 55, "pages": 40}
GENERATED = re.compile(r"docs/(models|operators)\.md|docs/benchmarks/.*|CHANGELOG\.md")
PHRASES = re.compile(
    r"\bwhat\b|\bwhere\b|\bwhose\b|\bthose\b|\bbesides?\b"
    r"|\b(?:is|are|was|were|has|have) no(?:ne)?\b(?! longer)"
    r"|\b(?:of|in|for|by|from|with|at|on) (?:which|what|whom)\b"
    r"|\bcan(?:not)? be had\b|\bin words\b|\bbecomes? of\b|\bof its own\b|\bgives? up\b|\bleft alone\b",
    re.IGNORECASE,
)


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the prose of a file, with its line numbers."""
    source = path.read_text(errors="replace")
    if path.suffix == ".md":
        fenced = False
        for number, line in enumerate(source.splitlines(), 1):
            if line.lstrip().startswith("```"):
                fenced = not fenced
            elif not fenced:
                yield number, line
    elif path.suffix == ".py":
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            kind = tokenize.tok_name[token.type]
            if kind == "COMMENT" or (kind in ("STRING", "FSTRING_MIDDLE") and len(token.string.split()) > 2):
                yield token.start[0], token.string
    else:
        for match in re.finditer(r'/\*.*?\*/|//[^\n]*|"(?:[^"\\\n]|\\.)*"', source, re.DOTALL):
            yield source.count("\n", 0, match.start()) + 1, match[0]


def main() -> None:
    paths = [a for a in sys.argv[1:] if a != "-v"]
    listed = subprocess.run(["git", "ls-files", *paths], capture_output=True, text=True, check=True).stdout.splitlines()
    counts = {name: [0, 0] for name in LIMITS}
    for name in listed:
        path = Path(name)
        if path.suffix not in (".py", ".c", ".h", ".inc", ".md") or GENERATED.fullmatch(name):
            continue
        count = counts["pages" if path.suffix == ".md" else "sources"]
        for number, text in texts(path):
            hits = len(PHRASES.findall(text))
            count[0] += hits
            count[1] += len(text.split())
            if hits and "-v" in sys.argv:
                print(f"{name}:{number}: {' '.join(text.split())[:150]}")
    above = False
    for kind, (hits, words) in counts.items():
        rate = round(1e4 * hits / max(words, 1))
        above = above or (rate > LIMITS[kind] and not paths)
        print(f"{kind}: {rate} of 10,000 words are in phrases to look at; the limit is {LIMITS[kind]}")
    sys.exit(int(above))


if __name__ == "__main__":
    main()
