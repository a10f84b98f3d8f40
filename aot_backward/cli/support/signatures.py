"""``--key`` and ``--signature``, for the commands that load a package."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click


def signature_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the two, and refuses them where one would go unused."""

    @functools.wraps(command)
    def checked(*args: Any, signature: str | None, key: Path | None, **kwargs: Any) -> Any:
        if key is None and signature in ("require", "if-present"):
            raise click.UsageError(f"--signature {signature} needs --key PUBLIC.pem", click.get_current_context())
        if key is not None and signature == "off":
            raise click.UsageError("--signature off would not look at --key", click.get_current_context())
        return command(*args, signature=signature, key=key, **kwargs)

    policies = click.Choice(["require", "if-present", "off"])
    when = click.option("--signature", type=policies, help="When the package must be signed; by default always with --key, else never.")
    return key_option("The public key that the package must be signed by.")(when(checked))


def key_option(text: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return click.option("--key", type=click.Path(path_type=Path), metavar="PUBLIC.pem", help=text)
