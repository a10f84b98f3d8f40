"""Faults around packages: native code, the machine it was built for, the file system, processes (docs/reliability.md,
rows 21, 27, 28, 30 to 33, 36, 37 and 48). Tests that could crash run in another process, and a signal fails them."""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import multiprocessing
import os
import pickle
import shutil
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from aot_backward_runtime import AotBackwardError, compatibility
from aot_backward_runtime.errors import ExportError, IncompatibleError, PackageError
from aot_backward_runtime.native.weights import load_examples, load_weights
from aot_backward_runtime.package import code_cache as cache_module
from aot_backward_runtime.package.archive import open_package
from aot_backward_runtime.package.code_cache import CacheError

from ..support import exports
from ..support.packages import (
    GRAPH,
    LIBRARY,
    METADATA,
    put_together,
    python,
    taken_apart,
    tiny_input,
    tiny_manifest,
    tiny_weights,
    write_tiny,
)

pytestmark = pytest.mark.usefixtures("cache")

_GNU_STACK = 0x6474E551

# Reads a package as a loader does, runs its code, and prints the result or the error.
RUN = """
import sys, torch
from aot_backward_runtime.package.archive import open_package
from aot_backward_runtime.errors import AotBackwardError
from aot_backward_runtime.native.weights import load_examples, load_weights
def run(path):
    archive = open_package(path)
    weights = load_weights(archive)
    runner = torch._C._aoti.AOTIModelContainerRunnerCpu(str(archive.library("tiny.0.forward")), 1)
    runner.update_constant_buffer(weights, False, True, True)
    return runner.run([load_examples(archive)["x"]])[0], weights, runner
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    write_tiny(tmp_path / "tiny.pt2")
    return tmp_path / "tiny.pt2"


def expected() -> torch.Tensor:
    weights = tiny_weights()
    return torch.tanh(torch.nn.functional.linear(tiny_input(), weights["weight"], weights["bias"]))


def files_below(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


@contextlib.contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    folder.mkdir(exist_ok=True)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"needs the right to mount a file system: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_row_21_native_code_of_a_damaged_package_is_refused_or_right(
    package: Path, tmp_path: Path, cache: Path
) -> None:
    """Flipped bits in the code, its headers, the weights and around them cause no wrong number and no signal."""
    code = (
        RUN
        + """
import os, random, shutil
data, chance, right = bytearray(open(sys.argv[1], "rb").read()), random.Random(1), run(sys.argv[1])[0]
code, weights = data.find(b"\\x7fELF"), data.find(b'"data_offsets"')
refused = same = 0
for i in range(120):
    shutil.rmtree(os.environ["AOT_BACKWARD_CACHE"], ignore_errors=True)  # else sound code would be found there, and the damaged left alone
    at = chance.choice([chance.randrange(len(data)), code + chance.randrange(200), weights + chance.randrange(400), chance.randrange(400)])
    data[at] ^= 1 << i % 8
    open(sys.argv[2], "wb").write(data)
    data[at] ^= 1 << i % 8
    try:
        out = run(sys.argv[2])[0]
    except AotBackwardError as error:
        assert sys.argv[2] in str(error), error
        refused += 1
    else:
        assert torch.equal(out, right)
        same += 1
