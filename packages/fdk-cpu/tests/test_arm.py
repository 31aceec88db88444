"""The ARM kernels, cross-compiled and run by qemu on cores with and without each feature."""

import importlib.util
import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

SOURCE = Path(__file__).parents[1]
GOLDEN = Path(__file__).parent / "native" / "golden.txt"
COMPILER = "aarch64-linux-gnu-g++"
# QEMU's cores and the instruction sets that must be found there. QEMU ends the process at an
# instruction that the core lacks.
BASE = ("scalar", "neon")
DOT = (*BASE, "neondot")
I8MM = (*DOT, "neonbf16", "neoni8mm")
CORES = {
    "cortex-a53": BASE,
    "cortex-a76": DOT,  # dot products of bytes, no bf16
    "neoverse-n1": DOT,
    "a64fx": BASE,  # SVE of 512 bits, no bf16
    "max,sve=off": I8MM,
    "max,sve-max-vq=1": (*I8MM, "sve2"),  # 128-bit vectors: a table of 16 values takes two
    "max,sve-max-vq=2": (*I8MM, "sve", "sve2"),
    "max,sve-max-vq=4": (*I8MM, "sve", "sve2"),
    "max,sve-max-vq=8": (*I8MM, "sve", "sve2"),
    "max,sve-max-vq=16": (*I8MM, "sve", "sve2"),
}
# Emulation is slow: each set is tested on one core, SVE at every vector length.
TESTED = {
    "cortex-a53": BASE,
    "cortex-a76": ("neondot",),
    "max,sve=off": ("neonbf16", "neoni8mm"),
    "max,sve-max-vq=1": ("sve2",),
    **{f"max,sve-max-vq={quads}": ("sve", "sve2") for quads in (2, 4, 8, 16)},
}
PINNED = [(core, isa) for core, isas in TESTED.items() for isa in isas if isa != "scalar"]


@pytest.fixture(scope="session")
def build(cmake_build: Callable[..., None]) -> Path:
    """The build of the preset static-arm64 with the C++ tests."""
    if not (SOURCE / "CMakePresets.json").is_file():
        pytest.skip("runs without the source of the kernels")
    tools = ("cmake", COMPILER, "qemu-aarch64")
    if missing := [tool for tool in tools if shutil.which(tool) is None]:
        pytest.skip(f"needs {', '.join(missing)} on PATH; .ci/run installs them")
    folder = SOURCE / "build" / "static-arm64"
    cmake_build(folder, "--preset", "static-arm64", "-DFDK_CPU_TESTS=ON")
    return folder


