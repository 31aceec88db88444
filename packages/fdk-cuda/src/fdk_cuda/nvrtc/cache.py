"""Cache of compiled kernels on disk: each is compiled once per machine."""

import hashlib
import json
import os
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

from fdk_cuda.nvrtc.cache_files import private_directory, read_private, write_whole
from fdk_cuda.nvrtc.compiler import COMMON_OPTIONS, Program, compile_program, compiler_version
from fdk_cuda.nvrtc.installed import SEARCH_VARIABLES, file_facts, search_facts
from fdk_formats.untrusted import check_int, parse_json_object

# A file holds the digest of the machine code, then the machine code.
DIGEST_BYTES = 32
# Machine code of a program is below 1 MB, a stored version below 10 kB.
MAX_CUBIN_BYTES, MAX_VERSION_BYTES = 1 << 28, 1 << 20


def cached_cubin(program: Program, arch: str) -> bytes:
    """Returns the machine code of a program, compiling it if it is not in the cache.

    Processes may compile the same program at once: each writes its own file and renames it into
    place. A damaged file is compiled again. Without a writable folder, or with one that another
    user can change, each process compiles.

    Raises:
        CompilerMissingError, RuntimeError: as ``compile_program``.
    """
    name = f"{cache_key(program, arch)}.cubin"
    if (cubin := _load(name)) is not None:
        return cubin
    cubin = compile_program(program, arch).cubin
    _store(name, hashlib.sha256(cubin).digest() + cubin)
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
    name = f"{_installation()}.nvrtc"
    with suppress(OSError, ValueError):
        return _stored_version(private_directory() / name)
    version = compiler_version()
    with suppress(ImportError, OSError, RuntimeError):
        from cuda.pathfinder import load_nvidia_dynamic_lib  # type: ignore[import-untyped]

        loaded = file_facts(load_nvidia_dynamic_lib("nvrtc").abs_path)
        stored = {"loaded": loaded, "found": search_facts(), "version": version}
        _store(name, json.dumps(stored).encode())
    return version


def _stored_version(path: Path) -> tuple[int, int]:
    """Reads a stored version; raises ValueError or OSError if there is none that is valid."""
    stored = parse_json_object(read_private(path, MAX_VERSION_BYTES), str(path))
    loaded, version = stored.get("loaded"), stored.get("version")
    if not isinstance(loaded, list) or not loaded or not isinstance(loaded[0], str):
        raise ValueError(f"{path}: loaded must be path, size and time of a file")
    if loaded != file_facts(loaded[0]) or stored.get("found") != search_facts():
        raise ValueError(f"{path}: of other files than those installed")
    if not isinstance(version, list) or len(version) != 2:
        raise ValueError(f"{path}: version must be two integers")
    major, minor = (check_int(f"{path}: version", part, high=9999) for part in version)
    return major, minor


def _installation() -> str:
    """Returns a name for the places where this process searches libraries."""
    places = [sys.prefix, *(os.environ.get(name, "") for name in SEARCH_VARIABLES)]
    return hashlib.sha256("\0".join(places).encode()).hexdigest()


def _load(name: str) -> bytes | None:
    try:
        data = read_private(private_directory() / name, MAX_CUBIN_BYTES)
    except OSError:
        return None
    digest, cubin = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
    return cubin if hashlib.sha256(cubin).digest() == digest else None


def _store(name: str, data: bytes) -> None:
    with suppress(OSError):
        write_whole(private_directory(create=True) / name, data)
