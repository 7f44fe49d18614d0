"""Time that the start of a run takes, by part: from its beginning until its first step may begin."""

import time


class StartClock:
    """Seconds of each part of a start. The clock begins when it is made; `end` names the part that ends then."""

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