print(refused, same, right.flatten().tolist())
"""
    )
    done = python(
        "import warnings; warnings.simplefilter('ignore', ResourceWarning)\n" + code, package, tmp_path / "damaged.pt2"
    )
    refused, same, numbers = done.stdout.split(maxsplit=2) if done.returncode == 0 else pytest.fail(done.stderr)
    assert int(refused) > 80 and int(refused) + int(same) == 120
    torch.testing.assert_close(torch.tensor(json.loads(numbers)).reshape(2, 3), expected())


def test_row_27_what_lies_in_the_cache_is_never_run_unless_it_matches(package: Path) -> None:
    path = open_package(package).library(GRAPH)
    good = path.read_bytes()
    path.write_bytes(good[: len(good) // 2])
    assert open_package(package).library(GRAPH).read_bytes() == good
    path.write_bytes(good[:-1] + b"!")
    assert open_package(package).library(GRAPH).read_bytes() == good
    elsewhere = path.with_name("elsewhere")
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    assert not open_package(package).library(GRAPH).is_symlink()
    path.chmod(0o666)
    assert stat.S_IMODE(open_package(package).library(GRAPH).stat().st_mode) == 0o600
    path.unlink()
    path.mkdir()
    (path / "something").mkdir()
    assert open_package(package).library(GRAPH).read_bytes() == good
    for level in (path.parent, path.parent.parent):
        shutil.rmtree(level)
        level.write_bytes(b"a file")
        assert open_package(package).library(GRAPH).read_bytes() == good
    assert files_below(path.parent) == sorted(p.name for p in path.parent.iterdir())


def _library_with(change: str) -> bytes:
    from ..support.packages import tiny_artifact

    data = bytearray(tiny_artifact().library.read_bytes())
    start, entry, count = struct.unpack_from("<Q", data, 32)[0], *struct.unpack_from("<HH", data, 54)
    stack = next(
        o for o in range(start, start + entry * count, entry) if struct.unpack_from("<I", data, o)[0] == _GNU_STACK
    )
    match change:
        case "stack":
            data[stack + 4] |= 1
        case "machine":
            data[18:20] = b"\xb7\0"
        case "none":
            data[:4] = b"\0" * 4
        case "cut":
            del data[len(data) * 3 // 4 :]
        case "needed":
            at = data.index(b"libtorch_cpu.so\0")
            data[at : at + 5] = b"libXX"
        case "glibc":
            at = data.index(b"GLIBCXX_3.4\0")
            data[at : at + 12] = b"GLIBCXX_9.9\0"
    return bytes(data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("stack", "asks for an executable stack"),
        ("machine", "is code for aarch64; the manifest says x86_64"),
        ("none", "not an ELF file"),
        ("cut", "cut short: "),
        ("needed", "is linked with libXXrch_cpu.so, which the manifest does not list"),
        ("glibc", "asks for GLIBCXX 9.9; the manifest says 3.4"),
    ],
)
def test_row_27_a_library_is_refused_by_its_headers(package: Path, change: str, message: str) -> None:
    """All digests are right, as if the author had built it so."""
    put_together(package, {**taken_apart(package), LIBRARY: _library_with(change)})
    with pytest.raises(
        PackageError, match=f"corrupt package {package}: member {LIBRARY.removeprefix('package/')}:? .*{message}"
    ):
        open_package(package).library(GRAPH)


def test_row_27_a_library_that_the_linker_refuses_is_an_error_of_the_opener(package: Path) -> None:
    """The headers are right but a symbol is missing. There is no signal."""
    data = _library_with("").replace(b"aoti_torch_empty_strided\0", b"aoti_torch_empty_strideX\0")
    assert data != _library_with("")
    put_together(package, {**taken_apart(package), LIBRARY: data})
    done = python(RUN + "run(sys.argv[1])", package)
    assert done.returncode == 1 and "aoti_torch_empty_strideX" in done.stderr


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (
            "torch",
            "2.1.0+cpu",
            rf"built with torch 2.1.0\+cpu, this is torch {torch.__version__}".replace("+", r"\+").replace(r"\\", "\\"),
        ),
        ("torch", "12.13.0", "built with torch 12.13.0, this is torch 2"),
        ("target/machine", "aarch64", "built for linux aarch64, this is linux x86_64"),
        ("target/cpu_flags", ["avx2", "amx9000"], "built for x86-64-v3 and needs the CPU flags amx9000, which"),
        (f"libraries/{GRAPH}/glibc", "2.100", "needs glibc 2.100, this machine has 2"),
        (f"libraries/{GRAPH}/glibcxx", "3.4.100", r"needs GLIBCXX of libstdc\+\+ 3.4.100, this machine has 3.4"),
        ("target", {"device": "cuda", "cuda_arch": "sm_90", "cuda": "13.0"}, "built for sm_90 with CUDA 13.0, this "),
    ],
)
def test_row_28_another_machine_is_named_with_this_one(package: Path, field: str, value: Any, message: str) -> None:
    put_together(package, taken_apart(package), {field: value})
    manifest = open_package(package).manifest
    if manifest.target.device == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine may run it")
    with pytest.raises(IncompatibleError, match=f"{message}.*aot-backward export FILE.py:NAME -o PACKAGE"):
        compatibility.check_target(manifest)


def test_row_28_what_fits_passes(package: Path) -> None:
    manifest = open_package(package).manifest
    compatibility.check_target(manifest)
    compatibility.check_target(manifest, torch.device("cpu"))
    compatibility.check_target(tiny_manifest(torch="1.0", libraries={}))  # without native code it can always run
    with pytest.raises(IncompatibleError, match="built for cpu, but cuda:1 was asked for"):
        compatibility.check_target(manifest, torch.device("cuda:1"))


@pytest.mark.parametrize(
    ("arch", "runs"),
    [("sm_90", True), ("sm_90a", True), ("sm_91", False), ("sm_89", False), ("sm_100", False), ("sm_80a", False)],
)
def test_row_28_gpu_architectures(arch: str, runs: bool) -> None:
    assert compatibility._runs(arch, 9, 0) is runs
    assert (
        compatibility._runs("sm_90", 9, 1)
        and not compatibility._runs("sm_90a", 9, 1)
        and compatibility._runs("sm_120", 12, 1)
    )


# Writes a package in a forked child that kills itself right before or after its n-th call that touches the file system.
KILL = """
import os, signal, sys, torch
from pathlib import Path
from aot_backward.packaging.package_writer import write_package
from aot_backward_runtime.package.archive import open_package
from tests.support.packages import tiny_artifact, tiny_manifest, tiny_weights, write_tiny
target, calls = Path(sys.argv[1]), {"write", "flush", "fsync", "replace", "open", "close", "seek", "truncate", "unlink", "__exit__"}
manifest = write_tiny(target)
old = target.read_bytes()
tiny_artifact()
outcomes = []
for when in ("c_call", "c_return"):
    for n in range(1, 10_000):
        child = os.fork()
        if not child:
            left = n
            def watch(frame, event, function):
                global left
                if event == when and function.__name__ in calls:
                    left -= 1
                    if not left: os.kill(os.getpid(), signal.SIGKILL)
            sys.setprofile(watch)
            write_tiny(target, {"new": torch.ones(500)})
            sys.setprofile(None)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        archive = open_package(target)
        archive.verify_digests()
        outcomes.append("old" if target.read_bytes() == old else "new")
        assert archive.manifest.weights.keys() == ({"weight", "bias"} if outcomes[-1] == "old" else {"weight", "bias", "new"})
        target.write_bytes(old)
        if not status: break
        assert os.WTERMSIG(status) == signal.SIGKILL, status
