"""The decision who makes batches: a thread ahead of the caller, or the caller when it asks. Measured, then settled."""

from __future__ import annotations

MEASURED_BATCHES = 12
LEAST_SECONDS = 0.03  # of a measurement: shorter ones are noise
LEAST_GAIN = 0.1  # a thread is tried if it could save at least this share of the time
KEPT_EPOCHS = 8  # that begin before it is measured again, because the loop around a loader may change
MOST_TIME = 0.95  # a thread is kept if a batch takes at most this share of the time without one


class PrefetchPolicy:
    """Measures how long the caller waited for each batch, and how long it was busy before it asked for the next.

    A thread can hide the shorter of the two times in the longer. If that would save enough, a thread is tried, and kept
    if batches then come faster. They do not where the caller needs all cores itself. ``always`` uses a thread without
    measuring: with a GPU, the caller does not wait for the CPU.
    """

    def __init__(self, allowed: bool, always: bool = False) -> None:
        self.threaded, self.settled, self._measured = allowed and always, always or not allowed, False
        self._batches, self._wait, self._busy = 0, 0.0, 0.0
        self._alone, self._kept = 0.0, 0

    def __str__(self) -> str:
        if not self.settled:
            return "measuring"
        return "made ahead in a thread" if self.threaded else "made when asked for"

    def begin(self) -> None:
        """Keep what was found for some epochs, then measure again.

        A measurement that an epoch was too short for continues in the next.
        """
        self._kept += self._measured
        if self._kept < KEPT_EPOCHS:
            return
        self.threaded, self.settled, self._measured, self._kept = False, False, False, 0
        self._batches, self._wait, self._busy = 0, 0.0, 0.0

    def note(self, wait: float, busy: float) -> bool:
        """Count one batch: seconds waited for it, seconds busy before it. Return True if ``threaded`` has changed."""
        self._batches += 1
        if self._batches <= 2:  # the first ones page in buffers and start the thread
            return False
        self._wait, self._busy = self._wait + wait, self._busy + busy
        total = self._wait + self._busy
        if self._batches < MEASURED_BATCHES + 2 or total < LEAST_SECONDS:
            return False
        a_batch = total / (self._batches - 2)
        hidden = min(self._wait, self._busy) / total
        self._batches, self._wait, self._busy = 0, 0.0, 0.0
        if self.threaded:
            self.settled, self._measured, self.threaded = True, True, a_batch < MOST_TIME * self._alone
            return not self.threaded
        if hidden < LEAST_GAIN:
            self.settled = self._measured = True
            return False
        self._alone, self.threaded = a_batch, True
        return True
