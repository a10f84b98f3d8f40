"""The option ``--tune``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click


def tune_option(words: str) -> Callable[..., Any]:
    """``none`` or ``quick``, by default what the environment says; ``words``: what it does for this command."""
    return click.option(
        "--tune",
        type=click.Choice(["none", "quick"]),
        envvar="AOT_BACKWARD_TUNE",
        default="quick",
        show_default=True,
        show_envvar=True,
        help=words,
    )
