"""Copies and pickles of packages and functions: by path, digest and entry, with the state that changed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from .errors import AotBackwardError, PackageError

State = Mapping[str, bytes] | bytes
"""Row-major bytes of the changed tensors by name; of a step, its state file."""


def reopened(path: str, digest: str, options: Mapping[str, Any]) -> Any:
    """Open a pickled package."""
    from . import load

    package = load(path, **options)
    actual = package._opened.digest()
    if actual != digest:
        raise PackageError(
            f"{path}: expected the file that was pickled, manifest SHA-256 {digest}, got {actual}. Restore that file, or load the new one."
        )
    return package


def restored(kind: Any, package: Any, name: str, options: Mapping[str, Any], state: State) -> Any:
    """Make a pickled or copied function. ``kind``: its class."""
    made = kind(package, name, **options["made"])
    if options["training"] is not None:
        made.train(options["training"])
    made.use_variant(options["variant"])
    if isinstance(state, bytes):
        resume(made, state)
    else:
        for tensor, data in state.items():
            made._function.set_state(tensor, data)
    return made


def changed(function: Any, original: Any) -> dict[str, bytes]:
    """Return the tensors of ``function`` that differ from ``original``, which was just made."""
    out = {}
    for name, *_ in function.describe(0, _STATES):
        data = function.state(name).tobytes()
        if data != original.state(name).tobytes():
            out[name] = data
    return out


def saved(step: Any) -> bytes:
    """Return the state file of a step."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "state")
        step._function.save(path, None)
        return path.read_bytes()


def resume(step: Any, state: bytes) -> None:
    """Restore the state file, but for the random numbers, which belong to the process."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path, random = Path(folder, "state"), Path(folder, "random")
        path.write_bytes(state)
        other = step._package._opened.function(step.name)
        other.save(random, None)  # the state of the random numbers cannot be read by itself
        step._function.resume(path)
        other.resume(random)


def refuse_shallow_copy(loaded: object) -> NoReturn:
    raise AotBackwardError(
        f"copy.copy of a {type(loaded).__name__}: its tensors cannot be shared with a copy. Call copy.deepcopy."
    )


_STATES = 4  # aotb_part
