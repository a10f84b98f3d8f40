"""Which of several processes this is, where a launcher such as torchrun has started it: the report of all is one process's to print."""

from __future__ import annotations

import os


def rank_of_several() -> int | None:
    """The launcher's number of this process; None where it is the only one."""
    number, count = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    return int(number) if number.isdecimal() and count.isdecimal() and int(count) > 1 else None
