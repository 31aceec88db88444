"""Builds every package's wheel, installs each alone, and runs a sample of its tests there.

    python tools/check_wheels.py [package ...]

Only this shows a wrong version range, or a file that a wheel lacks: uv's workspace takes every
package from the source tree. Wheels land in dist/, environments in .nox/wheels/.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
ENVIRONMENTS = ROOT / ".nox" / "wheels"
SHARED = ("conftest.py", "pyproject.toml")  # the tests need these, and find them at their root
UV = os.environ.get("UV", "uv")
RUNNER = "pytest-xdist"  # beside what a package's tests ask for
SIDE_BY_SIDE = ("-n", "auto", "--maxprocesses=4", "--dist=worksteal")
# The packages' own sessions run every case, of the same sources: what a wheel holds is compared
# with them file by file. Here each test function shows, by its first case and every eighth, that
# the environment has what it needs. Those that compile for minutes need no more.
SAMPLE = ("--every=8", "-m", "not slow")
# Nothing of the environment that runs this may reach an environment under test. Bytecode is
# written, for a start of torch without it takes twice as long.
HIDDEN = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "VIRTUAL_ENV")
ENV = {name: value for name, value in os.environ.items() if name not in HIDDEN}


@dataclass(frozen=True)
class Pins:
    """The workspace's pins, written out for the uv commands that do not read them themselves."""

    constraints: Path
    build_constraints: Path


def main() -> int:
    """Checks the packages named, or all of them; 1 where one fails, 2 for one that is none."""
    there = sorted(path.name for path in (ROOT / "packages").iterdir())
    packages = sys.argv[1:] or there
    if unknown := sorted(set(packages) - set(there)):
        print(f"check_wheels: no package {', '.join(unknown)}; there are {', '.join(there)}")
        return 2
    with tempfile.TemporaryDirectory() as scratch:
        pins = write_pins(ROOT / "pyproject.toml", Path(scratch))
        build(pins)
        # Much of installing, and the last tests of a package, keep no more than one core busy.
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            problems = pool.map(lambda package: check(package, pins, Path(scratch)), packages)
            found = dict(zip(packages, problems, strict=True))
    print("\nwheels:", *(f"\n  {p}: {', '.join(what) or 'holds'}" for p, what in found.items()))
    return 1 if any(found.values()) else 0


def write_pins(pyproject: Path, folder: Path) -> Pins:
    """Writes the constraints of ``[tool.uv]`` to files that ``uv pip`` and ``uv build`` take."""
    settings = tomllib.loads(pyproject.read_text())["tool"]["uv"]
    pins = Pins(folder / "constraints.txt", folder / "build-constraints.txt")
    for path, key in (
        (pins.constraints, "constraint-dependencies"),
        (pins.build_constraints, "build-constraint-dependencies"),
    ):
        path.write_text("".join(f"{line}\n" for line in settings[key]))
    return pins


