"""Check for JSON objects with duplicate keys: ``json.loads`` would silently keep the last of the two, other readers the
first."""

from __future__ import annotations

from typing import Any


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Serve as ``object_pairs_hook`` of ``json.loads``. Raise ValueError, which names the key, for a duplicate."""
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {key!r} occurs twice")
            seen.add(key)
    return out
