"""Removes the building machine's paths from a library.

``__FILE__`` in torch's headers leaves their full path in error messages. Lengths stay, so nothing else moves: only
folders that identify this machine become ``/./././``, and the message still names the header and the line.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path

import torch

from .compile_cache import cache_root


def erase_paths(library: bytes, folders: Iterable[Path]) -> bytes:
    """Return ``library`` with each occurrence of ``folders``, or of a folder that identifies this machine, overwritten
    at equal length."""
    candidates = {
        *folders,
        Path(torch.__file__).parent / "include",
        Path(sys.prefix),
        Path(sys.base_prefix),
        Path.cwd(),
        cache_root(),
    }
    # "/usr" or "/tmp" say nothing about this machine
    paths = {p for p in candidates if len(p.parts) > 2} | {Path.home()}
    spellings = {str(p.absolute()) for p in paths} | {str(p.resolve()) for p in paths}
    longest_first = sorted((os.fsencode(s) for s in spellings - {"/"}), key=len, reverse=True)
    pattern = re.compile(b"(?:" + b"|".join(map(re.escape, longest_first)) + b")/")
    return pattern.sub(lambda match: _filler(len(match.group())), library)


def _filler(length: int) -> bytes:
    return b"/" * (length % 2) + b"./" * (length // 2)
