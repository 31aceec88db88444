"""Compilation by NVRTC: a program in, machine code and its resource use out. Needs no GPU."""

import re
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

# Options of every program, part of the cache key. Without the second, generic lambdas would be host
# functions.
COMMON_OPTIONS = ("--std=c++17", "--device-as-default-execution-space", "--ptxas-options=-v")
# From this version on NVRTC has its own cache where there is a GPU. It is turned off: its results
# have no log.
OWN_CACHE_SINCE = (13, 0)
INSTALL_HINT = (
    "the packages cuda-bindings and nvidia-cuda-nvrtc bring it (torch's CUDA wheels install the "
    "second); their major version must be that of torch.version.cuda"
)


class CompilerMissingError(RuntimeError):
    """NVRTC or its Python bindings are not installed, or do not load."""


@dataclass(frozen=True)
class Program:
    """CUDA C++ source, complete: it includes only ``headers``, so no toolkit is searched.

    Attributes:
        name: name of the file, for messages.
        source: text of the file.
        headers: name and text of each file that the source may ``#include``, by exactly this name.
        options: options of NVRTC, such as ``-DBITS=4``; ``COMMON_OPTIONS`` are added.
    """

    name: str
    source: str
    headers: tuple[tuple[str, str], ...] = ()
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Resources:
    """Resource use of a kernel, as the assembler reports it."""

    registers: int
    stack_bytes: int
    spill_bytes: int


@dataclass(frozen=True)
class Compiled:
    """Machine code and the compiler's log."""

    cubin: bytes
    log: str

    @property
    def resources(self) -> Resources:
        """Registers, stack and spills: the largest among the program's kernels."""
        registers = [int(v) for v in re.findall(r"Used (\d+) registers", self.log)]
        stacks = [int(v) for v in re.findall(r"(\d+) bytes stack frame", self.log)]
        spills = [int(v) for v in re.findall(r"(\d+) bytes spill (?:stores|loads)", self.log)]
        assert len(registers) > 0, f"no resource report in the log:\n{self.log}"
        return Resources(max(registers), max(stacks), max(spills))


def compile_program(program: Program, arch: str) -> Compiled:
    """Compiles for one architecture, such as ``sm_90a``.

    Raises:
        CompilerMissingError: NVRTC cannot be loaded.
        RuntimeError: the source does not compile, or this NVRTC does not know the architecture;
            the message has the compiler's log.
    """
    nvrtc = _bindings()
    names = [name.encode() for name, _ in program.headers]
    texts = [text.encode() for _, text in program.headers]
    source = program.source.encode()
    handle = _call(
        nvrtc.nvrtcCreateProgram, source, program.name.encode(), len(names), texts, names
    )
    try:
        no_cache = ("--no-cache",) if compiler_version() >= OWN_CACHE_SINCE else ()
        options = [
            option.encode()
            for option in (f"-arch={arch}", *COMMON_OPTIONS, *no_cache, *program.options)
        ]
        status = nvrtc.nvrtcCompileProgram(handle, len(options), options)[0]
        log = _read(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, handle).rstrip(b"\0")
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            version = ".".join(map(str, compiler_version()))
            raise RuntimeError(
                f"{program.name}: NVRTC {version} does not compile it for {arch} with "
                f"{' '.join(program.options)} ({status.name}):\n{log.decode().strip()}"
            )
        cubin = _read(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, handle)
    finally:
        nvrtc.nvrtcDestroyProgram(handle)
    return Compiled(cubin, log.decode())


@cache
def compiler_version() -> tuple[int, int]:
    """Returns major and minor version of NVRTC, loading it.

    Raises:
        CompilerMissingError: it cannot be loaded.
    """
    try:
        _, major, minor = _bindings().nvrtcVersion()
    except RuntimeError as error:  # the bindings are installed, the library is not
        raise CompilerMissingError(f"NVRTC does not load ({error}): {INSTALL_HINT}") from error
    return int(major), int(minor)


def architecture(capability: tuple[int, int]) -> str:
    """Returns the target for a compute capability: ``(9, 0)`` is ``sm_90a``.

    Only Hopper gets its architecture-specific instructions; no kernel uses those of others.
    """
    major, minor = capability
    return f"sm_{major}{minor}" + ("a" if major == 9 else "")


@cache
def _bindings() -> ModuleType:
    try:
        from cuda.bindings import nvrtc  # type: ignore[import-untyped]
    except ImportError as error:
        raise CompilerMissingError(f"no CUDA bindings ({error}): {INSTALL_HINT}") from error
    module: ModuleType = nvrtc
    return module


def _call(function: Any, *args: Any) -> Any:
    status, *values = function(*args)
    if status.value:
        raise RuntimeError(f"{function.__name__}: {status.name}")
    return values[0] if values else None


def _read(size: Any, get: Any, handle: Any) -> bytes:
    buffer = bytes(_call(size, handle))
    _call(get, handle, buffer)
    return buffer
