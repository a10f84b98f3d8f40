"""``aot-backward sign OUT.pt2 --key private.pem``."""

from __future__ import annotations

import os
from pathlib import Path

import click

from .support.failures import EXIT_CODES, debug_option


@click.command(epilog=EXIT_CODES)
@click.argument("package", type=click.Path(path_type=Path), metavar="OUT.pt2")
@click.option(
    "--key",
    required=True,
    type=click.Path(path_type=Path),
    metavar="PRIVATE.pem",
    help="Your private key, on an elliptic curve.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="OUT.pt2.sig",
    help="The file for the signature. By default, next to OUT.pt2.",
)
@click.option(
    "--password-env", metavar="VARIABLE", help="The environment variable that holds the password of an encrypted key."
)
@debug_option
def sign(package: Path, key: Path, output: Path | None, password_env: str | None) -> None:
    """Compare OUT.pt2 with its digests, then sign all of its bytes. With your public key, loading can then require that
    they are unchanged.

    Needs the OpenSSF model-signing library: pip install 'aot-backward[sign]'.
    """
    password = None
    if password_env is not None:
        password = os.environ.get(password_env)
        if password is None:
            raise click.UsageError(
                f"--password-env: the variable {password_env} is not set", click.get_current_context()
            )
    from ..commands.sign import sign as sign_package

    click.echo(f"wrote {sign_package(package, key=key, output=output, password=password)}")
