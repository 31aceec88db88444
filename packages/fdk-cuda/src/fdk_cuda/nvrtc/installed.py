"""Which NVRTC is installed, without loading it: that takes 37 ms of a process's first call."""

import importlib.util
import os
import sys
from collections.abc import Iterator

from fdk_cuda.nvrtc.compiler import INSTALL_HINT, CompilerMissingError, compiler_version

# Of the major version of CUDA whose bindings this package asks for.
LIBRARIES = ("libnvrtc.so.13", "nvrtc64_130_0.dll")
WHEEL_FOLDERS = ("nvidia/cu13/lib", "nvidia/cu13/bin/x86_64", "nvidia/cu13/bin")
# What decides, beside the Python installation, which NVRTC is found.
SEARCH_VARIABLES = ("LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH", "CONDA_PREFIX")
# What the system's loader has been told of: it changes with what is installed there.
LOADER_CACHE = "/etc/ld.so.cache"
Facts = list[str | int]


def library_files() -> list[str]:
    """The files of NVRTC in the places where the bindings look for it.

    Those of the system's loader are not among them, but for ``LD_LIBRARY_PATH``.
    """
    # Every packed weight asks: by pathlib it took 743 us, so 186 (EPYC, 10 entries of sys.path).
    paths = dict.fromkeys(os.path.join(folder, name) for folder in _folders() for name in LIBRARIES)
    return [path for path in paths if os.path.isfile(path)]


def search_facts() -> list[Facts]:
    """What tells that another NVRTC may be found than before: each file, its size and its time."""
    return [file_facts(path) for path in (*library_files(), LOADER_CACHE) if os.path.exists(path)]


def file_facts(path: str) -> Facts:
    """Path, size and time of a file.

    Raises:
        OSError: there is none.
    """
    status = os.stat(path)
    return [path, status.st_size, status.st_mtime_ns]


def unavailable_reason() -> str | None:
    """Why nothing can be compiled here ("NVRTC does not load ..."), or None.

    It is loaded only where no file of it is in a usual place: the system's loader may know one.
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
    """In the order of the bindings."""
    for entry in sys.path:
        yield from (os.path.join(entry, folder) for folder in WHEEL_FOLDERS)
    yield from filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep))
    for name in ("CONDA_PREFIX", "CUDA_PATH", "CUDA_HOME"):
        if root := os.environ.get(name):
            yield from (os.path.join(root, folder) for folder in ("lib", "lib64", "bin"))