print(outcomes.count("old"), outcomes.count("new"), len(outcomes))
"""


def test_row_30_killed_at_every_step_of_an_export() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:  # a sync costs no time there; there are several hundred
        done = python(KILL, Path(folder, "target.pt2"))
    assert done.returncode == 0, done.stderr
    old, new, together = map(int, done.stdout.split())
    assert together == old + new and old > 40 and new >= 4


def test_row_31_disk_full(tmp_path: Path) -> None:
    """A small file system, then a file size limit, which any user can set: the old package remains at every size."""
    with mounted(tmp_path / "small", "size=64k") as folder:
        target = folder / "target.pt2"
        target.write_bytes(b"old")
        with pytest.raises(ExportError, match=f"cannot write package {target}: No space left on device"):
            write_tiny(target)
        assert target.read_bytes() == b"old" and files_below(folder) == ["target.pt2"]


def test_row_31_a_limit_on_file_sizes(tmp_path: Path) -> None:
    code = """
import resource, sys, torch
from pathlib import Path
from aot_backward_runtime.package.archive import open_package
from aot_backward_runtime.errors import ExportError
from tests.support.packages import write_tiny
target = Path(sys.argv[1])
write_tiny(target)
size, old = target.stat().st_size, target.read_bytes()
for limit in (0, 1, 500, 70_000, size // 2, size - 1, size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try: write_tiny(target, {"new": torch.ones(500)})
    except ExportError as error: assert f"cannot write package {target}: File too large" in str(error), error
    else: raise AssertionError(limit)
    assert target.read_bytes() == old and list(target.parent.iterdir()) == [target]
"""
    (tmp_path / "folder").mkdir()
    done = python(code, tmp_path / "folder/target.pt2")
    assert done.returncode == 0, done.stderr


def test_row_31_targets_that_cannot_be_written(tmp_path: Path) -> None:
    for target, message in (
        (tmp_path / "none/x.pt2", "No such file"),
        (tmp_path, "it is a folder"),
        (tmp_path / ("x" * 300), "too long"),
    ):
        with pytest.raises(ExportError, match=f"cannot write package {target}: .*{message}"):
            write_tiny(target)
    with mounted(tmp_path / "fixed", "size=1m") as folder:
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        with pytest.raises(ExportError, match=r"cannot write package .*fixed/x.pt2: Read-only file system"):
            write_tiny(folder / "x.pt2")


def test_row_31_a_folder_of_another_user(tmp_path: Path) -> None:
    """Permissions do not bind root, so the writer becomes nobody."""
    code = """
import os, sys, tempfile
from pathlib import Path
from aot_backward_runtime.errors import ExportError
from tests.support.packages import tiny_artifact, write_tiny
artifact = tiny_artifact()
import tests.support.packages, shutil, dataclasses
with tempfile.TemporaryDirectory() as folder:
    for name in ("library", "metadata"):
        shutil.copy(getattr(artifact, name), folder)
    tests.support.packages.tiny_artifact = lambda: dataclasses.replace(
        artifact, library=Path(folder, artifact.library.name), metadata=Path(folder, artifact.metadata.name))
    target = Path(folder, "x.pt2")
    target.write_bytes(b"old")
    os.chmod(folder, 0o555)
    if os.getuid() == 0: os.seteuid(65534)
    try: write_tiny(target)
    except ExportError as error: print(error)
    print(target.read_bytes())
    if os.getuid() == 0: os.seteuid(0)
    os.chmod(folder, 0o755)
"""
    done = python(code)
    assert (
        "cannot write package" in done.stdout and "x.pt2: Permission denied" in done.stdout and "b'old'" in done.stdout
    ), done.stderr


def test_row_31_a_link_to_a_package_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "latest.pt2").symlink_to("run1.pt2")
    write_tiny(tmp_path / "latest.pt2")
    assert (tmp_path / "latest.pt2").is_symlink() and open_package(tmp_path / "run1.pt2").top == "package"


def test_row_31_the_chosen_cache_must_do(
    package: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refused(message: str) -> None:
        with pytest.raises(CacheError, match=f"{message}.*AOT_BACKWARD_CACHE"):
            open_package(package).library(GRAPH)

    cache.write_bytes(b"a file")
    refused(f"{cache}: File exists")
    cache.unlink()
    cache.mkdir(mode=0o700)
    cache.chmod(0o777)
    refused(f"{cache}: others can write to it .mode 0777; chmod go-w")
    cache.chmod(0o700)
    open_package(package).library(GRAPH)
    (cache / "lib").chmod(0o770)
    refused(f"{cache}/lib: others can write to it")
    (cache / "lib").chmod(0o700)
    if os.getuid() == 0:
        os.chown(cache, 65534, 65534)
        refused(f"{cache}: it belongs to user 65534, not to 0")
        os.chown(cache, 0, 0)
    for options, message in (("noexec,mode=700", "mounted noexec"), ("size=64k,mode=700", "No space left on device")):
        with mounted(tmp_path / "mounted", options) as folder:
            monkeypatch.setenv("AOT_BACKWARD_CACHE", str(folder))
            refused(message)
            assert files_below(folder) == []
    with mounted(tmp_path / "mounted", "mode=700") as folder:
        library = open_package(package).library(GRAPH)
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        assert open_package(package).library(GRAPH) == library  # nothing to write, so a read-only cache suffices
        put_together(package, {**taken_apart(package), METADATA: b"{}"})
        refused("Read-only file system")


def test_row_31_nobody_else_can_put_another_folder_in_the_caches_place(
    package: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    above = tmp_path / "above"
    (above / "between").mkdir(parents=True)
    link = tmp_path / "link"
    link.symlink_to(above / "between/cache")
    (above / "between/cache").mkdir(mode=0o700)
    for chosen in (above / "between/cache", link):  # also through a link
        monkeypatch.setenv("AOT_BACKWARD_CACHE", str(chosen))
        for mode in (0o777, 0o757):
            above.chmod(mode)
            with pytest.raises(
                CacheError, match=rf"others can write to {above}, above it, .* .mode 0{mode:o}; chmod go-w"
            ):
                open_package(package).library(GRAPH)
        for mode in (0o1777, 0o755):
            above.chmod(mode)
            open_package(package).library(GRAPH)
        if os.getuid() == 0:
            os.chown(above, 65534, 0)
            with pytest.raises(CacheError, match=f"{above}, above it, belongs to user 65534, who can put another"):
                open_package(package).library(GRAPH)
            os.chown(above, 0, 65534)
            above.chmod(0o775)
            with pytest.raises(CacheError, match=f"others can write to {above}, above it"):
                open_package(package).library(GRAPH)
            os.chown(above, 0, 0)
            open_package(package).library(GRAPH)  # only root is in the group
            above.chmod(0o755)


def test_too_many_open_files_are_no_fault_of_the_cache_folder(package: Path) -> None:
    """For each number of free descriptors, the result is right or the error names the cause."""
    code = (
        RUN
        + """
import os, resource
right = run(sys.argv[1])[0]
os.environ["AOT_BACKWARD_CACHE"] += "/other"
outcomes = []
for left in range(12):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1 + left, hard))
    try:
        out = run(sys.argv[1])[0]
        assert torch.equal(out, right)
        outcomes.append("right")
        break
    except AotBackwardError as error:
        assert "Too many open files" in str(error) and "AOT_BACKWARD_CACHE" not in str(error), error
        outcomes.append("refused")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
