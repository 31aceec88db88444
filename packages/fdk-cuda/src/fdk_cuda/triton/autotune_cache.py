"""Measured configurations on disk: one JSON file for each GPU and version of Triton."""

import fcntl
import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from fdk_cuda.nvrtc import cache_directory, write_whole

# Raise it when a configuration or its key comes to mean something else.
VERSION = 4
Entry = dict[str, Any]


def path_of(name: str) -> Path:
    """The file of a GPU.

    Raises:
        OSError: as ``cache_directory``.
    """
    slug = re.sub(r"[^a-z0-9.]+", "-", name.lower())
    return cache_directory() / f"tuned-{slug}.json"


def load_entries(name: str) -> dict[str, Entry]:
    """What is stored for a GPU; nothing where the file is missing, damaged or another version's."""
    try:
        found = json.loads(path_of(name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict) or (found.get("version"), found.get("gpu")) != (VERSION, name):
        return {}
    entries = found.get("entries")
    return entries if isinstance(entries, dict) else {}


def store_entries(name: str, entries: dict[str, Entry]) -> None:
    """Adds to what is stored; a directory that cannot be written costs a measurement, no more.

    Processes take turns, and each replaces the whole file: none is read half, and no process's
    entries are lost.

    Args:
        name: of the GPU and the version of Triton.
        entries: new or better ones by key; those that are stored under other keys stay.
    """
    with suppress(OSError):
        path = path_of(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            # The file as it is from now on: what was stored, read under the lock, and what is new.
            whole = {"version": VERSION, "gpu": name, "entries": load_entries(name) | entries}
            write_whole(path, json.dumps(whole, indent=1, sort_keys=True).encode())
