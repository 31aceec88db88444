"""Compiled kernels on disk, so that each is compiled once on a machine."""

import hashlib
import os
import tempfile
from pathlib import Path

from fdk_cuda.nvrtc.compiler import COMMON_OPTIONS, Program, compile_program, compiler_version

CACHE_VARIABLE = "FDK_CUDA_CACHE"
# A file is its own check: the digest of the machine code, then the machine code.
DIGEST_BYTES = 32


def cache_directory() -> Path:
    """Where compiled kernels lie: ``$FDK_CUDA_CACHE``, or ``fdk-cuda`` in the user's cache."""
    if named := os.environ.get(CACHE_VARIABLE):
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "fdk-cuda"


def cached_cubin(program: Program, arch: str) -> bytes:
    """The machine code of a program, compiled if it is not there yet.

    Processes that start at once may compile the same program; each writes a file of its own and
    renames it into place, so none ever reads half of one. A damaged file is compiled again, and a
    directory that cannot be written costs a compilation per process, nothing else.

    Raises:
        CompilerMissingError, RuntimeError: as ``compile_program``.
    """
    path = cache_directory() / f"{cache_key(program, arch)}.cubin"
    if (cubin := _load(path)) is not None:
        return cubin
    cubin = compile_program(program, arch).cubin
    _store(path, cubin)
    return cubin


def cache_key(program: Program, arch: str) -> str:
    """SHA-256 of all that the machine code depends on."""
    digest = hashlib.sha256()
    header_parts = (part for header in program.headers for part in header)
    version = map(str, compiler_version())
    options = (*COMMON_OPTIONS, *program.options)
    for part in (arch, *version, program.name, program.source, *header_parts, *options):
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def _load(path: Path) -> bytes | None:
    try:
        data = path.read_bytes()
    except OSError:
        return None
    digest, cubin = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
    return cubin if hashlib.sha256(cubin).digest() == digest else None


def _store(path: Path, cubin: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, suffix=".partial")
    except OSError:
        return
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(hashlib.sha256(cubin).digest() + cubin)
        os.replace(name, path)
    except OSError:
        Path(name).unlink(missing_ok=True)