def build(pins: Pins) -> None:
    """Builds every package into dist/, each wheel from its source archive.

    A wheel built straight from the tree would take up what an earlier build left in build/. One
    of native code is tagged with the glibc that it needs, as it has to be to be published.
    """
    shutil.rmtree(DIST, ignore_errors=True)
    command = (UV, "build", "--quiet", "--all-packages", "--out-dir", DIST)
    # Where uv unpacks the archives: a ccache then knows what was compiled in the tree.
    unpacked = subprocess.run((UV, "cache", "dir"), check=True, capture_output=True, text=True)
    env = ENV | {"CCACHE_BASEDIR": unpacked.stdout.strip()}
    run(*command, "-b", pins.build_constraints, env=env)
    for wheel in DIST.glob("*-linux_*.whl"):
        run(sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", DIST, wheel)
        wheel.unlink()


def check(package: str, pins: Pins, scratch: Path) -> list[str]:
    """What is wrong with a package's wheel; empty where it installs alone and its tests pass."""
    module = package.replace("-", "_")
    wheel = next(DIST.glob(f"{module}-*.whl"))
    found = list(content_problems(wheel, module, ROOT))
    try:
        site = install(package, pins)
        found += [f"{path} is installed, but not from dist/" for path in foreign_files(DIST, site)]
        run_tests(package, module, site, scratch)
    except subprocess.CalledProcessError as error:
        found.append(f"{' '.join(map(str, error.cmd[:4]))} ... failed")
    return found


def content_problems(wheel: Path, module: str, root: Path) -> Iterator[str]:
    """What a wheel lacks, or holds and should not."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        if f"{module}/py.typed" not in names:
            yield f"lacks {module}/py.typed"
        if not any(".dist-info/" in name and name.endswith("/LICENSE") for name in names):
            yield "lacks its LICENSE"
        for name in names:
            if not name.startswith((f"{module}/", f"{module}-")):
                yield f"holds {name}, outside {module}"
            if str(root).encode() in archive.read(name):
                yield f"holds the path of the checkout in {name}"
        source = root / "packages" / module.replace("_", "-") / "src"
        for path in sorted(source.glob(f"{module}/**/*")):
            name = path.relative_to(source).as_posix()
            if not path.is_file() or "__pycache__" in name:
                continue
            if name not in names:
                yield f"lacks {name}"
            elif archive.read(name) != path.read_bytes():
                yield f"holds another {name}"


def install(package: str, pins: Pins) -> Path:
    """Installs a package with its tests' dependencies and nothing else; returns site-packages.

    An environment that is already there is brought to exactly what a new one would hold. Our own
    packages come from dist/; what others publish must not need a compiler.
    """
    environment = ENVIRONMENTS / package
    python = environment / "bin" / "python"
    if not python.exists():
        run(UV, "venv", "--quiet", "--python", sys.executable, environment)
    ours = [f"--reinstall-package={path.name}" for path in (ROOT / "packages").iterdir()]
    where = ["--python", python, "--find-links", DIST, "--constraints", pins.constraints]
    wanted = f"{package}[test]", RUNNER
    run(UV, "pip", "install", "--quiet", "--exact", "--no-build", *where, *ours, *wanted)
    return next(environment.glob("lib/python*/site-packages"))


def foreign_files(dist: Path, site: Path) -> list[str]:
    """Files of our wheels that are not installed as ``dist`` holds them."""
    found = []
    for wheel in sorted(dist.glob("*.whl")):
        if (site / wheel.name.split("-")[0]).exists():
            with zipfile.ZipFile(wheel) as archive:
                names = [n for n in archive.namelist() if not n.endswith(("/", "/RECORD"))]
                found += [n for n in names if not holds(site / n, archive.read(n))]
    return found


def holds(path: Path, content: bytes) -> bool:
    """Whether a file is there with this content."""
    return path.is_file() and path.read_bytes() == content


def run_tests(package: str, module: str, site: Path, scratch: Path) -> None:
    """Runs some of a package's tests from a folder that holds them, and none of the sources."""
    folder = scratch / package
    tests = Path("packages") / package / "tests"
    shutil.copytree(ROOT / tests, folder / tests, ignore=shutil.ignore_patterns("__pycache__"))
    for name in SHARED:
        shutil.copy(ROOT / name, folder / name)
    python = site.parents[2] / "bin" / "python"
    from_site = f"import {module} as m; assert m.__file__.startswith({str(site)!r}), m.__file__"
    run(python, "-c", from_site, cwd=folder)
    run(python, "-m", "pytest", "--maxfail=10", *SIDE_BY_SIDE, *SAMPLE, tests, cwd=folder)


def run(*command: object, cwd: Path = ROOT, env: Mapping[str, str] = ENV) -> None:
    """Runs a command, and prints what it wrote when it has ended: several run at a time.

    Raises:
        subprocess.CalledProcessError: where it fails.
    """
    words = [str(part) for part in command]
    out, err = subprocess.PIPE, subprocess.STDOUT
    done = subprocess.run(words, cwd=cwd, env=env, check=False, stdout=out, stderr=err, text=True)
    print(f"\nwheels: {' '.join(words)}\n{done.stdout}", end="", flush=True)
    done.check_returncode()


if __name__ == "__main__":
    sys.exit(main())
