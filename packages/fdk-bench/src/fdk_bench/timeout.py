"""A time limit for other projects' code, which may compile or tune for minutes."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# The error is raised again after this time, because code may catch every exception and go on.
AGAIN_SECONDS = 1.0


class TookTooLongError(RuntimeError):
    """A peer exceeded its time limit."""


@contextmanager
def time_limit(seconds: float | None, what: str) -> Iterator[None]:
    """Raise an error in the code of the context after ``seconds``, between two steps of Python.

    It is raised again each second where that code catches it, and at the end, because results of
    interrupted code are not to be trusted. A timer that ran before goes on afterwards. There is no
    limit for None, outside the main thread, and on Windows, which has no such signal.

    Args:
        seconds: the limit, or None.
        what: names what was too slow, for the error.

    Raises:
        TookTooLongError: from inside, naming ``what`` and the seconds.
    """
    main = threading.current_thread() is threading.main_thread()
    if seconds is None or not main or not hasattr(signal, "setitimer"):
        yield
        return
    error = TookTooLongError(f"{what} took more than {seconds:g} s")
    inside, late = True, False

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal late
        if inside:
            late = True
            raise error

    start = time.monotonic()
    before = signal.signal(signal.SIGALRM, end)
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN_SECONDS)
    try:
        yield
    finally:
        inside = False  # first, so that nothing that follows is interrupted
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if left:  # at least a moment, for a timer that would have ended by now
            left = max(left - (time.monotonic() - start), 1e-6)
            signal.setitimer(signal.ITIMER_REAL, left, interval)
    if late:
        raise error