print(outcomes)
"""
    )
    done = python(code, package)
    assert done.returncode == 0 and done.stdout.count("refused") >= 2 and "right" in done.stdout, (
        done.stdout + done.stderr
    )


def test_row_31_without_a_usable_home_a_temporary_folder_serves(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, temporary = tmp_path / "home", tmp_path / "tmp"
    home.mkdir()
    temporary.mkdir()
    monkeypatch.delenv("AOT_BACKWARD_CACHE")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    monkeypatch.setattr(cache_module, "_temporary", None)
    assert open_package(package).library(GRAPH).is_relative_to(home / ".cache/aot-backward/lib")
    assert stat.S_IMODE((home / ".cache/aot-backward").stat().st_mode) == 0o700
    (home / ".cache/aot-backward").chmod(0o777)  # now anybody could put code there
    assert open_package(package).library(GRAPH).relative_to(temporary).parts[0].startswith("aot-backward-")
    monkeypatch.setattr(cache_module, "_temporary", None)
    with mounted(temporary, "noexec") as folder:
        with pytest.raises(CacheError, match=f"cannot extract native code into {folder}/aot-backward-.*noexec"):
            open_package(package).library(GRAPH)
        assert cache_module._temporary is not None
        cache_module._remove(*cache_module._temporary)
        assert list(folder.iterdir()) == []


def test_row_31_the_temporary_folder_goes_with_its_process(package: Path, tmp_path: Path) -> None:
    code = RUN + "out, weights, runner = run(sys.argv[1]); print(open_package(sys.argv[1]).library('tiny.0.forward'))"
    (tmp_path / "tmp").mkdir()
    done = python(code, package, HOME="/proc/no such home", AOT_BACKWARD_CACHE=None, TMPDIR=str(tmp_path / "tmp"))
    assert done.stdout.startswith(f"{tmp_path}/tmp/aot-backward-"), done.stderr
    assert list((tmp_path / "tmp").iterdir()) == []


def test_row_31_no_home_folder_at_all(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AOT_BACKWARD_CACHE")
    monkeypatch.setattr(cache_module, "_temporary", None)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(
        Path, "expanduser", lambda self: (_ for _ in ()).throw(RuntimeError("Could not determine home directory."))
    )
    library = open_package(package).library(GRAPH)
    assert library.is_relative_to(tmp_path) and library.parts[-4].startswith("aot-backward-")
    load_weights(open_package(package))


def test_row_32_two_exporters_one_target(tmp_path: Path) -> None:
    code = """
