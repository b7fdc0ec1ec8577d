"""When what was recorded is due again. Pure: time is a parameter."""

from __future__ import annotations


class Pace:
    """Keeps the recorded distances of moments, `speed` times as fast; None: everything is due at once."""

    def __init__(self, speed: float | None) -> None:
        """Raises `ValueError` for a speed that is not above 0."""
        if speed is not None and not 0 < speed < float("inf"):
            raise ValueError(f"speed {speed} is none: give a number above 0, such as 1 for as recorded")
        self._speed = speed
        self._first: tuple[int, float] | None = None

    def wait_s(self, recorded_us: int, now_s: float) -> float:
        """How long what was recorded at `recorded_us` must wait at `now_s`.

        The first moment is due at once, and so is one that is not known (0) or lies before the first.
        """
        if self._speed is None or recorded_us == 0:
            return 0.0
        if self._first is None:
            self._first = (recorded_us, now_s)
        first_us, begun_s = self._first
        due_s = begun_s + max(recorded_us - first_us, 0) / 1_000_000 / self._speed
        return max(due_s - now_s, 0.0)
