"""``replay(path, save_misses=FILE)``: the runtime's replay, which also writes a file of the passes that the package has no variant for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aot_backward_runtime.loader import Package, load
from aot_backward_runtime.package.signature_policy import Key, Policy
from aot_backward_runtime.passes.session import Replaying
from aot_backward_runtime.passes.session import replay as runtime_replay
from aot_backward_runtime.passes.structure_table import MAX_STRUCTURES

from ..packaging.package_writer import check_destination
from .observed_replay import ObservedReplay
from .processes.ranks import rank_here
from .recorded_structure import RecordedStructure


class MissSavingReplay(ObservedReplay):
    """The context of ``replay(save_misses=FILE)``."""

    def __init__(self, package: Package, entry: str | None, file: Path, **options: Any):
        """``options``: of :class:`ObservedReplay`."""
        check_destination(file)
        super().__init__(package, entry, **options)
        self.file = file
        self.looks_at_all = True

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        if self.observed_any:
            from .miss_file import save_misses

            self.skipped += save_misses(self.file, self._structures_to_save())

    def _structures_to_save(self) -> dict[str, RecordedStructure]:
        """All, or, where ``max_structures`` was reached, those that came more than once."""
        if not self.table.full:
            return self.structures
        repeated = {f: s for f, s in self.structures.items() if s.passes > 1}
        self.note_if_full(f", and {len(self.structures) - len(repeated)} of those that were recorded came once and are not saved")
        return repeated


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
    always: bool = False,
    optimizer: bool = True,
    modules: bool = False,
) -> Replaying:
    """:func:`aot_backward_runtime.replay`, which can also save the passes that it interpreted.

    ``save_misses``: a file to which, when the context closes, the graphs of the interpreted passes are written; ``aot-backward compile FILE
    -o PACKAGE`` (:func:`aot_backward.recording.miss_file.compile_misses`) adds them, on this machine or another. Only then is a tracer imported,
    after the last pass, and no pass goes to eager for its speed. Needs memory for two passes of each structure that is missed.
    """
    if save_misses is None:
        return runtime_replay(
            path,
            entry=entry,
            strict=strict,
            imports=imports,
            signature=signature,
            key=key,
            max_structures=max_structures,
            always=always,
            optimizer=optimizer,
            modules=modules,
        )
    file = Path(save_misses)
    if rank := rank_here():  # each writes its own
        file = file.with_name(f"{file.name}.rank{rank}")
    package = load(path, imports=imports, signature=signature, key=key)
    options: dict[str, Any] = {"strict": strict, "max_structures": max_structures, "always": always, "optimizer": optimizer, "modules": modules}
    return MissSavingReplay(package, entry, file, **options)
