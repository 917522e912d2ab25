"""What evidence could not judge: counts for the metrics, and lines for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

# From this share of failures on, people are shown a line about it; below it is in the metrics only.
LARGE_SHARE = 0.1


class Failures(Counter[str]):
    """How often evidence failed or abstained, by `errors/NAME`, `timeouts/NAME`, `abstained/NAME`; and the first reasons."""

    def __init__(self, counts: dict[str, int] | None = None, reasons: dict[str, str] | None = None):
        super().__init__(counts or {})
        self.reasons = reasons or {}

    def __reduce__(self):
        return type(self), (dict(self), self.reasons)

    def add(self, kind: str, reason: str) -> None:
        self[kind] += 1
        self.reasons.setdefault(kind, reason)

    @classmethod
    def joined(cls, parts: Iterable[Failures]) -> Failures:
        """Of several processes or steps, the earlier ones' reasons first."""
        whole = cls()
        for part in parts:
            whole.update(part)
            whole.reasons = {**part.reasons, **whole.reasons}
        return whole

    def lines(self, judged: int, where: str) -> list[str]:
        """What a person should see: evidence that failed for a large share of so many responses, or abstained from all."""
        found = []
        for kind, count in self.items():
            what, _, name = kind.partition("/")
            if count < (judged if what == "abstained" else LARGE_SHARE * judged):
                continue
            did = {"errors": "failed", "timeouts": "took too long"}.get(what, "abstained")
            reason = f", first: {self.reasons[kind][:300]}" if self.reasons.get(kind) else ""
            found.append(f"warning: {where}: evidence '{name}' {did} for {count} of {judged} responses{reason}")
        return found
