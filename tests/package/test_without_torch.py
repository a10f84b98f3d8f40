"""Reading and checking a package needs no torch: golden packages are opened and checked in a Python in which importing
it raises."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from aot_backward_runtime.format.dtypes import DTYPES, can_hold

GOLDEN = Path(__file__).parents[1] / "golden"
SCRIPT = """
import sys
sys.modules["torch"] = None  # from now on, importing it raises
{first}
from aot_backward_runtime.errors import PackageError
from aot_backward_runtime.format.manifest_json import from_json, to_json
from aot_backward_runtime.package.references import check_references
from aot_backward_runtime.package.validate import check_members
from aot_backward_runtime.package.archive import open_package
from aot_backward_runtime.package.signatures import admission
archive = open_package(sys.argv[1], admit=admission(None))
archive.verify_digests()
assert from_json(to_json(archive.manifest)) == archive.manifest
for name in archive.manifest.libraries:
    archive.library(name)
kinds = sorted(e.kind for e in archive.manifest.entries.values())
sizes = dict((n, m.size) for n, m in archive.manifest.members.items())
sizes.popitem()
try:
    check_references(archive.manifest)
    check_members(archive.manifest, sizes)
except PackageError as error:
    print(*kinds, error)
"""


def _run(tmp_path: Path, package: str, first: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-c", SCRIPT.format(first=first), str(GOLDEN / package)]
    env = {"AOT_BACKWARD_CACHE": str(tmp_path / "cache")}
    return subprocess.run(command, capture_output=True, text=True, env=env, check=False, timeout=120)


@pytest.mark.parametrize(
    ("package", "kinds"), [("1.3-orders.pt2", "module"), ("1.2-step.pt2", "step"), ("1.1-passes.pt2", "replay")]
)
def test_a_package_is_read_and_checked(tmp_path: Path, package: str, kinds: str) -> None:
    done = _run(tmp_path, package)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{kinds} member ") and done.stdout.endswith(" is missing\n")


def test_it_fails_where_torch_is_imported(tmp_path: Path) -> None:
    done = _run(tmp_path, "1.2-step.pt2", "import aot_backward_runtime.native.plan")
    assert done.returncode == 1 and "import of torch halted" in done.stderr


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_a_fill_is_within_the_range_of_its_dtype(dtype: str) -> None:
    of = getattr(torch, dtype)
    info = torch.finfo(of) if of.is_floating_point or of.is_complex else None if of == torch.bool else torch.iinfo(of)
    assert can_hold(dtype, 1.0)
    if info is None:
        assert can_hold(dtype, 0.0) and not can_hold(dtype, 2.0)
    else:
        assert can_hold(dtype, float(info.max) if isinstance(info, torch.finfo) else 64.0)
        assert not can_hold(dtype, float(info.max) * 1.001)
        assert isinstance(info, torch.finfo) or not can_hold(dtype, 0.5)
