"""Whether a thread should make the batches ahead, or the caller make them when it asks: measured, then settled."""

from __future__ import annotations

LOOKS = 12  # batches that a measurement takes
LEAST_SECONDS = 0.03  # and the time it takes at least: shorter ones are noise
WORTH = 0.1  # the share of the time that a thread could save at best, below which none is tried
FASTER = 0.95  # what a batch must take with a thread, of what it takes without


class PrefetchPolicy:
    """Sees how long each batch kept the caller waiting, and how long the caller was busy before it asked again.

    A thread can hide the smaller of the two behind the other. If that is much, one is tried, and kept if batches then
    come faster: on a machine whose cores the caller needs itself they do not. ``always`` asks for one without a look:
    where a GPU works, what the caller waits for is not the CPU.
    """

    def __init__(self, allowed: bool, always: bool = False) -> None:
        self.threaded, self.settled, self._measured = allowed and always, always or not allowed, False
        self._batches, self._wait, self._busy = 0, 0.0, 0.0
        self._alone = 0.0

    def __str__(self) -> str:
        if not self.settled:
            return "measuring"
        return "made ahead in a thread" if self.threaded else "made when asked for"

    def begin(self) -> None:
        """An epoch begins: it is measured anew, since a loop that validates is another than one that trains."""
        if self._measured:
            self.threaded, self.settled, self._measured = False, False, False
        self._batches, self._wait, self._busy = 0, 0.0, 0.0

    def note(self, wait: float, busy: float) -> bool:
        """Notes one batch: seconds waited for it, seconds busy before. True when ``threaded`` has changed."""
        self._batches += 1
        if self._batches <= 2:  # buffers are paged in, a thread starts
            return False
        self._wait, self._busy = self._wait + wait, self._busy + busy
        total = self._wait + self._busy
        if self._batches < LOOKS + 2 or total < LEAST_SECONDS:
            return False
        a_batch = total / (self._batches - 2)
        hidden = min(self._wait, self._busy) / total
        self._batches, self._wait, self._busy = 0, 0.0, 0.0
        if self.threaded:
            self.settled, self._measured, self.threaded = True, True, a_batch < FASTER * self._alone
            return not self.threaded
        if hidden < WORTH:
            self.settled = self._measured = True
            return False
        self._alone, self.threaded = a_batch, True
        return True
