"""A limit on the time of somebody else's code."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class TookTooLongError(RuntimeError):
    """What was asked for was not there in time."""


@contextmanager
def time_limit(seconds: float | None, what: str) -> Iterator[None]:
    """Ends what runs inside by an exception, between two steps of Python.

    No limit where there is none to keep (None), or no signal to keep it by: outside the main thread
    and on Windows.

    Raises:
        TookTooLongError: from inside, naming ``what`` and the seconds.
    """
    main = threading.current_thread() is threading.main_thread()
    if seconds is None or not main or not hasattr(signal, "setitimer"):
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise TookTooLongError(f"{what} took more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
