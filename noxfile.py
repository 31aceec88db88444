"""The project's checks. `uv run nox` runs the default ones, `uv run nox -s test-cuda bench` two.

Arguments after `--` go to pytest: `uv run nox -s test-formats -- -k packing`.
"""

import os
import shutil
from pathlib import Path

import nox

# Sessions run in the workspace's .venv, which `uv run` brings to the pinned versions in 0.1 s each
# time. An environment per session held the same packages (5 GB each where the cache is on another
# disk) and took 3 s more per session; what each package declares for itself is shown by `wheels`.
nox.needs_version = ">=2025.2"
nox.options.default_venv_backend = "none"
nox.options.sessions = [
    "lint",
    "types",
    "test-formats",
    "test-cpu",
    "test-arm",
    "android",
    "sanitize",
    "fuzz",
    "test-cuda",
    "test-bench",
    "docs",
    "wheels",
]

UV = os.environ.get("UV", "uv")  # `uv run` names itself here, and need not be on PATH
ENV = {
    # A start of torch takes 2.9 s without bytecode and 1.4 s with it.
    "PYTHONDONTWRITEBYTECODE": "",
    # Threads of OpenMP that wait sleep, for spinning ones starve the others where the cores are
    # shared: 96 conformance tests took 58 and 82 s spinning, 15 s sleeping (2 cores, load 8).
    "GOMP_SPINCOUNT": "0",
}
# A process a core, each with a torch of its own; `-- -n 0` for one, as a debugger wants it. Nothing
# is timed by tests, and pytest-benchmark would warn of that.
SIDE_BY_SIDE = ("-n", "auto", "--maxprocesses=8", "--dist=worksteal", "-p", "no:benchmark")
RESULTS = Path("out/bench")
NATIVE_SOURCES = ("*.c", "*.h", "*.cpp", "*.cu", "*.cuh")
ARM_TESTS = "packages/fdk-cpu/tests/test_arm.py"
DEVICE_TESTS = "tests/test_run_on_device.py"
# Half a minute on two cores: the widths that decode differently, one row of x and a few.
SHORT_RUN = ("-k", "2048", "-m", "1,16", "-b", "16,8,4,3,2,1")
# Benchmark scripts that want a file of rows, most to make a table of it: `bench` leaves them out.
OF_ROWS = ("*_table.py", "marlin_hopper.py", "marlin_rows.py", "triton_peers.py")
FUZZ_SECONDS = os.environ.get("FDK_FUZZ_SECONDS", "10")


@nox.session
def lint(session: nox.Session) -> None:
    """Style, the rules of the tree (tools/check_tree.py) and the tests of both (tests/)."""
    run(session, "ruff", "check", ".")
    run(session, "ruff", "format", "--check", ".")
    native = str(run(session, "git", "ls-files", *NATIVE_SOURCES, silent=True)).split()
    run(session, "clang-format", "--dry-run", "-Werror", *native)
    run(session, "python", "tools/check_tree.py")
    run(session, "shellcheck", "tools/run_on_device.sh", ".ci/run")
    elsewhere = ("tests/test_docs.py", DEVICE_TESTS)
    ignored = (f"--ignore={test}" for test in elsewhere)
    run(session, "python", "-m", "pytest", "tests", *SIDE_BY_SIDE, *ignored)


@nox.session
def types(session: nox.Session) -> None:
    """mypy, strict, over every package's src and over tools/."""
    run(session, "mypy", *map(str, sorted(Path("packages").glob("*/src"))), "tools")


@nox.session(name="test-formats")
def test_formats(session: nox.Session) -> None:
    """The tests of fdk-formats, with at least 95 % of its lines covered."""
    coverage = ["--cov=fdk_formats", "--cov-report=term:skip-covered", "--cov-fail-under=95"]
    test(session, "fdk-formats", *([] if session.posargs else coverage))


@nox.session(name="test-cpu")
def test_cpu(session: nox.Session) -> None:
    """The tests of fdk-cpu, but those for ARM."""
    test(session, "fdk-cpu", f"--ignore={ARM_TESTS}")


@nox.session(name="test-arm")
def test_arm(session: nox.Session) -> None:
    """The kernels built for ARM, and run by an emulator of cores with and without bf16 and SVE."""
    run(session, "python", "-m", "pytest", ARM_TESTS, *SIDE_BY_SIDE, *session.posargs)


@nox.session
def android(session: nox.Session) -> None:
    """tools/run_on_device.sh end to end: adb, an emulated device, with an NDK and without."""
    run(session, "python", "-m", "pytest", DEVICE_TESTS, *session.posargs)


