"""Small packages for tests: a sound one with one real compiled graph, tools that reassemble its members wrongly, and
raw zip files with arbitrary fields."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from aot_backward.packaging.package_writer import write_package
from aot_backward_exporters.graph import Artifact
from aot_backward_runtime.format.elf import clear_executable_stack, read_elf
from aot_backward_runtime.format.manifest import ConstantSpec, LibrarySpec, Manifest, Target, TensorSpec
from aot_backward_runtime.format.manifest_json import sealed

MANIFEST = "package/extra/aot_backward/manifest.json"
WEIGHTS = "package/extra/aot_backward/weights.safetensors"
EXAMPLES = "package/extra/aot_backward/examples.safetensors"
GRAPH = "tiny.0.forward"
LIBRARY = f"package/data/aotinductor/{GRAPH}/{GRAPH}.so"
METADATA = f"package/data/aotinductor/{GRAPH}/{GRAPH}_metadata.json"

_COMPILE = """
import sys, torch, torch._inductor
from aot_backward_exporters import torch_api
from aot_backward_exporters.toolchain.gcc import adjust_commands
class Tiny(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.bias = torch.nn.Parameter(torch.ones(3, 4)), torch.nn.Parameter(torch.ones(3))
    def forward(self, x):
        return (torch.tanh(torch.nn.functional.linear(x, self.weight, self.bias)),)
x = torch.randn(2, 4)
with torch.no_grad(), adjust_commands("x86-64-v3"):  # torch 2.11 has no cpp.march
    graph = torch.export.export(Tiny(), (x,), strict=False).module(check_guards=False)
    torch._inductor.aot_compile(graph, (x,), options=torch_api.known_options({
        "aot_inductor.package": True, "aot_inductor.package_constants_in_so": False, "always_keep_tensor_constants": True,
        "aot_inductor.output_path": sys.argv[1], "aot_inductor.compile_wrapper_opt_level": "O0",
        "aot_inductor.enable_line_tables": False, "cpp.march": "x86-64-v3", "cpp.simdlen": 256,
    }))
"""


@functools.cache
def tiny_artifact() -> Artifact:
    """Compile ``tanh(x @ weight.T + bias)`` once per machine and torch (20 s), without line tables and symbols."""
    key = hashlib.sha256(f"{torch.__version__}{_COMPILE}".encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"aot-backward-tests-{os.getuid()}" / key
    if not folder.is_dir():
        folder.parent.mkdir(mode=0o700, exist_ok=True)
        build = Path(tempfile.mkdtemp(dir=folder.parent))
        subprocess.run([sys.executable, "-W", "ignore", "-c", _COMPILE, str(build)], check=True)
        (library,) = build.glob("*.wrapper.so")
        subprocess.run(["strip", "--strip-unneeded", str(library)], check=True)
        clear_executable_stack(library)
        if folder.is_dir():
            shutil.rmtree(build)  # another worker was faster
        else:
            build.rename(folder)
    (library,) = folder.glob("*.wrapper.so")
    elf = read_elf(library)
    return Artifact(
        library=library,
        metadata=library.with_name(f"{library.stem}_metadata.json"),
        extern=None,
        constants={"weight": "weight", "bias": "bias"},
        needed=elf.needed,
        glibc=elf.versions["GLIBC"],
        glibcxx=elf.versions["GLIBCXX"],
        operators=(),
    )


def tiny_weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {"weight": torch.randn(3, 4, generator=generator), "bias": torch.randn(3, generator=generator)}


def tiny_input() -> torch.Tensor:
    return torch.linspace(-1, 1, 8).reshape(2, 4)


def tiny_manifest(**changes: Any) -> Manifest:
    artifact = tiny_artifact()
    library = LibrarySpec(
        member="",
        metadata="",
        extern="",
        inputs=(TensorSpec("x", "float32", "cpu", (2, 4), (4, 1)),),
        outputs=(TensorSpec("output[0]", "float32", "cpu", (2, 3), (3, 1)),),
        constants=tuple(ConstantSpec(name, weight) for name, weight in artifact.constants.items()),
        needed=artifact.needed,
        glibc=artifact.glibc,
        glibcxx=artifact.glibcxx,
        nodes=3,
    )
    fields: dict[str, Any] = {
        "format_version": (1, 0),
        "required_features": (),
        "producer": "tests",
        "torch": torch.__version__,
        "target": Target("cpu", march="x86-64-v3"),
        "entries": {},
        "libraries": {GRAPH: library},
        "weights": {},
        "members": {},
    }
    return Manifest(**{**fields, **changes})


def write_tiny(path: Path, weights: Mapping[str, torch.Tensor] | None = None, **changes: Any) -> Manifest:
    """Write the sound package. ``weights`` are added to the graph's two."""
    return write_package(
        path,
        tiny_manifest(**changes),
        {GRAPH: tiny_artifact()},
        {**tiny_weights(), **(weights or {})},
        {"x": tiny_input()},
    )


def taken_apart(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def put_together(
    path: Path, members: Mapping[str, bytes], edit: dict[str, Any] | None = None, *, relist: bool = True
) -> None:
    """Write ``members`` with a changed manifest: ``relist`` rebuilds its ``members``, then ``edit`` replaces fields. A
    manifest that has its SHA-256 gets a new one."""
    members = dict(members)
    manifest = json.loads(members.pop(MANIFEST))
    digest = manifest.pop("sha256", None)
    if relist:
        manifest["members"] = {
            name.removeprefix("package/"): {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            for name, data in members.items()
        }
    for field, value in (edit or {}).items():
        *parents, last = field.split("/")
        functools.reduce(lambda node, key: node[int(key) if isinstance(node, list) else key], parents, manifest)[
            last
        ] = value
    data = json.dumps(manifest).encode()
    write_raw(
        path,
        [*(Raw(name, content) for name, content in members.items()), Raw(MANIFEST, sealed(data) if digest else data)],
    )


@dataclass
class Raw:
    """A member of a raw zip file. None means the correct value. ``central`` and ``local`` replace fields of that header
    only."""

    name: str | bytes
    data: bytes
    central: dict[str, Any] | None = None
    local: dict[str, Any] | None = None
    both: dict[str, Any] | None = None
    gap: bytes = b""  # before the local header


def write_raw(
    path: Path,
    members: list[Raw],
    *,
    before_directory: bytes = b"",
    after: bytes = b"",
    end: dict[str, int] | None = None,
) -> None:
    out, directory = bytearray(), bytearray()
    for member in members:
        out += member.gap
        name = member.name if isinstance(member.name, bytes) else member.name.encode()
        fields: dict[str, Any] = {
            "name": name,
            "flags": 0,
            "method": 0,
            "crc": zlib.crc32(member.data),
            "stored": len(member.data),
            "size": len(member.data),
            "extra": b"",
            "mode": 0o100644 << 16,
            "offset": len(out),
            "comment": b"",
            "version": 20,
        } | (member.both or {})
        local, central = fields | (member.local or {}), fields | (member.central or {})
        out += struct.pack(
            "<IHHHHHIIIHH",
            0x04034B50,
            *(local[k] for k in ("version", "flags", "method")),
            0,
            33,
            *(local[k] for k in ("crc", "stored", "size")),
            len(local["name"]),
            len(local["extra"]),
        )
        out += local["name"] + local["extra"] + member.data
        directory += struct.pack(
            "<IHHHHHHIIIHHHHHII",
            0x02014B50,
            0x0314,
            *(central[k] for k in ("version", "flags", "method")),
            0,
            33,
            *(central[k] for k in ("crc", "stored", "size")),
            len(central["name"]),
            len(central["extra"]),
            len(central["comment"]),
            0,
            0,
            *(central[k] for k in ("mode", "offset")),
        )
        directory += central["name"] + central["extra"] + central["comment"]
    out += before_directory
    last = {"here": len(members), "count": len(members), "length": len(directory), "start": len(out), "comment": 0} | (
        end or {}
    )
    out += directory + struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, *last.values()) + after
    path.write_bytes(out)


def python(code: str, *arguments: object, **environment: str | None) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in another process, with warnings as errors; fail on a signal. None unsets a variable."""
    merged = {k: v for k, v in {**os.environ, **environment}.items() if v is not None}
    command = [sys.executable, "-W", "error", "-c", code, *map(str, arguments)]
    done = subprocess.run(
        command, env=merged, capture_output=True, text=True, timeout=900, cwd=Path(__file__).parents[2]
    )
    assert done.returncode >= 0, f"died of signal {-done.returncode}:\n{done.stderr}"
    return done
