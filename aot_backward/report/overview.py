"""Describe a package: who built it, its targets, and its comparison with eager."""

from __future__ import annotations

import math
from collections.abc import Iterator

from aot_backward_runtime.format.manifest import Target, Verdict
from aot_backward_runtime.format.manifest_json import SEALED_SINCE
from aot_backward_runtime.package.archive import Archive
from aot_backward_runtime.package.signatures import signature_beside
from aot_backward_runtime.package.targets import targets_of

from .blocks import bytes_shown, facts, section, table
from .graph_views import variant_title
from .markup import Child, Html, element
from .wording import counted, size_in_words


def package(archive: Archive) -> Html:
    manifest, size = archive.manifest, archive.path.stat().st_size
    version = ".".join(map(str, manifest.format_version))
    kinds = ", ".join(f"{name} ({e.kind})" for name, e in manifest.entries.items())
    drawn = sum(bool(spec.graph) for spec in manifest.libraries.values())
    graphs = (
        f"{drawn} of {len(manifest.libraries)} are in the package as data" if drawn < len(manifest.libraries) else ""
    )
    weights = sum(math.prod(w.shape) for w in manifest.weights.values())
    signature = signature_beside(archive.path)
    unsealed = (
        ""
        if manifest.format_version >= SEALED_SINCE
        else f"; format {version} has no digest of its manifest within the package, only a CRC; formats since 1.15 have one"
    )
    stored = "" if manifest.has_weights else ", not in the package: load(path, weights={…})"
    return section(
        "package",
        "Package",
        _verdicts(archive),
        facts(
            [
                ("Offers", kinds),
                ("Built by", f"{manifest.producer}, {manifest.created or 'no date'}; format {version}"),
                ("Runs on", f"torch {manifest.torch}"),
                ("Size", element("span", size_in_words(size), title=f"{size:,} bytes")),
                (
                    "Weights",
                    f"{counted(len(manifest.weights), 'tensor')}, {weights:,} elements{stored}"
                    if manifest.weights
                    else "none",
                ),
                ("Graphs", graphs),
                ("Required features", ", ".join(manifest.required_features)),
                ("Metadata", archive.manifest.metadata or None),
                *((f"Note: {key}", text) for key, text in manifest.notes.items()),
                (
                    "Signature",
                    f"{signature.name} is next to the package, not checked; verify --key PUBLIC.pem checks it"
                    if signature
                    else "none next to the package",
                ),
                ("Manifest", ["SHA-256 ", element("code", archive.manifest_digest, class_="digest"), unsealed]),
            ]
        ),
        _targets(archive),
    )


def _all_verdicts(archive: Archive) -> Iterator[tuple[str, Target, Verdict]]:
    """Yield every verdict of the package with its subject and target."""
    targets = targets_of(archive.manifest)
    for name, entry in archive.manifest.entries.items():
        for number, variant in enumerate(entry.variants):
            for target, verdict in zip(targets, (variant.verdict, *variant.verdicts), strict=False):
                yield f"{name}, {variant_title(number, variant)}", target, verdict
        for structure in entry.structures:
            for number, spec in enumerate(structure.variants):
                for target, verdict in zip(targets, (spec.verdict, *spec.verdicts), strict=False):
                    yield f"{name}, structure {structure.fingerprint[:12]}, variant {number}", target, verdict
        for update in entry.updates:
            for target, verdict in zip(targets, (update.verdict, *update.verdicts), strict=False):
                yield f"{name}, step of {update.optimizer.rpartition('.')[2]}", target, verdict
        for clipping in entry.clippings:
            for target, verdict in zip(targets, (clipping.verdict, *clipping.verdicts), strict=False):
                yield f"{name}, {clipping.function}", target, verdict


def _verdicts(archive: Archive) -> Html:
    comparisons = list(_all_verdicts(archive))
    missing = [(subject, target, v) for subject, target, v in comparisons if v.status != "verified"]
    if not comparisons:
        return element("p", "Nothing in the package was compared with eager.", class_="verdict open")
    if missing:
        subject, target, verdict = missing[0]
        open_ = f"{len(missing)} of {counted(len(comparisons), 'comparison')} with eager missing: {subject} for {target.label}: {verdict.status}"
        return element("p", open_, class_="verdict open")
    _, _, worst = max(comparisons, key=lambda j: j[2].error)
    headline = element("strong", "Verified against eager PyTorch")
    tail = f"; the worst tensor, {worst.worst}, is at {worst.error:.1%} of its tolerance" if worst.worst else ""
    return element("p", headline, f": {counted(len(comparisons), 'comparison')}{tail}.", class_="verdict good")


def _targets(archive: Archive) -> Html:
    manifest, members = archive.manifest, archive.members()
    rows: list[list[Child]] = []
    for number, target in enumerate(targets_of(manifest)):
        size = sum(members[spec.every_build[number].member].size for spec in manifest.libraries.values())
        hardware = " ".join(
            filter(
                None,
                (target.device, target.machine, target.march, target.cuda_arch, target.cuda and f"CUDA {target.cuda}"),
            )
        )
        flags = " ".join(target.cpu_flags) or "none beyond that"
        rows.append(
            [
                element("span", target.label, class_="whole"),
                element("span", hardware, class_="whole"),
                flags,
                bytes_shown(size),
            ]
        )
    return table(("Target", "Machine", "Required processor flags", "Native code"), rows, numbers=(3,))
