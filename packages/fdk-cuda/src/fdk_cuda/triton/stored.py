"""Measured configurations on disk: one JSON file for each GPU and version of Triton."""

import fcntl
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

from fdk_cuda.nvrtc import cache_directory

# Raise it when a configuration comes to mean something else.
VERSION = 1
Entry = dict[str, Any]


def path_of(name: str) -> Path:
    """The file of a GPU."""
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

    Processes take turns, and each renames a whole file into place: none is read half, and no
    process's entries are lost.
    """
    path = path_of(name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            whole = {"version": VERSION, "gpu": name, "entries": load_entries(name) | entries}
            descriptor, partial = tempfile.mkstemp(dir=path.parent, suffix=".partial")
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                json.dump(whole, file, indent=1, sort_keys=True)
            os.replace(partial, path)
    except OSError:
        return
