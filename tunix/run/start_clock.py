"""Time of a start, by part: from the beginning of a run until its first step may begin."""

import time


class StartClock:
    """Seconds of each part of a start. The clock runs from its making on; a part ends where `end` names it."""

    def __init__(self) -> None:
        self.parts: dict[str, float] = {}
        self._last = time.monotonic()

    def end(self, part: str) -> None:
        """Count the time since the last part ended as that of this part."""
        now = time.monotonic()
        self.parts[part] = self.parts.get(part, 0.0) + now - self._last
        self._last = now

    def __str__(self) -> str:
        parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in self.parts.items())
        return f"ready for the first step after {sum(self.parts.values()):.1f} s: {parts}"
