"""Find which of several processes this is, by the environment variables that a launcher such as torchrun sets."""

from __future__ import annotations

import os


def rank_here() -> int | None:
    """Return the number of this process among the processes of this machine; None if it is the only one."""
    return _number("LOCAL_RANK", "LOCAL_WORLD_SIZE") if "LOCAL_RANK" in os.environ else rank_of_all()


def rank_of_all() -> int | None:
    """Return the number of this process among the processes of all machines; None if it is the only one."""
    return _number("RANK", "WORLD_SIZE")


def _number(rank: str, size: str) -> int | None:
    number, count = os.environ.get(rank, ""), os.environ.get(size, "")
    return (
        int(number)
        if number.isdecimal() and count.isdecimal() and int(number) < int(count) and int(count) > 1
        else None
    )
