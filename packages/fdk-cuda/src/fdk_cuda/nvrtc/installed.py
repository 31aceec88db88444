"""Finds the installed NVRTC without loading it, which would take 37 ms."""

import importlib.util
import os
import sys
from collections.abc import Iterator

from fdk_cuda.nvrtc.compiler import INSTALL_HINT, CompilerMissingError, compiler_version

# Names of the library for the major version of CUDA that this package depends on.
LIBRARIES = ("libnvrtc.so.13", "nvrtc64_130_0.dll")
WHEEL_FOLDERS = ("nvidia/cu13/lib", "nvidia/cu13/bin/x86_64", "nvidia/cu13/bin")
# Variables that decide, with the Python installation, which NVRTC is found.
SEARCH_VARIABLES = ("LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH", "CONDA_PREFIX")
# Cache of the system's loader: it changes when libraries are installed.
LOADER_CACHE = "/etc/ld.so.cache"
Facts = list[str | int]


def library_files() -> list[str]:
    """Returns the files of NVRTC in the places where the bindings search it.

    Of the system loader's places, only ``LD_LIBRARY_PATH`` is searched.
    """
    # Called for every packed weight: 186 us, 743 by pathlib (EPYC, 10 entries of sys.path).
    paths = dict.fromkeys(os.path.join(folder, name) for folder in _folders() for name in LIBRARIES)
    return [path for path in paths if os.path.isfile(path)]


def search_facts() -> list[Facts]:
    """Returns path, size and time of each file that decides which NVRTC is found."""
    return [file_facts(path) for path in (*library_files(), LOADER_CACHE) if os.path.exists(path)]


def file_facts(path: str) -> Facts:
    """Returns path, size and time of a file.

    Raises:
        OSError: the file does not exist.
    """
    status = os.stat(path)
    return [path, status.st_size, status.st_mtime_ns]


def unavailable_reason() -> str | None:
    """Returns why nothing can be compiled here ("NVRTC does not load ..."), or None.

    NVRTC is loaded only where none of the usual places has its file: the system's loader may still
    find one.
    """
    if not _has_bindings():
        return f"no CUDA bindings: {INSTALL_HINT}"
    if library_files():
        return None
    try:
        compiler_version()
    except CompilerMissingError as error:
        return str(error)
    return None


def _has_bindings() -> bool:
    try:
        return importlib.util.find_spec("cuda.bindings") is not None
    except (ImportError, ValueError):  # no package at all, or one that is being imported
        return False


def _folders() -> Iterator[str]:
    """Yields folders in the order in which the bindings search them."""
    for entry in sys.path:
        yield from (os.path.join(entry, folder) for folder in WHEEL_FOLDERS)
    yield from filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep))
    for name in ("CONDA_PREFIX", "CUDA_PATH", "CUDA_HOME"):
        if root := os.environ.get(name):
            yield from (os.path.join(root, folder) for folder in ("lib", "lib64", "bin"))
