"""Show a package as one self-contained page of HTML: :func:`report`.

The page is made from the manifest and the portable graphs, each read after its digest was checked; no native code is
opened and no graph is run. Strings in a package are untrusted: :mod:`.markup` escapes them in the page, and the script
sets them as text only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aot_backward_runtime.package.archive import Archive


def report(archive: Archive) -> str:
    """Return the page. Raise :class:`aot_backward_runtime.errors.PackageError` if a graph is damaged or not a portable
    graph."""
    from .page import page

    return page(archive)
