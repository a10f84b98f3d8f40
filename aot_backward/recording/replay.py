"""``replay(path)`` with what the runtime's own cannot have: a file of the passes that the package does not hold."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from aot_backward_runtime.loader import load
from aot_backward_runtime.package.signature_policy import Key, Policy
from aot_backward_runtime.passes.session import MAX_STRUCTURES, Replaying
from aot_backward_runtime.passes.session import replay as replay_only


def replay(
    path: str | os.PathLike[str],
    *,
    entry: str | None = None,
    strict: bool = False,
    save_misses: str | os.PathLike[str] | None = None,
    imports: Sequence[str] = (),
    signature: Policy | None = None,
    key: Key | None = None,
    max_structures: int = MAX_STRUCTURES,
) -> Replaying:
    """:func:`aot_backward_runtime.passes.session.replay`, which can also keep what it met and the package does not hold.

    ``save_misses``: a file to which, when the context closes, the graphs of the interpreted passes are written; ``aot-backward compile FILE
    -o PACKAGE`` (:func:`aot_backward.recording.miss_file.compile_misses`) adds them, on this machine or another. Only then is a tracer imported,
    after the last pass. Needs memory for two passes of each structure that is missed.
    """
    if save_misses is None:
        return replay_only(path, entry=entry, strict=strict, imports=imports, signature=signature, key=key, max_structures=max_structures)
    from .record import Saving

    package = load(path, imports=imports, signature=signature, key=key)
    return Saving(package, entry, Path(save_misses), strict=strict, max_structures=max_structures)
