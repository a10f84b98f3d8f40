"""A package as one self-contained page of HTML: :func:`report`.

Made from the manifest and from the portable graphs, each read after its digest was checked; no native code is opened and no graph is run. Strings
in a package are untrusted: :mod:`.markup` escapes them in the page, and the script sets them as text only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aot_backward_runtime.package.archive import Archive


def report(archive: Archive) -> str:
    """The page. :class:`aot_backward_runtime.errors.PackageError` where a graph is damaged or is none."""
    from .page import page

    return page(archive)