@nox.session
def sanitize(session: nox.Session) -> None:
    """The C++ tests of fdk-cpu under AddressSanitizer and UBSan."""
    sanitizers = "address,undefined"
    build = build_native(session, "sanitize", FDK_CPU_TESTS="ON", FDK_CPU_SANITIZE=sanitizers)
    run(session, f"{build}/fdk_native_test", "5")
    run(session, f"{build}/fdk_fuzz_random", "5")


@nox.session
def fuzz(session: nox.Session) -> None:
    """libFuzzer on the layout converter and blockwise kernels, FDK_FUZZ_SECONDS (default 10) long.

    What it finds is kept in build/fuzz, and told to the target by `build/fuzz/fdk_fuzz FILE`.
    """
    compiler = "clang++"
    if shutil.which(compiler) is None:
        session.skip(f"needs {compiler}: apt-get install clang libclang-rt-dev")
    build = build_native(
        session,
        "fuzz",
        CMAKE_CXX_COMPILER=compiler,
        FDK_CPU_FUZZ="ON",
        FDK_CPU_SANITIZE="address,undefined",
    )
    limits = (f"-max_total_time={FUZZ_SECONDS}", "-max_len=4096", "-len_control=0", "-timeout=120")
    found = f"-artifact_prefix={build}/"
    run(session, f"{build}/fdk_fuzz", *limits, found, "-print_final_stats=1", *session.posargs)


@nox.session(name="test-cuda")
def test_cuda(session: nox.Session) -> None:
    """The tests of fdk-cuda; those that need a GPU skip where there is none."""
    test(session, "fdk-cuda")


@nox.session(name="every-kernel")
def every_kernel(session: nox.Session) -> None:
    """Compiles every GPU kernel in every configuration for every GPU: none may spill. Hours."""
    session.env["FDK_TEST_EVERY_KERNEL"] = "1"
    test(session, "fdk-cuda", "-k", "every and spills")


@nox.session(name="test-bench")
def test_bench(session: nox.Session) -> None:
    """The tests of fdk-bench."""
    test(session, "fdk-bench")


@nox.session
def docs(session: nox.Session) -> None:
    """Links of every Markdown file lead somewhere, and its Python blocks run."""
    run(session, "python", "-m", "pytest", "tests/test_docs.py", *session.posargs)


@nox.session
def wheels(session: nox.Session) -> None:
    """Builds every wheel; installs each alone in a new environment, with a sample of its tests."""
    run(session, "python", "tools/check_wheels.py", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """The short run of every benchmark, and of `fdk-bench kernels` beside its last.

    Slow is no failure, wrong is.
    """
    RESULTS.mkdir(parents=True, exist_ok=True)
    run(session, "fdk-bench", "kernels", *SHORT_RUN, "--out", str(RESULTS))
    run(session, "fdk-bench", "guard", str(RESULTS / "kernels.jsonl"))
    needs: dict[str, list[str]] = {}
    for script in benchmarks():
        quick = ["--quick"] if "--quick" in script.read_text() else []
        text = str(run(session, "python", str(script), *quick, *session.posargs, silent=True))
        result = RESULTS / f"{script.parts[1]}-{script.stem}.txt"
        if text.startswith("not run: "):
            needs.setdefault(text.strip().removeprefix("not run: "), []).append(script.stem)
            continue
        result.write_text(text)
        session.log(f"{text}\nwritten to {result}")
    for reason, scripts in needs.items():
        session.log(f"not run: {', '.join(scripts)}: {reason}")
    session.log(f"results lie in {RESULTS}")


def benchmarks() -> list[Path]:
    """The scripts that run without arguments."""
    scripts = sorted(Path("packages").glob("*/benchmarks/[!_]*.py"))
    return [script for script in scripts if not any(map(script.match, OF_ROWS))]


def test(session: nox.Session, package: str, *args: str) -> None:
    tests = f"packages/{package}/tests"
    run(session, "python", "-m", "pytest", tests, *SIDE_BY_SIDE, *args, *session.posargs)


def build_native(session: nox.Session, name: str, **options: str) -> str:
    """Builds the C++ of fdk-cpu without Python in build/<name>, and returns that."""
    build = f"build/{name}"
    options |= {"CMAKE_BUILD_TYPE": "Release", "FDK_CPU_PYTHON": "OFF"}
    defines = [f"-D{option}={value}" for option, value in options.items()]
    run(session, "cmake", "-S", "packages/fdk-cpu", "-B", build, *defines)
    run(session, "cmake", "--build", build, "--parallel", "2")
    return build


def run(session: nox.Session, *command: str, silent: bool = False) -> object:
    return session.run(UV, "run", "--quiet", *command, env=ENV, silent=silent, external=True)
