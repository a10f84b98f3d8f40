"""``load(path)``: from a file to callable entries."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .compatibility import choose
from .entries.dispatch import Entry
from .entries.function import LoadedFunction
from .entries.grad import LoadedGrad
from .entries.module import LoadedModule
from .entries.pickling import check_shape, refuse_shallow_copy
from .errors import AotBackwardError, InputError, PackageError
from .format.manifest import ClippingSpec, EntrySpec, Manifest, StructureSpec, UpdateSpec
from .native.bound_state import BoundState
from .native.cuda_graphs import Gpu, GraphedLibrary, GraphReport, Graphs
from .native.cuda_library import library_on
from .native.library import Library
from .native.plan import ROLES
from .native.weights import all_weights
from .operators import check_registered, import_modules
from .package.archive import Archive, open_package
from .package.signatures import Key, admission
from .training.step import LoadedStep

Loaded = LoadedModule | LoadedFunction | LoadedGrad | LoadedStep


class Package:
    """A loaded package. Entries of one package share their weights: training one changes the others.

    A copy or a pickle of a package holds its weights and its path: it is opened again, and must be the same file. A
    pickled entry brings a package of its own.

    Attributes:
        device: The device of the package's code and weights, a ``torch.device``.

    Examples:
        >>> package = load("net.pt2")
        >>> package.entries
        {'module': 'module'}
        >>> model = package.module()
    """

    def __init__(
        self,
        archive: Archive,
        weights: Mapping[str, torch.Tensor],
        types: Mapping[str, type],
        device: torch.device | None = None,
        graphs: Graphs | None = None,
        options: Mapping[str, Any] | None = None,
    ):
        """``weights`` lie on ``device``; by default the current device of the package's kind. ``graphs``: captures
        calls, if given. ``options``: the arguments of :func:`load`."""
        self._graphs, self._options = graphs, dict(options or {})
        self._archive, self._weights, self._types = archive, dict(weights), dict(types)
        self.device = device or device_of(archive.manifest)
        self._made: dict[str, Loaded] = {}

    @property
    def manifest(self) -> Manifest:
        """The contents of the package as data (``docs/format.md``)."""
        return self._archive.manifest

    @property
    def path(self) -> Path:
        """The absolute path of the file."""
        return self._archive.path.absolute()

    @property
    def metadata(self) -> dict[str, Any]:
        """The metadata of the package, given at export; {} if there is none. Entries have their own."""
        return dict(json.loads(self.manifest.metadata)) if self.manifest.metadata else {}

    @property
    def cudagraphs(self) -> GraphReport | None:
        """Counts of captured and replayed calls; None if the package was loaded without ``cudagraphs=True``."""
        return self._graphs.report if self._graphs is not None else None

    @property
    def entries(self) -> dict[str, str]:
        """Name and kind ("module", "function", "grad", "step", "replay") of each entry."""
        return {name: spec.kind for name, spec in self.manifest.entries.items()}

    def module(self, name: str | None = None) -> LoadedModule:
        """Return an entry of kind "module", always the same object.

        Args:
            name: The name of the entry; a sole one needs none.

        Returns:
            The module, in the mode that it had at export.

        Raises:
            AotBackwardError: There is no such entry, or there are several and ``name`` is None. The message lists the
                entries.
        """
        return self._get("module", name)  # type: ignore[return-value]

    def function(self, name: str | None = None) -> LoadedFunction:
        """Return an entry of kind "function", always the same object.

        Args:
            name: The name of the entry; a sole one needs none.

        Returns:
            The function, which computes no gradients.

        Raises:
            AotBackwardError: There is no such entry, or there are several and ``name`` is None. The message lists the
                entries.
        """
        return self._get("function", name)  # type: ignore[return-value]

    def grad(self, name: str | None = None) -> LoadedGrad:
        """Return an entry of kind "grad", always the same object.

        Args:
            name: The name of the entry; a sole one needs none.

        Returns:
            The gradient function.

        Raises:
            AotBackwardError: There is no such entry, or there are several and ``name`` is None. The message lists the
                entries.
        """
        return self._get("grad", name)  # type: ignore[return-value]

    def step(self, name: str | None = None) -> LoadedStep:
        """Return an entry of kind "step", always the same object.

        Args:
            name: The name of the entry; a sole one needs none.

        Returns:
            The training step.

        Raises:
            AotBackwardError: There is no such entry, or there are several and ``name`` is None. The message lists the
                entries.
        """
        return self._get("step", name)  # type: ignore[return-value]

    def recorded(
        self, name: str | None = None
    ) -> tuple[dict[str, StructureSpec], dict[str, Library], dict[str, torch.Tensor]]:
        """Return the recorded passes of the ``replay`` entry of that name (a sole one needs none): its structures by
        fingerprint, their libraries, and the libraries' constants by weight key."""
        spec = self.manifest.entries[self._name("replay", name)]
        libraries = self._open(s.library for t in spec.structures for v in t.variants for s in v.segments if s.library)
        constants = {c.weight: self._weights[c.weight] for lib in libraries.values() for c in lib.spec.constants}
        return {t.fingerprint: t for t in spec.structures}, libraries, constants

    def recorded_updates(self, name: str | None = None) -> list[tuple[UpdateSpec, Library]]:
        """Return the optimizer steps of the ``replay`` entry of that name, with their libraries."""
        spec = self.manifest.entries[self._name("replay", name)]
        libraries = self._open(u.library for u in spec.updates)
        return [(u, libraries[u.library]) for u in spec.updates]

    def recorded_clippings(self, name: str | None = None) -> list[tuple[ClippingSpec, Library]]:
        """Return the clippings of gradients of the ``replay`` entry of that name, with their libraries."""
        spec = self.manifest.entries[self._name("replay", name)]
        libraries = self._open(c.library for c in spec.clippings)
        return [(c, libraries[c.library]) for c in spec.clippings]

    def __copy__(self) -> Package:
        return refuse_shallow_copy(self)

    def __reduce__(self) -> Any:
        return partial(_reopened, *self._origin), (), self._current()

    def __reduce_ex__(self, protocol: object) -> Any:
        return self.__reduce__()

    def __setstate__(self, weights: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for key, value in weights.items():
                check_shape(key, value, self._weights[key])
                self._weights[key].copy_(value)

    @property
    def _origin(self) -> tuple[str, str, dict[str, Any]]:
        options = self._options
        if options.get("weights") is not None:
            options = {**options, "weights": self._current()}
        return str(self.path), self._archive.manifest_digest, options

    def _current(self) -> dict[str, torch.Tensor]:
        """Return the weights by key, as the entries have changed them."""
        out = {key: t.detach() for key, t in self._weights.items()}
        for name, loaded in self._made.items():
            held = loaded._aot_current() if isinstance(loaded, LoadedModule) else loaded._held
            out |= {s.weight: t.detach() for s, t in zip(self.manifest.entries[name].state, held, strict=True)}
        return out

    def _name(self, kind: str, name: str | None) -> str:
        names = [n for n, k in self.entries.items() if k == kind]
        if name is None and len(names) == 1:
            return names[0]
        if name is None or name not in names:
            raise AotBackwardError(_other_entries(str(self._archive.path), self.entries, kind, name, names))
        return name

    def _get(self, kind: str, name: str | None) -> Loaded:
        name = self._name(kind, name)
        if name not in self._made:
            self._made[name] = self._make(name, self.manifest.entries[name])
        return self._made[name]

    def _entry(self, name: str, spec: EntrySpec) -> tuple[Entry, set[str]]:
        """Return the entry, and the keys of its state's weights."""
        manifest = self.manifest
        variants = [v for variant in spec.variants for v in variant.orders]
        plans = [getattr(v, role) for v in variants for role in ROLES] + [spec.step.update if spec.step else None]
        used = {p.call.library for p in plans if p is not None and p.call}
        libraries = self._open(used)
        own = {s.weight for s in spec.state}
        fixed = {
            c.weight: self._weights[c.weight]
            for n in used
            for c in manifest.libraries[n].constants
            if c.weight not in own
        }
        reopen = partial(_reopened, *self._origin, spec.kind, name)
        return Entry(
            name,
            spec,
            libraries,
            BoundState(spec, manifest.weights, fixed, self.device),
            self._types,
            self.device,
            reopen,
        ), own

    def _make(self, name: str, spec: EntrySpec) -> Loaded:
        manifest = self.manifest
        entry, own = self._entry(name, spec)
        tensors = {k: self._weights[k] for k in own}
        others = {s.weight for n, e in manifest.entries.items() if n != name for s in e.state}
        if spec.kind == "step":
            # processes that train together must round alike, so the digest includes the target
            digest = f"{self._archive.manifest_digest} for {manifest.target.label}"
            return LoadedStep(entry, tensors, digest, not others.isdisjoint(own))
        if spec.kind == "module":
            return LoadedModule(entry, tensors)
        return (LoadedFunction if spec.kind == "function" else LoadedGrad)(entry, tensors, not others.isdisjoint(own))

    def _open(self, names: Iterable[str]) -> dict[str, Library]:
        libraries = {
            n: library_on(self.device, partial(self._archive.library, n), self.manifest.libraries[n])
            for n in sorted(set(names))
        }
        return (
            libraries
            if self._graphs is None
            else {n: GraphedLibrary(library, self._graphs) for n, library in libraries.items()}
        )


def device_of(manifest: Manifest, device: torch.device | None = None) -> torch.device:
    """Return the device that the package's code runs on: ``device``, or the current one of its kind."""
    if manifest.target.device == "cpu":
        return torch.device("cpu")
    index = device.index if device is not None else None
    return torch.device("cuda", torch.cuda.current_device() if index is None else index)


def load(
    path: str | os.PathLike[str],
    *,
    weights: Mapping[str, torch.Tensor] | None = None,
    types: Iterable[type] = (),
    device: str | torch.device | None = None,
    cudagraphs: bool = False,
    target: str | None = None,
    imports: Sequence[str] = (),
    key: Key | None = None,
    mmap: bool = False,
) -> Package:
    """Open a package: verify it, and read its weights. Native code is opened when it is first called.

    Loading a package, like importing a module, lets its author's code run when it is called.

    Args:
        path: The package.
        weights: Tensors by weight key, for a package written without (``weights=False``), or instead of its own. Keys
            are names as in ``state_dict``; the error for a missing one lists them all.
        types: Classes that results may contain; a package only names them.
        device: The GPU that runs a package for GPUs and holds its weights ("cuda:1"); by default the current one. A
            call then takes tensors on that device, and runs on its current stream.
        cudagraphs: Whether to capture calls as CUDA graphs, one for each list of shapes, and to replay them.
            :attr:`Package.cudagraphs` counts them, and the reasons of uncaptured calls.
        target: The target to run ("cpu:avx2") if the package has several; by default the best that this processor
            supports.
        imports: Names of modules to import first, such as modules that register operators of the package. Nothing else
            is imported, whatever the package says.
        key: The PEM file with a public key: the signature in ``PATH.sig`` must be by its owner. It is checked before
            anything in the package is used, and only the checked bytes are used. Without a key, signatures are ignored.
        mmap: Whether to map the weights from the file: pages load on first access, and processes that only read share
            them. Then do not write to the file in place while the package is in use (calls would give wrong numbers, or
            end the process by a signal); renaming a new file over it does no harm. Weights are read, not mapped, with a
            ``key``.

    Returns:
        The package.

    Raises:
        PackageError: The file cannot be read, or is not a whole package.
        SignatureError: The signature is refused.
        IncompatibleError: The package was built for another kind of machine, or calls operators that are not registered
            in this process.
        WeightsError: The weights do not fit, or are missing.
        InputError: ``device`` or ``cudagraphs`` does not fit the package.

    Examples:
        >>> package = load("net.pt2")
        >>> loss = package.module()(torch.randn(100, 8)).square().mean()
        >>> loss.backward()
    """
    types = tuple(types)
    imports = imports if isinstance(imports, str) else tuple(imports)  # import_modules refuses a string
    options = {
        "weights": weights, "types": types, "device": device, "cudagraphs": cudagraphs, "target": target, "imports": imports,
        "key": key, "mmap": mmap,
    }  # fmt: skip
    archive = open_package(Path(path), admit=admission(key))
    requested_device = _device(device)
    archive.choose(choose(archive.manifest, target, requested_device, path))
    manifest = archive.manifest
    import_modules(imports)
    check_registered(manifest, path)
    run_device = device_of(manifest, requested_device)
    if cudagraphs and run_device.type != "cuda":
        raise InputError(
            f"cudagraphs=True is for packages for a GPU; the target of {path} that runs here is {manifest.target.label}"
        )
    tensors = {name: tensor.to(run_device) for name, tensor in all_weights(archive, path, weights, mmap).items()}
    verdicts = [(n, v.verdict) for n, e in manifest.entries.items() for v in e.variants]
    verdicts += [(n, v.verdict) for n, e in manifest.entries.items() for s in e.structures for v in s.variants]
    verdicts += [(n, u.verdict) for n, e in manifest.entries.items() for u in e.in_place]
    unproved = [n for n, v in verdicts if v.status != "verified"]
    if unproved:
        warnings.warn(
            f"{path}: entry {unproved[0]!r} was not compared with eager when it was built; run: aot-backward verify {path}",
            stacklevel=2,
        )
    by_name = {f"{t.__module__}.{t.__qualname__}": t for t in types}
    return Package(archive, tensors, by_name, run_device, Graphs(Gpu(run_device)) if cudagraphs else None, options)


def _reopened(path: str, digest: str, options: dict[str, Any], kind: str = "", name: str = "") -> Any:
    """Load a package, or an entry of it, again for a copy or a pickle."""
    package = load(path, **options)
    actual = package._archive.manifest_digest
    if actual != digest:
        raise PackageError(
            f"{path}: expected the file that was pickled, manifest SHA-256 {digest}, got {actual}. Restore that file, or load the new one."
        )
    return getattr(package, kind)(name) if kind else package


def _device(device: str | torch.device | None) -> torch.device | None:
    try:
        return None if device is None else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InputError(f"device is {device!r}; expected 'cpu', 'cuda' or 'cuda:1'") from error


def _other_entries(path: str, entries: Mapping[str, str], kind: str, name: str | None, names: Sequence[str]) -> str:
    """Return an error message: the ``entries`` (kinds by name) that exist instead of the requested ``kind``, and how to
    get them. ``names``: entries of that kind."""
    expected = (
        f"one {kind} entry"
        if names and name is None
        else f"a {kind} entry" + (f" {name!r}" if name is not None else "")
    )
    got = [f"{k} {n!r}" for n, k in entries.items()]
    others = f" and {len(got) - _ENTRIES_SHOWN} others" if len(got) > _ENTRIES_SHOWN else ""
    ways = [_WAYS[k].format(name=n) for n, k in entries.items() if n in (name, *names) or not names][:_ENTRIES_SHOWN]
    return f"{path}: expected {expected}, got {', '.join(got[:_ENTRIES_SHOWN]) or 'none'}{others}. {f'Call {_or(ways)}.' if ways else 'Export one.'}"


def _or(words: Sequence[str]) -> str:
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


_ENTRIES_SHOWN = 8  # entries, in a message
_WAYS = {kind: f"load(path).{kind}({{name!r}})" for kind in ("module", "function", "grad", "step")} | {
    "replay": "replay(path, entry={name!r})"
}
