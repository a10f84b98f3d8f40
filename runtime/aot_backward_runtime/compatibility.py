"""A check whether a package's native code was built for this machine.

Nothing here initialises CUDA unless the package itself is for CUDA.
"""

from __future__ import annotations

import os
import sys
from functools import lru_cache
from pathlib import Path

import torch

from .errors import IncompatibleError
from .format.elf import MACHINES, numeric, read_elf
from .format.manifest import Manifest, Target
from .package.targets import seen_as, targets_of

_EXPORT = "Export it again here: aot-backward export FILE.py:NAME -o PACKAGE"
_REBUILD = "Rebuild it here, without the model's source: aot-backward rebuild {path} -o OUT.pt2"


def choose(
    manifest: Manifest, target: str | None = None, device: torch.device | None = None, path: object = "PACKAGE"
) -> int:
    """Return the number of the target (:func:`.package.targets.targets_of`) to run here: among those whose CPU flags
    this processor has, the one with the most flags. No code is run to find out.

    ``target``: the requested one. ``device``: the requested device; by default the current device of the package's
    kind. If PyTorch is limited to fewer features than the processor's (``ATEN_CPU_CAPABILITY``), the choice is too, if
    a target is left. Raises :class:`IncompatibleError`, which lists the targets and the missing features."""
    targets = targets_of(manifest)
    if target == "cpu" and "cpu:avx2" in (t.label for t in targets):
        target = "cpu:avx2"  # as in an export
    if target is not None and target not in (names := [t.label for t in targets]):
        raise IncompatibleError(f"the package has no target {target!r}; it has: {', '.join(names)}")
    candidates = [n for n, t in enumerate(targets) if target in (None, t.label)]
    if not manifest.libraries:
        return candidates[0]
    problems = {n: _problems(seen_as(manifest, n), device) for n in candidates}
    compatible = [n for n in candidates if not problems[n]]
    if not compatible:
        raise IncompatibleError(
            f"the package cannot run here: {_worded({targets[n].label: problems[n] for n in candidates})}. {_advice(manifest, path)}"
        )
    allowed = _allowed_flags()
    preferred = [n for n in compatible if allowed.issuperset(targets[n].cpu_flags)] or [
        min(compatible, key=lambda n: len(targets[n].cpu_flags))
    ]
    return max(preferred, key=lambda n: (len(targets[n].cpu_flags), _number(targets[n].cuda_arch)))


def why_incompatible(manifest: Manifest, number: int) -> str:
    """Return why target ``number`` of the package cannot run here, or ""."""
    return "; ".join(_problems(seen_as(manifest, number), None)) if manifest.libraries else ""


def check_target(manifest: Manifest, device: torch.device | None = None) -> None:
    """Raise :class:`IncompatibleError`, which names both sides of every difference, unless the package's code can run
    here (:func:`choose`)."""
    choose(manifest, device=device)


def _worded(problems: dict[str, list[str]]) -> str:
    if len(problems) == 1:
        return "; ".join(*problems.values())
    common = [p for p in next(iter(problems.values())) if all(p in reasons for reasons in problems.values())]
    if common:  # the processor is not the reason
        return "; ".join(common)
    return f"it has {len(problems)} targets, and none fits: " + "; ".join(
        f"{name}: {', '.join(reasons)}" for name, reasons in problems.items()
    )


def _advice(manifest: Manifest, path: object) -> str:
    return _REBUILD.format(path=path) if all(spec.graph for spec in manifest.libraries.values()) else _EXPORT


def _allowed_flags() -> frozenset[str]:
    """Return the processor's flags that PyTorch's own kernels use: fewer if the environment says so."""
    flags, capability = cpu_flags(), torch.backends.cpu.get_cpu_capability()
    if capability == "AVX2":
        return frozenset(f for f in flags if not f.startswith("avx512"))
    return (
        frozenset(f for f in flags if f not in _VECTOR and not f.startswith("avx"))
        if capability in ("DEFAULT", "NO AVX")
        else flags
    )


_VECTOR = frozenset({"fma", "f16c"})


