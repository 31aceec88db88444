"""The project's checks. `uv run nox` runs the default ones, `uv run nox -s test-cuda bench` two.

Arguments after `--` go to pytest: `uv run nox -s test-formats -- -k packing`.
"""

import os
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
RESULTS = Path("out/bench")


@nox.session
def lint(session: nox.Session) -> None:
    """Style, the rules of the tree (tools/check_tree.py) and the tests of both (tests/)."""
    run(session, "ruff", "check", ".")
    run(session, "ruff", "format", "--check", ".")
    run(session, "python", "tools/check_tree.py")
    run(session, "python", "-m", "pytest", "tests", "--ignore=tests/test_docs.py")


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
    """The tests of fdk-cpu."""
    test(session, "fdk-cpu")


@nox.session(name="test-cuda")
def test_cuda(session: nox.Session) -> None:
    """The tests of fdk-cuda; those that need a GPU skip where there is none."""
    test(session, "fdk-cuda")


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
    """Builds every wheel; installs each alone in a fresh environment and runs its tests there."""
    run(session, "python", "tools/check_wheels.py", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """The short run of every packages/*/benchmarks/*.py; slow is no failure, wrong is."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    for script in sorted(Path("packages").glob("*/benchmarks/[!_]*.py")):
        quick = ["--quick"] if "--quick" in script.read_text() else []
        text = run(session, "python", str(script), *quick, *session.posargs, silent=True)
        result = RESULTS / f"{script.parts[1]}-{script.stem}.txt"
        result.write_text(str(text))
        session.log(f"{text}\nwritten to {result}")
    session.log(f"results lie in {RESULTS}")


def test(session: nox.Session, package: str, *args: str) -> None:
    run(session, "python", "-m", "pytest", f"packages/{package}/tests", *args, *session.posargs)


def run(session: nox.Session, *command: str, silent: bool = False) -> object:
    return session.run(UV, "run", "--quiet", *command, env=ENV, silent=silent, external=True)
