"""Compiling with NVRTC and caching machine code, without a GPU."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from fdk_cuda import nvrtc
from fdk_cuda.nvrtc import cache, cache_files, compiler, installed

SOURCE = """
#include "twice.cuh"
extern "C" __global__ void kernel(int* out) { out[threadIdx.x] = twice(FACTOR); }
"""
PROGRAM = nvrtc.Program(
    name="test.cu",
    source=SOURCE,
    headers=(("twice.cuh", "__device__ int twice(int v) { return 2 * v; }"),),
    options=("-DFACTOR=3",),
)
ARCH = "sm_90a"
# A local array indexed at run time needs a stack frame.
STACK_SOURCE = """
extern "C" __global__ void kernel(float* p, int n) {
  float a[40];
  for (int i = 0; i < 40; i++) a[i] = p[i * n];
  __syncthreads();
  for (int i = 0; i < 40; i++) p[i] = a[(i * 7 + n) % 40];
}
"""
# 200 values alive at once under a limit of 32 registers.
SPILL_SOURCE = """
extern "C" __global__ void __launch_bounds__(1024, 2) kernel(float* p) {
  float a[100];
#pragma unroll
  for (int i = 0; i < 100; i++) a[i] = p[i * 1024 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 100; i++) p[i * 1024 + threadIdx.x] = a[99 - i] * a[i];
}
"""


@pytest.fixture(autouse=True)
def cache_directory(tmp_path, monkeypatch):
    monkeypatch.setenv(cache_files.CACHE_VARIABLE, str(tmp_path / "cache"))
    forget = cache.known_version.cache_clear
    forget()
    yield tmp_path / "cache"
    forget()


def suffixes(folder):
    return sorted(path.suffix for path in folder.iterdir())


@pytest.fixture
def compilations(monkeypatch):
    """Records the programs that are compiled."""
    done = []

    def counting(program, arch):
        done.append((program, arch))
        return compiler.compile_program(program, arch)

    monkeypatch.setattr(cache, "compile_program", counting)
    return done


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
def test_compile_program(arch):
    compiled = nvrtc.compile_program(PROGRAM, arch)
    assert compiled.cubin.startswith(b"\x7fELF")
    resources = compiled.resources
    assert 0 < resources.registers <= 32
    assert (resources.stack_bytes, resources.spill_bytes) == (0, 0)


def test_resources_sees_stack_and_spills():
    stack = nvrtc.compile_program(nvrtc.Program("stack.cu", STACK_SOURCE), ARCH).resources
    assert (stack.stack_bytes, stack.spill_bytes) == (160, 0)
    assert nvrtc.compile_program(nvrtc.Program("s.cu", SPILL_SOURCE), ARCH).resources.spill_bytes


def test_compile_error_says_what():
    broken = replace(PROGRAM, source="extern int x = undeclared;")
    with pytest.raises(RuntimeError, match=r'test\.cu.*sm_90a.*-DFACTOR=3(.|\n)*"undeclared"'):
        nvrtc.compile_program(broken, ARCH)
    with pytest.raises(RuntimeError, match="sm_11"):
        nvrtc.compile_program(PROGRAM, "sm_11")


def test_cached_cubin_compiles_once(compilations, cache_directory):
    first = nvrtc.cached_cubin(PROGRAM, ARCH)
    assert nvrtc.cached_cubin(PROGRAM, ARCH) == first
    assert len(compilations) == 1
    assert suffixes(cache_directory) == [".cubin", ".nvrtc"]


@pytest.mark.parametrize("keep", [0, 20, 100, -1])
def test_cached_cubin_mends_a_damaged_file(compilations, cache_directory, keep):
    first = nvrtc.cached_cubin(PROGRAM, ARCH)
    (path,) = cache_directory.glob("*.cubin")
    path.write_bytes(path.read_bytes()[:keep])
    assert nvrtc.cached_cubin(PROGRAM, ARCH) == first
    assert len(compilations) == 2


def test_cached_cubin_without_a_directory(compilations, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("not a directory")
    monkeypatch.setenv(cache_files.CACHE_VARIABLE, str(tmp_path / "file"))
    assert nvrtc.cached_cubin(PROGRAM, ARCH).startswith(b"\x7fELF")


def test_cached_cubin_without_a_home(compilations, monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    for variable in (cache_files.CACHE_VARIABLE, "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(cache_files.Path, "home", no_home)
    with pytest.raises(FileNotFoundError, match="FDK_CUDA_CACHE is not set"):
        nvrtc.cache_directory()
    assert nvrtc.cached_cubin(PROGRAM, ARCH).startswith(b"\x7fELF")
    assert len(compilations) == 1


@pytest.mark.parametrize(
    ("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o644), (0o000, 0o644)]
)
def test_write_whole_makes_files_that_nobody_else_can_write(tmp_path, umask, mode):
    path = tmp_path / "file"
    before = os.umask(umask)
    try:
        nvrtc.write_whole(path, b"first")
        nvrtc.write_whole(path, b"second")
    finally:
        os.umask(before)
    assert path.read_bytes() == b"second"
    assert path.stat().st_mode & 0o777 == mode


def test_write_whole_leaves_nothing_where_it_fails(tmp_path):
    (tmp_path / "taken" / "by a folder").mkdir(parents=True)
    with pytest.raises(OSError, match="taken"):
        nvrtc.write_whole(tmp_path / "taken", b"data")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_cache_key_covers_everything(monkeypatch):
    programs = [
        PROGRAM,
        replace(PROGRAM, name="other.cu"),
        replace(PROGRAM, source=SOURCE + " "),
        replace(PROGRAM, options=("-DFACTOR=4",)),
        replace(PROGRAM, headers=(("twice.cuh", "__device__ int twice(int v) { return v; }"),)),
        replace(PROGRAM, headers=(), options=(*PROGRAM.headers[0], *PROGRAM.options)),
    ]
    keys = {cache.cache_key(program, arch) for program in programs for arch in ("sm_80", ARCH)}
    assert len(keys) == 2 * len(programs)
    monkeypatch.setattr(cache, "known_version", lambda: (99, 1))
    assert cache.cache_key(PROGRAM, ARCH) not in keys


@pytest.fixture
def library(monkeypatch, tmp_path):
    """Replaces NVRTC by a file, and counts how often its version is asked for."""
    path, asked = tmp_path / "libnvrtc.so", []
    path.write_bytes(b"one")
    found = type("Library", (), {"abs_path": str(path)})
    monkeypatch.setattr("cuda.pathfinder.load_nvidia_dynamic_lib", lambda _: found)
    monkeypatch.setattr(cache, "compiler_version", lambda: asked.append(0) or (13, len(asked)))
    return path, asked


def in_a_new_process():
    cache.known_version.cache_clear()
    return cache.known_version()


def test_known_version_does_not_load_the_library_again(cache_directory, library):
    path, asked = library
    assert [in_a_new_process() for _ in range(3)] == [(13, 1)] * 3
    assert len(asked) == 1
    path.write_bytes(b"another")
    assert in_a_new_process() == (13, 2)
    path.unlink()
    assert in_a_new_process() == (13, 3)
    path.write_bytes(b"a third")
    assert [in_a_new_process() for _ in range(2)] == [(13, 4)] * 2


@pytest.mark.parametrize("place", ["wheel", "CUDA_HOME"])
def test_known_version_sees_another_library(cache_directory, library, monkeypatch, tmp_path, place):
    """The older file is unchanged, but the newer one would be loaded."""
    path, _ = library
    wheel = tmp_path / "site-packages"
    folder = wheel / "nvidia/cu13/lib" if place == "wheel" else tmp_path / "toolkit/lib64"
    monkeypatch.syspath_prepend(str(wheel))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "toolkit"))
    assert [in_a_new_process() for _ in range(2)] == [(13, 1)] * 2
    folder.mkdir(parents=True)
    (folder / "libnvrtc.so.13").write_bytes(b"newer")
    assert [in_a_new_process() for _ in range(2)] == [(13, 2)] * 2
    (folder / "libnvrtc.so.13").write_bytes(b"newer still")
    assert in_a_new_process() == (13, 3)
    assert path.read_bytes() == b"one"


DAMAGED = [
    *("", "{}", "[]", '{"loaded": []}', '{"loaded": {}}'),
    '{"loaded": [1], "found": [], "version": [13, 0]}',
]


@pytest.mark.parametrize("text", DAMAGED)
def test_known_version_mends_a_damaged_file(cache_directory, library, text):
    assert in_a_new_process() == (13, 1)
    (kept,) = cache_directory.glob("*.nvrtc")
    kept.write_text(text)
    assert [in_a_new_process() for _ in range(2)] == [(13, 2)] * 2


def test_known_version_depends_on_the_search_path(cache_directory, library, monkeypatch):
    assert in_a_new_process() == (13, 1)
    monkeypatch.setenv("CUDA_HOME", "/elsewhere")
    assert in_a_new_process() == (13, 2)
    assert len(suffixes(cache_directory)) == 2


COLD_START = """
import os
from fdk_cuda import nvrtc
program = nvrtc.{program!r}
children = []
for _ in range(8):
    if (child := os.fork()) == 0:
        assert nvrtc.cached_cubin(program, {arch!r})[:4] == bytes([127, 69, 76, 70])
        os._exit(0)
    children.append(child)
