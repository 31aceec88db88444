"""Compiled kernels on disk, so that each is compiled once on a machine."""

import hashlib
import json
import os
import secrets
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

from fdk_cuda.nvrtc.compiler import COMMON_OPTIONS, Program, compile_program, compiler_version
from fdk_cuda.nvrtc.installed import SEARCH_VARIABLES, file_facts, search_facts

CACHE_VARIABLE = "FDK_CUDA_CACHE"
# A file is its own check: the digest of the machine code, then the machine code.
DIGEST_BYTES = 32


def cache_directory() -> Path:
    """Where compiled kernels lie: ``$FDK_CUDA_CACHE``, or ``fdk-cuda`` in the user's cache.

    Raises:
        OSError: nothing is set and the user has no home, as in a container without a passwd entry.
    """
    if named := os.environ.get(CACHE_VARIABLE):
        return Path(named)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "fdk-cuda"
    try:
        return Path.home() / ".cache" / "fdk-cuda"
    except RuntimeError as error:
        raise FileNotFoundError(f"no home directory, and {CACHE_VARIABLE} is not set") from error


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file under another name and renames it into place, so that none is read half.

    Who may read it is for the umask to say, as with any new file.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    partial = path.with_name(f"{path.name}.{secrets.token_hex(8)}.partial")
    try:
        with partial.open("xb") as file:
            file.write(data)
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise


def cached_cubin(program: Program, arch: str) -> bytes:
    """The machine code of a program, compiled if it is not there yet.

    Processes that start at once may compile the same program; each writes a file of its own and
    renames it into place, so none ever reads half of one. A damaged file is compiled again, and a
    directory that is not there or cannot be written costs a compilation per process, nothing else.

    Raises:
        CompilerMissingError, RuntimeError: as ``compile_program``.
    """
    try:
        path = cache_directory() / f"{cache_key(program, arch)}.cubin"
    except OSError:
        return compile_program(program, arch).cubin
    if (cubin := _load(path)) is not None:
        return cubin
    cubin = compile_program(program, arch).cubin
    _store(path, cubin)
    return cubin


def cache_key(program: Program, arch: str) -> str:
    """SHA-256 of all that the machine code depends on."""
    digest = hashlib.sha256()
    header_parts = (part for header in program.headers for part in header)
    version = map(str, known_version())
    options = (*COMMON_OPTIONS, *program.options)
    for part in (arch, *version, program.name, program.source, *header_parts, *options):
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


@cache
def known_version() -> tuple[int, int]:
    """``compiler_version``, without loading NVRTC where a process before this one has.

    It is kept beside the kernels with the library's file, and holds while that is the same and no
    other is where NVRTC is looked for.

    Raises:
        CompilerMissingError: as ``compiler_version``.
    """
    try:
        path = cache_directory() / f"{_installation()}.nvrtc"
    except OSError:
        return compiler_version()
    with suppress(OSError, ValueError, LookupError, TypeError):
        kept = json.loads(path.read_bytes())
        is_same = kept["loaded"] == file_facts(kept["loaded"][0])
        if is_same and kept["found"] == search_facts():
            major, minor = kept["version"]
            return int(major), int(minor)
    version = compiler_version()
    with suppress(ImportError, OSError, RuntimeError):
        from cuda.pathfinder import load_nvidia_dynamic_lib  # type: ignore[import-untyped]

        loaded = file_facts(load_nvidia_dynamic_lib("nvrtc").abs_path)
        path.parent.mkdir(parents=True, exist_ok=True)
        told = {"loaded": loaded, "found": search_facts(), "version": version}
        write_whole(path, json.dumps(told).encode())
    return version


def _installation() -> str:
    """A name for where this process looks for libraries."""
    places = [sys.prefix, *(os.environ.get(name, "") for name in SEARCH_VARIABLES)]
    return hashlib.sha256("\0".join(places).encode()).hexdigest()


def _load(path: Path) -> bytes | None:
    try:
        data = path.read_bytes()
    except OSError:
        return None
    digest, cubin = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
    return cubin if hashlib.sha256(cubin).digest() == digest else None


def _store(path: Path, cubin: bytes) -> None:
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, hashlib.sha256(cubin).digest() + cubin)
