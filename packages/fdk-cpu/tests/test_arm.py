"""The ARM kernels without ARM: cross-compiled, and run by qemu as cores with and without them."""

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
# Cores, as qemu names them, and what the dispatcher must find there. An instruction that a core
# lacks ends the process.
PLAIN = ("scalar", "neon")
DOT = (*PLAIN, "neondot")
I8MM = (*DOT, "neonbf16", "neoni8mm")
CORES = {
    "cortex-a53": PLAIN,
    "cortex-a76": DOT,  # dot products of bytes, none of bf16
    "neoverse-n1": DOT,
    "a64fx": PLAIN,  # SVE of 512 bits, no bf16
    "max,sve=off": I8MM,
    "max,sve-max-vq=1": (*I8MM, "sve2"),  # vectors of 128 bits: a table of 16 values takes two
    "max,sve-max-vq=2": (*I8MM, "sve", "sve2"),
    "max,sve-max-vq=4": (*I8MM, "sve", "sve2"),
    "max,sve-max-vq=8": (*I8MM, "sve", "sve2"),
    "max,sve-max-vq=16": (*I8MM, "sve", "sve2"),
}
PINNED = [(core, isa) for core, isas in CORES.items() for isa in isas[1:]]


@pytest.fixture(scope="session")
def build(cmake_build: Callable[..., None]) -> Path:
    """The preset static-arm64, with the C++ test."""
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
    """The static executable of a C file."""
    executable = folder / f"{source.stem}_c"
    command = ["aarch64-linux-gnu-gcc", "-std=c11", "-Wall", "-Wextra", "-Werror", source]
    command += ["-I", SOURCE / "native" / "api", "-L", build, "-lfdk_cpu", "-lstdc++", "-lm", "-lpthread"]
    subprocess.run([*command, "-static", "-o", executable], check=True)
    return executable


def run(core: str, *command: str | Path, isa: str = "") -> subprocess.CompletedProcess[str]:
    # glibc copies memory by SVE on an a64fx, which is emulated by calls: 20 s of a test of 25.
    env = os.environ | {"FDK_CPU_ISA": isa, "GLIBC_TUNABLES": "glibc.cpu.name=generic"}
    qemu = ["qemu-aarch64", "-cpu", core, *command]
    return subprocess.run(qemu, env=env, capture_output=True, text=True)


@pytest.mark.parametrize("core", CORES)
def test_kernels_agree_with_plain_loops(build: Path, core: str) -> None:
    done = run(core, build / "fdk_native_test", "--cases", "10")
    assert done.returncode == 0, done.stderr
    cases, _, isas = done.stdout.strip().partition(" cases passed on ")
    assert tuple(isas.split()) == CORES[core]
    assert cases == "10"


@pytest.mark.parametrize("core", ["cortex-a76", "max,sve=off", "max,sve-max-vq=4"])
def test_random_shapes_and_bytes(build: Path, core: str) -> None:
    done = run(core, build / "fdk_fuzz_random", "--cases", "10")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "10 cases passed\n"


# Groups of 16 to all of a tile and beyond: their sums and scales lie differently in vectors.
@pytest.mark.parametrize("group", ["16", "32", "64", "256"])
@pytest.mark.parametrize("core", CORES)
def test_int8_of_every_width(build: Path, core: str, group: str) -> None:
    # The executable compares with the plain kernels, and times no wrong answer. n is no whole
    # number of stripes; of m, one row, pairs and what is left of them.
    options = ["--activations", "int8", "--dtype", "fp32", "--isa", CORES[core][-1]]
    options += [
        "--sizes",
        "9x512",
        "--group",
        group,
        "--bits",
        "1,2,3,4,5,6,7,8",
        "--m",
        "1,2,3,5,9",
    ]
    zeros = ["--zero-points"] if group in ("16", "256") else []
    done = run(
        core, build / "fdk_cpu_bench", *options, "--seconds", "0", "--rotate-mb", "1", *zeros
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 40


@pytest.mark.parametrize(("core", "isa"), PINNED)
def test_golden_bytes(golden: Path, core: str, isa: str) -> None:
    done = run(core, golden, isa=isa)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == GOLDEN.read_text()


@pytest.mark.parametrize("core", CORES)
def test_example(build: Path, core: str, tmp_path: Path) -> None:
    done = run(core, compile_c(SOURCE / "examples" / "linear.c", build, tmp_path))
    assert done.stdout == f"{CORES[core][-1]}: 4 160\n"


@pytest.mark.parametrize("isa", ["neonbf16", "neoni8mm", "sve", "sve2", "avx2"])
def test_what_a_core_lacks_is_refused(build: Path, isa: str) -> None:
    done = run("cortex-a76", build / "fdk_cpu_bench", "--sizes", "4x128", isa=isa)
    assert done.returncode == 2
    said = f"this machine runs scalar, neon, neondot; wanted one of them or auto, got {isa}"
    assert f"FDK_CPU_ISA: {said}" in done.stderr


# Linux' C and C++ headers take the place of Apple's, which are not to be had here; clang's
# own are those of Apple's target.
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
    # GCC 12: 0.69, 0.64, 0.83, 0.69, 0.60, 0.38, 1.19 for eight rows of x, and 0.38. A table that
    # left its registers would take one more a code; eight rows by `sdot` take 2.9.
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