assert [os.waitpid(child, 0)[1] for child in children] == [0] * 8
"""


def test_cold_start_of_eight_processes(cache_directory):
    code = COLD_START.format(program=PROGRAM, arch=ARCH)
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)
    assert suffixes(cache_directory) == [".cubin", ".nvrtc"]


def test_missing_bindings(monkeypatch):
    for function in (compiler._bindings, compiler.compiler_version):
        function.cache_clear()
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    try:
        reason = nvrtc.unavailable_reason()
    finally:
        for function in (compiler._bindings, compiler.compiler_version):
            function.cache_clear()
    assert reason is not None
    assert "cuda-bindings" in reason
    monkeypatch.undo()
    assert nvrtc.unavailable_reason() is None


def test_missing_library(monkeypatch):
    class Bindings:
        @staticmethod
        def nvrtcVersion():  # noqa: N802
            raise RuntimeError("Failure finding libnvrtc.so")

    compiler.compiler_version.cache_clear()
    monkeypatch.setattr(compiler, "_bindings", lambda: Bindings)
    with pytest.raises(nvrtc.CompilerMissingError, match=r"libnvrtc\.so.*nvidia-cuda-nvrtc"):
        compiler.compiler_version()
    # The loader is only asked where no file is in a usual place.
    monkeypatch.setattr(installed, "library_files", lambda: [])
    assert "Failure finding libnvrtc.so" in str(nvrtc.unavailable_reason())
    monkeypatch.setattr(installed, "library_files", lambda: ["libnvrtc.so.13"])
    assert nvrtc.unavailable_reason() is None


ASKING = """
import sys
from fdk_cuda.nvrtc import installed, unavailable_reason
assert unavailable_reason() is None
assert installed.library_files()
assert "cuda.bindings.nvrtc" not in sys.modules
"""


def test_asking_loads_no_library():
    subprocess.run([sys.executable, "-c", ASKING], check=True, timeout=120)


def test_places_of_the_library(monkeypatch, tmp_path):
    """Wheels are searched first, and each file is listed once."""
    for variable in installed.SEARCH_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), str(tmp_path / "site")])
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{tmp_path / 'linked'}{os.pathsep}")
    monkeypatch.setenv("CUDA_PATH", str(tmp_path / "toolkit"))
    files = [
        tmp_path / folder / "libnvrtc.so.13"
        for folder in ("site/nvidia/cu13/lib", "linked", "toolkit/lib64")
    ]
    assert installed.library_files() == []
    for file in files:
        file.parent.mkdir(parents=True)
        file.write_bytes(b"")
    (tmp_path / "linked" / "libnvrtc.so.12").write_bytes(b"")
    assert installed.library_files() == [str(file) for file in files]


@pytest.mark.parametrize(
    ("capability", "arch"), [((8, 0), "sm_80"), ((9, 0), "sm_90a"), ((12, 0), "sm_120")]
)
def test_architecture(capability, arch):
    assert nvrtc.architecture(capability) == arch
