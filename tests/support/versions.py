"""Tests that only newer versions of torch can pass, each with the reason."""

from __future__ import annotations

import pytest

from aot_backward_exporters import torch_api


def since(minor: str, reason: str) -> pytest.MarkDecorator:
    """Skip a test before torch ``minor`` ("2.13"). ``reason`` completes the sentence "torch before 2.13 …"."""
    return pytest.mark.skipif(not torch_api.at_least(minor), reason=f"torch before {minor} {reason}")