@pytest.fixture(scope="session")
def golden(build: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = SOURCE / "tests" / "native" / "golden.c"
    return compile_c(source, build, tmp_path_factory.mktemp("golden"))


def compile_c(source: Path, build: Path, folder: Path) -> Path:
    """Compile a C file to a static executable."""
    executable = folder / f"{source.stem}_c"
    command = ["aarch64-linux-gnu-gcc", "-std=c11", "-Wall", "-Wextra", "-Werror", source]
    command += ["-I", SOURCE / "native" / "api", "-L", build, "-lfdk_cpu", "-lstdc++", "-lm"]
    subprocess.run([*command, "-lpthread", "-static", "-o", executable], check=True)
    return executable


def run(core: str, *command: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    # On an a64fx glibc copies memory with SVE, which takes QEMU 20 s of 25.
    env = {**os.environ, "GLIBC_TUNABLES": "glibc.cpu.name=generic", **env}
    qemu = ["qemu-aarch64", "-cpu", core, *command]
    return subprocess.run(qemu, env=env, capture_output=True, text=True)


@pytest.mark.parametrize(("core", "isas"), TESTED.items())
def test_kernels_equal_scalar(build: Path, core: str, isas: tuple[str, ...]) -> None:
    done = run(core, build / "fdk_native_test", "--cases", "10", FDK_TEST_ISAS=",".join(isas))
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"10 cases passed on {' '.join(isas)}\n"


@pytest.mark.parametrize("core", ["cortex-a76", "max,sve=off", "max,sve-max-vq=4"])
def test_random_shapes_and_bytes(build: Path, core: str) -> None:
    done = run(core, build / "fdk_fuzz_random", "--cases", "10")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "10 cases passed\n"


# From several groups in a tile to one group over two tiles.
@pytest.mark.parametrize("group", ["16", "32", "64", "256"])
@pytest.mark.parametrize("core", TESTED)
def test_int8_bits_and_groups(build: Path, core: str, group: str) -> None:
    # The executable compares with the scalar kernels; n is not a multiple of a stripe, and m gives
    # single rows, pairs and remainders.
    options = ["--activations", "int8", "--dtype", "fp32", "--isa", TESTED[core][-1]]
    options += ["--sizes", "9x512", "--group", group, "--bits", "1,2,3,4,5,6,7,8"]
    options += ["--m", "1,2,3,5,9", "--seconds", "0", "--rotate-mb", "1"]
    zeros = ["--zero-points"] if group in ("16", "256") else []
    done = run(core, build / "fdk_cpu_bench", *options, *zeros)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 40


@pytest.mark.parametrize(("core", "isa"), PINNED)
def test_golden_bytes(golden: Path, core: str, isa: str) -> None:
    done = run(core, golden, FDK_CPU_ISA=isa)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == GOLDEN.read_text()


def test_best_set_is_used(build: Path, tmp_path: Path) -> None:
    example = compile_c(SOURCE / "examples" / "linear.c", build, tmp_path)
    used = {core: run(core, example).stdout for core in CORES}
    assert used == {core: f"{isas[-1]}: 4 160\n" for core, isas in CORES.items()}


@pytest.mark.parametrize("isa", ["neonbf16", "neoni8mm", "sve", "sve2", "avx2"])
def test_missing_set_is_rejected(build: Path, isa: str) -> None:
    done = run("cortex-a76", build / "fdk_cpu_bench", "--sizes", "4x128", FDK_CPU_ISA=isa)
    assert done.returncode == 2
    said = f"this machine runs scalar, neon, neondot; wanted one of them or auto, got {isa}"
    assert f"FDK_CPU_ISA: {said}" in done.stderr


# Linux's C and C++ headers stand in for Apple's.
HEADERS = Path("/usr/aarch64-linux-gnu/include")
APPLE = {
    "CMAKE_SYSTEM_NAME": "Darwin",
    "CMAKE_SYSTEM_PROCESSOR": "arm64",
    "CMAKE_CXX_COMPILER": "clang++",
    "CMAKE_CXX_COMPILER_TARGET": "arm64-apple-macos13",
    "CMAKE_CXX_COMPILER_FORCED": "ON",  # it cannot link
    "CMAKE_INSTALL_NAME_TOOL": "true",
    "CMAKE_HAVE_LIBC_PTHREAD": "ON",
    "CMAKE_EXPORT_COMPILE_COMMANDS": "ON",
    "FDK_CPU_PYTHON": "OFF",
    "FDK_CPU_LIBRARY": "ON",
    "FDK_CPU_BENCH": "ON",
}


def test_apple_compiles_without_sve(tmp_path: Path) -> None:
    if not (SOURCE / "CMakeLists.txt").is_file():
        pytest.skip("runs without the source of the kernels")
    libraries = sorted((HEADERS / "c++").glob("*"))
    if missing := [tool for tool in ("cmake", "clang++") if shutil.which(tool) is None]:
        pytest.skip(f"needs {', '.join(missing)} on PATH; .ci/run installs them")
    if not libraries:
        pytest.skip(f"needs the headers of {COMPILER} in {HEADERS}; .ci/run installs them")
    defines = [f"-D{name}={value}" for name, value in APPLE.items()]
    subprocess.run(["cmake", "-S", SOURCE, "-B", tmp_path, *defines], check=True)
    commands = json.loads((tmp_path / "compile_commands.json").read_text())
    names = {Path(command["file"]).name for command in commands}
    assert {"linear_int8_neoni8mm.cpp", "linear_neonbf16.cpp", "blockwise_neon.cpp"} <= names
    assert not [name for name in names if "sve" in name]
    (tmp_path / "sys").mkdir()
    (tmp_path / "sys" / "sysctl.h").write_text(
        'extern "C" int sysctlbyname(const char*, void*, std::size_t*, void*, std::size_t);\n'
    )
    folders = [tmp_path, libraries[-1], libraries[-1] / "aarch64-linux-gnu", HEADERS]
    options = ["-fsyntax-only", "-Werror", "-D_GNU_SOURCE", "-U__nonnull", "-nostdinc++"]
    options += [option for folder in folders for option in ("-isystem", str(folder))]
    for entry in commands:
        command = shlex.split(entry["command"])
        assert not [option for option in command if "sve" in option.lower()]
        output = command.index("-o")
        del command[output : output + 2]
        done = subprocess.run([*command, *options], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("kernel", "bits", "most"),
    [
        ("neonbf16", 4, 0.75),
        ("neonbf16", 1, 0.70),
        ("neonbf16", 6, 0.90),
        ("sve2", 4, 0.75),
        ("sve2", 1, 0.65),
        ("neondot-int8", 4, 0.45),
        ("neoni8mm-int8-m8", 4, 1.30),
        ("sve-int8", 4, 0.40),
    ],
)
def test_instructions_per_code(build: Path, kernel: str, bits: int, most: float) -> None:
    # GCC 12: 0.69, 0.64, 0.83, 0.69, 0.60, 0.38, 1.19 (eight rows of x) and 0.38. A table that is
    # spilled would add 1; eight rows with `sdot` take 2.9.
    if shutil.which("aarch64-linux-gnu-objdump") is None:
        pytest.skip("needs aarch64-linux-gnu-objdump on PATH")
    figures = load_tool("arm_figures")
    found = figures.trace(build / "fdk_cpu_bench", figures.KERNELS[kernel], bits, group=64)
    assert 0.3 < found.per_code < most


def load_tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SOURCE / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
