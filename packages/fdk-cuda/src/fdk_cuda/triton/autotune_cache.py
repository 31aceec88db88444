"""Measured configurations on disk: one JSON file per GPU model and version of Triton."""

import fcntl
import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fdk_cuda.nvrtc import private_directory, read_private, write_whole
from fdk_formats.untrusted import parse_json_object

# Increase it when the meaning of a configuration or of its key changes.
VERSION = 5
# An entry is 200 bytes; a model has some hundreds.
MAX_BYTES = 1 << 24
# Seconds to wait for other processes that store entries, which takes milliseconds.
LOCK_SECONDS = 10
Entry = dict[str, Any]


def path_of(name: str, *, create: bool = False) -> Path:
    """Returns the file of a GPU.

    Args:
        name: GPU model and version of Triton.
        create: create the folder if it is missing.

    Raises:
        OSError: as ``private_directory``.
    """
    slug = re.sub(r"[^a-z0-9.]+", "-", name.lower())
    return private_directory(create=create) / f"tuned-{slug}.json"


def load_entries(name: str) -> dict[str, Entry]:
    """Returns the entries of a GPU; none if the file is missing, damaged or of another version.

    Their values are whatever the file holds: the caller checks them.
    """
    try:
        path = path_of(name)
        found = parse_json_object(read_private(path, MAX_BYTES), str(path))
    except (OSError, ValueError):
        return {}
    if (found.get("version"), found.get("gpu")) != (VERSION, name):
        return {}
    entries = found.get("entries")
    if not isinstance(entries, dict):
        return {}
    return {key: entry for key, entry in entries.items() if isinstance(entry, dict)}


def store_entries(name: str, entries: dict[str, Entry]) -> None:
    """Adds entries to the file of a GPU; does nothing where the directory cannot be written.

    A file lock serialises processes, and each replaces the whole file: readers see whole files, and
    no entries are lost.

    Args:
        name: GPU model and version of Triton.
        entries: new entries by key; stored entries with other keys stay.
    """
    with suppress(OSError):
        path = path_of(name, create=True)
        with _locked(path.with_suffix(".lock")):
            whole = {"version": VERSION, "gpu": name, "entries": load_entries(name) | entries}
            write_whole(path, json.dumps(whole, indent=1, sort_keys=True).encode())


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds a file lock; raises OSError where the file is a link, or stays locked."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(path, flags, 0o644)
    try:
        end = time.monotonic() + LOCK_SECONDS
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.01)
        yield
    finally:
        os.close(descriptor)
