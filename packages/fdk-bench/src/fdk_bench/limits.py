"""A limit on the time of somebody else's code."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# Until it is told again: somebody's code may catch every exception, and go on.
AGAIN_SECONDS = 1.0


class TookTooLongError(RuntimeError):
    """What was asked for was not there in time."""


@contextmanager
def time_limit(seconds: float | None, what: str) -> Iterator[None]:
    """Ends what runs inside by an exception, between two steps of Python.

    It is raised again each second where what runs inside catches it, and at the end, for what came
    of code that was interrupted is not to be trusted. A timer that ran before goes on afterwards.
    No limit where there is none to keep (None), or no signal to keep it by: outside the main thread
    and on Windows.

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
        inside = False  # first: nothing that follows may be interrupted
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if left:  # of a timer that would have ended by now, a moment
            left = max(left - (time.monotonic() - start), 1e-6)
            signal.setitimer(signal.ITIMER_REAL, left, interval)
    if late:
        raise error
