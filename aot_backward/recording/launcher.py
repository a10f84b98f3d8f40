"""Which of several processes this is, by the environment variables that a launcher such as torchrun sets."""

from __future__ import annotations

import os


def rank_here() -> int | None:
    """The number of this process among those of this machine; None if it is the only one."""
    number, count = (os.environ.get(f"LOCAL_{name}", os.environ.get(name, "")) for name in ("RANK", "WORLD_SIZE"))
    return int(number) if number.isdecimal() and count.isdecimal() and int(number) < int(count) and int(count) > 1 else None
