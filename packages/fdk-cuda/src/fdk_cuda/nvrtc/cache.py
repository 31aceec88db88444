"""Cache of compiled kernels on disk: each is compiled once per machine."""

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
# A file holds the digest of the machine code, then the machine code.
DIGEST_BYTES = 32


def cache_directory() -> Path:
    """Returns the folder of compiled kernels.

    ``$FDK_CUDA_CACHE``, else ``fdk-cuda`` in ``$XDG_CACHE_HOME`` or ``~/.cache``.

    Raises:
        OSError: neither is set and the user has no home, as in a container without a passwd entry.
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
    """Writes a file under another name, then renames it, so that no reader sees half of it.

    Permissions follow the umask, as for any new file.

    Raises:
        OSError: the file cannot be written; no partial file remains.
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
    """Returns the machine code of a program, compiling it if it is not in the cache.

    Processes may compile the same program at once: each writes its own file and renames it into
    place. A damaged file is compiled again. Without a writable folder, each process compiles.

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
    """Returns the SHA-256 of everything that the machine code depends on."""
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
    """Returns ``compiler_version`` without loading NVRTC, where an earlier process has stored it.

    The stored version is valid while the library's file is unchanged and the places where NVRTC is
    searched hold the same files.

    Raises:
        CompilerMissingError: as ``compiler_version``.
    """
    try:
        path = cache_directory() / f"{_installation()}.nvrtc"
    except OSError:
        return compiler_version()
    with suppress(OSError, ValueError, LookupError, TypeError):
        stored = json.loads(path.read_bytes())
        is_same = stored["loaded"] == file_facts(stored["loaded"][0])
        if is_same and stored["found"] == search_facts():
            major, minor = stored["version"]
            return int(major), int(minor)
    version = compiler_version()
    with suppress(ImportError, OSError, RuntimeError):
        from cuda.pathfinder import load_nvidia_dynamic_lib  # type: ignore[import-untyped]

        loaded = file_facts(load_nvidia_dynamic_lib("nvrtc").abs_path)
        path.parent.mkdir(parents=True, exist_ok=True)
        stored = {"loaded": loaded, "found": search_facts(), "version": version}
        write_whole(path, json.dumps(stored).encode())
    return version


def _installation() -> str:
    """Returns a name for the places where this process searches libraries."""
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