import sys, torch
from pathlib import Path
from tests.support.packages import write_tiny
target, name, other = sys.argv[1:]
Path(target + name).touch()
while not Path(target + other).exists(): pass  # or the first would be done before the second has imported torch
for _ in range(30): write_tiny(target, {name: torch.ones(1000)})
"""
    target = tmp_path / "target.pt2"
    write_tiny(target, {"a": torch.ones(1000)})
    command, here = [sys.executable, "-c", code, str(target)], Path(__file__).parents[2]
    writers = [subprocess.Popen([*command, *names], cwd=here) for names in ("ab", "ba")]
    seen = set()
    while any(w.poll() is None for w in writers):
        archive = open_package(target)  # row 33: an open archive stays whole while its file is replaced
        archive.verify_digests()
        (name,) = load_weights(archive).keys() - {"weight", "bias"}
        seen.add(name)
    assert [w.wait() for w in writers] == [0, 0] and seen and seen <= {"a", "b"}
    assert [p.name for p in tmp_path.iterdir() if p.name.endswith(".tmp")] == []


def test_row_33_an_open_archive_outlives_its_file(package: Path) -> None:
    archive, weights = open_package(package), load_weights(open_package(package))
    write_tiny(package, {"weight": torch.zeros(3, 4)})
    assert torch.equal(weights["weight"], tiny_weights()["weight"])
    assert torch.equal(load_weights(archive)["weight"], weights["weight"])
    assert load_weights(open_package(package))["weight"].count_nonzero() == 0
    package.unlink()
    archive.verify_digests()
    assert archive.library(GRAPH).is_file()


def test_a_package_written_over_in_place_is_refused(package: Path) -> None:
    archive = open_package(package)
    package.write_bytes(package.read_bytes()[:2000])
    with pytest.raises(
        PackageError,
        match=f"corrupt package {package}: it ended at byte 2000 while it was read; was it overwritten in place",
    ):
        archive.verify_digests()


def test_row_48_weights_that_were_read_stay_whatever_becomes_of_the_file(package: Path) -> None:
    """Overwrite or truncate the file in another process: a map of it would end the process with a signal."""
    code = (
        RUN
        + """
