"""Measured configurations on disk: one JSON file per GPU model and version of Triton."""

import fcntl
import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from fdk_cuda.nvrtc import cache_directory, write_whole

# Increase it when the meaning of a configuration or of its key changes.
VERSION = 5
Entry = dict[str, Any]


def path_of(name: str) -> Path:
    """Returns the file of a GPU.

    Raises:
        OSError: as ``cache_directory``.
    """
    slug = re.sub(r"[^a-z0-9.]+", "-", name.lower())
    return cache_directory() / f"tuned-{slug}.json"


def load_entries(name: str) -> dict[str, Entry]:
    """Returns the entries of a GPU; none if the file is missing, damaged or of another version."""
    try:
        found = json.loads(path_of(name).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict) or (found.get("version"), found.get("gpu")) != (VERSION, name):
        return {}
    entries = found.get("entries")
    return entries if isinstance(entries, dict) else {}


def store_entries(name: str, entries: dict[str, Entry]) -> None:
    """Adds entries to the file of a GPU; does nothing where the directory cannot be written.

    A file lock serialises processes, and each replaces the whole file: readers see whole files, and
    no entries are lost.

    Args:
        name: GPU model and version of Triton.
        entries: new entries by key; stored entries with other keys stay.
    """
    with suppress(OSError):
        path = path_of(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            whole = {"version": VERSION, "gpu": name, "entries": load_entries(name) | entries}
            write_whole(path, json.dumps(whole, indent=1, sort_keys=True).encode())