def _problems(manifest: Manifest, device: torch.device | None) -> list[str]:
    target = manifest.target
    system = f"{sys.platform} {os.uname().machine}"
    if system != f"linux {target.machine}" or target.machine not in MACHINES.values():
        return [f"it was built for linux {target.machine}, this is {system}"]
    out = []
    if _minor(manifest.torch) != _minor(torch.__version__):
        out.append(f"it was built with torch {manifest.torch}, this is torch {torch.__version__}")
    missing = [flag for flag in target.cpu_flags if flag not in cpu_flags()]
    if missing:
        built_for = f"it was built for {target.march or 'a processor'}"
        out.append(f"{built_for} and needs the CPU flags {' '.join(missing)}, which this processor lacks")
    for library, versions, local_version in (
        ("glibc", [spec.glibc for spec in manifest.libraries.values()], glibc),
        ("GLIBCXX of libstdc++", [spec.glibcxx for spec in manifest.libraries.values()], glibcxx),
    ):
        highest = max((v for v in versions if v), key=numeric, default="")
        if highest and numeric(highest) > numeric(local_version()):
            out.append(f"it needs {library} {highest}, this machine has {local_version()}")
    if device is not None and device.type != target.device:
        out.append(f"it was built for {target.device}, but {device} was asked for")
    elif target.device == "cuda":
        out += _cuda_problems(target, device)
    return out


def _cuda_problems(target: Target, device: torch.device | None) -> list[str]:
    built = f"it was built for {target.cuda_arch} with CUDA {target.cuda}"
    if torch.version.cuda is None:
        return [f"{built}, this torch {torch.__version__} has no CUDA"]
    if torch.version.cuda.split(".")[0] != target.cuda.split(".")[0]:
        return [f"{built}, this torch {torch.__version__} has CUDA {torch.version.cuda}"]
    if not torch.cuda.is_available():
        return [f"{built}, this machine has no usable GPU"]
    if device is not None and device.index is not None and device.index >= torch.cuda.device_count():
        return [f"{built}; {device} was asked for, and this machine has {torch.cuda.device_count()} GPU(s)"]
    major, minor = torch.cuda.get_device_capability(device)
    return [] if _runs(target.cuda_arch, major, minor) else [f"{built}, this GPU is sm_{major}{minor}"]


def _runs(arch: str, major: int, minor: int) -> bool:
    """Return whether the GPU runs machine code for ``arch``: code runs on its own and on later minors of its major;
    with a suffix (``sm_90a``) only on its own."""
    number = arch.removeprefix("sm_")
    if not number.isdecimal():
        return number[:-1] == f"{major}{minor}"
    return divmod(int(number), 10)[0] == major and int(number) % 10 <= minor


def _number(arch: str) -> int:
    return int("".join(c for c in arch if c.isdecimal()) or 0)


def _minor(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])


@lru_cache(maxsize=1)
def cpu_flags() -> frozenset[str]:
    """Return the CPU flags as /proc/cpuinfo writes them, which calls them Features on aarch64."""
    return frozenset(_of_processor("Features" if os.uname().machine == "aarch64" else "flags").split())


def processor_name() -> str:
    """Return the processor's model: "AMD EPYC 7763 64-Core Processor"."""
    return _of_processor("model name")


def processor_vendor() -> str:
    """Return the maker's name in the processor: "AuthenticAMD", "GenuineIntel"; "" on aarch64."""
    return _of_processor("vendor_id")


def processor_family() -> str:
    """Return the family that the maker counts the processor to, in decimal: "25" for AMD's Zen 3 and Zen 4; "" on
    aarch64."""
    return _of_processor("cpu family")


def _of_processor(field: str) -> str:
    """Return a field of /proc/cpuinfo for the first processor only: the kernel makes the text as it is read, 0.1 ms for
    each further one."""
    with Path("/proc/cpuinfo").open() as file:
        return next((line.partition(":")[2].strip() for line in file if line.startswith(field)), "")


def glibc() -> str:
    """Return the version of the C library in use: "2.36"."""
    version = os.confstr("CS_GNU_LIBC_VERSION") or ""
    name, _, number = version.partition(" ")
    if name != "glibc":
        raise IncompatibleError(
            f"the C library of this system is not glibc ({version or 'unknown'}), which native code needs"
        )
    return number


@lru_cache(maxsize=1)
def glibcxx() -> str:
    """Return the highest GLIBCXX symbol version of the libstdc++ in use: "3.4.30". This is the one that torch has
    loaded, which need not be the system's: conda and some wheels bring their own."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = Path(line.split(maxsplit=5)[-1])
        if path.name.startswith("libstdc++.so.6"):
            return read_elf(path).defines["GLIBCXX"]
    raise IncompatibleError("torch has not loaded libstdc++.so.6; native code needs it")
