"""Reasons, counted: as many as are kept, and as few as are shown, however many different ones a script gives."""

from __future__ import annotations

from collections import Counter

_KEPT, _SHOWN = 256, 12
REST = "(other reasons)"


class Reasons(Counter[str]):
    """How often each reason was given. Of more than 256 different ones the rarer half is added up as :data:`REST`."""

    def note(self, reason: str) -> None:
        self[reason] += 1
        if len(self) > _KEPT:
            rest = self.pop(REST, 0)
            for rare, count in self.most_common()[_KEPT // 2 :]:
                del self[rare]
                rest += count
            self[REST] = rest

    def shown(self) -> dict[str, int]:
        """The most frequent, and how many passes had another one."""
        first = [(reason, count) for reason, count in self.most_common(_SHOWN + 1) if reason != REST][:_SHOWN]
        rest = sum(self.values()) - sum(count for _, count in first)
        return dict(first) | ({REST: rest} if rest else {})
