"""CUDA C++ compiled by NVRTC at first use, cached on disk, launched through the driver."""

from fdk_cuda.nvrtc.cache import cached_cubin
from fdk_cuda.nvrtc.cache_files import (
    cache_directory,
    private_directory,
    read_private,
    write_whole,
)
from fdk_cuda.nvrtc.compiler import (
    CompilerMissingError,
    Program,
    Resources,
    architecture,
    compile_program,
    compiler_version,
)
from fdk_cuda.nvrtc.installed import unavailable_reason
from fdk_cuda.nvrtc.launch import Kernel, Launch
from fdk_cuda.nvrtc.tensor_map import swizzled_map

__all__ = [
    "CompilerMissingError",
    "Kernel",
    "Launch",
    "Program",
    "Resources",
    "architecture",
    "cache_directory",
    "cached_cubin",
    "compile_program",
    "compiler_version",
    "private_directory",
    "read_private",
    "swizzled_map",
    "unavailable_reason",
    "write_whole",
]