path = sys.argv[1]
whole = open(path, "rb").read()
archive = open_package(path)
weights, examples = load_weights(archive), load_examples(archive)
other = open_package(path)
for change in (b"", whole[:5000], bytes(len(whole)), whole[::-1]):
    with open(path, "r+b") as file:
        file.truncate(0)
        file.write(change)
    assert float(weights["weight"].sum()) and examples["x"].shape == (2, 4)
    for read in (lambda: other.library("tiny.0.forward"), lambda: load_weights(other), lambda: load_examples(other), other.verify_digests):
        try:
            read()
        except AotBackwardError as error:
            assert "corrupt package" in str(error), error
        else:
            raise AssertionError(change[:10])
print(weights["weight"].flatten().tolist())
"""
    )
    done = python(code, package)
    assert done.returncode == 0, done.stderr
    torch.testing.assert_close(torch.tensor(json.loads(done.stdout)).reshape(3, 4), tiny_weights()["weight"])


IN_PLACE = """
import sys
import torch
from aot_backward_runtime import AotBackwardError, load

path, other = sys.argv[1:]
x = torch.randn(3, 8)

def called(model):
    model.zero_grad()
    y = model(x)
    y.square().sum().backward()
    return [y.detach(), *(p.grad.clone() for p in model.parameters())]

model, late = load(path).module(), load(path).module()
before = called(model)
whole = open(other, "rb").read()
for change in (whole, whole[:5000], b""):
    with open(path, "r+b") as file:  # as cp does
        file.truncate(0)
        file.write(change)
    for loaded in (model, late):
        assert all(map(torch.equal, called(loaded), before))
    try:
        again = load(path).module()
    except AotBackwardError as error:
        assert change != whole, error
    else:
        assert change == whole, again
