"""Check that this torch has the private names, the Inductor options and the operator namespaces that the project uses.
Run this file first for a new version of torch: it names everything that is missing."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from aot_backward_exporters import torch_api
from aot_backward_exporters.inductor import settings, targets
from aot_backward_runtime.torch_api import SUPPORTED

ROOT = Path(__file__).parents[2]


def test_every_private_name_is_there_that_should_be() -> None:
    gone = {}
    for name, module in torch_api._NAMES.items():
        try:
            getattr(torch_api, name)
        except (AttributeError, ImportError) as error:
            gone[f"{module}.{name}"] = str(error)
    came_later = {
        f"{torch_api._NAMES[n]}.{n}" for n, since in torch_api._SINCE.items() if not torch_api.at_least(since)
    }
    assert gone.keys() == came_later, gone


def test_a_name_of_a_newer_torch_says_which_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "newest"
    monkeypatch.setitem(torch_api._NAMES, name, "torch.nowhere")
    monkeypatch.setitem(torch_api._SINCE, name, "99.1")
    with pytest.raises(
        ImportError,
        match=rf"torch\.nowhere\.newest came with torch 99\.1; this is {torch.__version__.split('+')[0]}.*: pip install",
    ):
        getattr(torch_api, name)
    monkeypatch.setattr(torch, "__version__", "99.1.0+cpu")
    with pytest.raises(ImportError, match=rf"supports torch 2\.11, .*{SUPPORTED[-1]}; this is 99\.1\.0"):
        getattr(torch_api, name)
    assert torch_api.at_least("2.9") and torch_api.at_least("99.1") and not torch_api.at_least("99.10")


def test_every_option_of_inductor_is_there_that_should_be() -> None:
    processor = targets.PROCESSORS["avx2"]
    asked = {**settings.FIXED, "cpp.march": processor.march, "cpp.simdlen": processor.simd_bits}
    have = {name for name in asked if name in torch_api.inductor_config._config}
    assert settings.settings_for(processor).keys() == have and torch_api._OPTIONS_SINCE.keys() <= asked.keys()


def test_every_namespace_of_torchs_own_operators_is_known() -> None:
    code = "import torch; print(*{n.partition('::')[0] for n in torch._C._dispatch_get_all_op_names()})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) - torch_api.NAMESPACES == set()


def test_the_supported_versions_are_those_that_pip_admits() -> None:
    first, last = SUPPORTED[0], f"2.{int(SUPPORTED[-1].partition('.')[2]) + 1}"
    for file in ("pyproject.toml", "runtime/pyproject.toml"):
        wanted = tomllib.loads((ROOT / file).read_text())["project"]["dependencies"]
        assert f"torch>={first},<{last}" in wanted, file
    assert tuple(sorted(SUPPORTED, key=torch_api._numbers)) == SUPPORTED and torch_api.minor() in SUPPORTED