"""


def test_row_48_a_loaded_package_goes_on_where_its_file_is_overwritten_in_place(tmp_path: Path) -> None:
    """The file is overwritten with ``cp``, truncated and emptied, for a package that was called before and for one that
    was not. This runs in another process, since a map of the file would end it with a signal."""
    path = shutil.copy(exports.module("mlp", dynamic=False), tmp_path / "model.pt2")
    done = python(IN_PLACE, path, exports.module("mlp", dynamic=True))
    assert done.returncode == 0, done.stderr


def test_an_open_package_can_be_neither_copied_nor_pickled(package: Path) -> None:
    for way in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(
            AotBackwardError, match=rf"package \({package}\) can be neither copied nor pickled: load it again"
        ):
            way(open_package(package))


def _extract(path: Path) -> str:
    return str(open_package(path).library(GRAPH))


def test_many_processes_and_threads_extract_at_once(package: Path, cache: Path) -> None:
    with multiprocessing.get_context("fork").Pool(8) as pool:
        libraries = set(pool.map(_extract, [package] * 64))
    errors: list[BaseException] = []

    def again() -> None:
        try:
            for _ in range(10):
                folder = _extract(package)
                if threading.current_thread().name == "spoiler":
                    Path(folder).write_bytes(b"spoilt")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=again, name="spoiler" if i == 0 else None) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(libraries) == 1 and not [e for e in errors if not isinstance(e, PackageError)]
    assert Path(_extract(package)).stat().st_size > 100 and len(files_below(cache)) == 2


def test_row_36_a_child_that_exits_leaves_the_parents_files(package: Path, tmp_path: Path) -> None:
    code = (
        RUN
        + """
import gc, multiprocessing, os
def child(path):
    out, weights, runner = run(path)
    assert torch.equal(out, expected)
    del out, weights, runner, globals()["archive"], globals()["weights"]
    gc.collect()
if __name__ == "__main__":
    archive = open_package(sys.argv[1])
    weights = load_weights(archive)
    library = archive.library("tiny.0.forward")
    expected = run(sys.argv[1])[0]
    for how in ("fork", "exit", "system exit"):
        if how == "fork":
            process = multiprocessing.get_context("fork").Process(target=child, args=(sys.argv[1],))
            process.start(); process.join(); assert process.exitcode == 0
        else:
            pid = os.fork()
            if not pid:
                child(sys.argv[1])
                os._exit(0) if how == "exit" else sys.exit(0)
            assert os.waitpid(pid, 0)[1] == 0
        assert library.is_file(), how
        archive.verify_digests()
    assert torch.equal(run(sys.argv[1])[0], expected)
    print(library)
"""
    )
    (tmp_path / "tmp").mkdir()
    done = python(
        code, package, AOT_BACKWARD_CACHE=None, HOME="/proc/none", TMPDIR=str(tmp_path / "tmp"), OMP_NUM_THREADS="1"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{tmp_path}/tmp/aot-backward-") and list((tmp_path / "tmp").iterdir()) == []
    assert package.is_file()


def test_row_36_a_child_that_outlives_its_parent_makes_a_folder(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AOT_BACKWARD_CACHE")
    monkeypatch.setenv("HOME", "/proc/none")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(cache_module, "_temporary", (os.getpid() + 1, tmp_path / "gone"))
    assert open_package(package).library(GRAPH).parts[-4].startswith("aot-backward-")
    cache_module._remove(os.getpid() + 1, tmp_path)
    assert package.is_file()


def test_row_37_a_thousand_loads_and_drops(package: Path, cache: Path) -> None:
    def once() -> None:
        archive = open_package(package)
        archive.library(GRAPH)
        weights, examples = load_weights(archive), load_examples(archive)
        weights["weight"].add_(1)
        assert examples["x"].shape == (2, 4)

    def rejected() -> None:
        with pytest.raises(PackageError):
            open_package(package.with_name("damaged.pt2"))

    package.with_name("damaged.pt2").write_bytes(package.read_bytes()[:-1])
    process = psutil.Process()

    def state() -> tuple[int, int, list[str]]:
        gc.collect()
        return process.num_fds(), len(process.memory_maps(grouped=False)), files_below(cache)

    for _ in range(50):
        once()
        rejected()
    before, memory = state(), process.memory_info().rss
    for _ in range(1000):
        once()
        rejected()
    after = state()
    assert after[0] == before[0] and after[2] == before[2] and after[1] - before[1] < 5
    assert process.memory_info().rss - memory < 4 << 20


def test_signals_in_subprocesses_are_failures() -> None:
    """Check the helper that the tests above use to run code elsewhere."""
    with pytest.raises(AssertionError, match=f"died of signal {int(signal.SIGSEGV)}"):
        python("import ctypes; ctypes.string_at(8)")
