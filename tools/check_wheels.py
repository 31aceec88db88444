"""Builds every package's wheel, and runs a sample of its tests in an environment with it alone.

    python tools/check_wheels.py [package ...]

Only this shows a wrong version range or a file that a wheel lacks: uv's workspace takes every
package from the source tree. Archives are written to dist/, environments to .nox/wheels/.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
PACKAGES = sorted(path.name for path in (ROOT / "packages").iterdir())
UV = os.environ.get("UV", "uv")
# A third of: every test function's first case, and every 16th after it. Minutes for all wheels; the
# packages' own sessions run all.
SAMPLE = ("--every=16", "--shard=1/3", "-m", "not slow")
WORKERS = ("-n", "auto", "--maxprocesses=4", "--dist=worksteal")
# No variable of the calling environment may lead to the sources.
HIDDEN = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "VIRTUAL_ENV")
ENV = {name: value for name, value in os.environ.items() if name not in HIDDEN}


def main() -> int:
    """Check the packages named, or all of them; return 1 where one fails, 2 for an unknown one."""
    packages = sys.argv[1:] or PACKAGES
    if unknown := sorted(set(packages) - set(PACKAGES)):
        print(f"check_wheels: no package {', '.join(unknown)}; there are {', '.join(PACKAGES)}")
        return 2
    with tempfile.TemporaryDirectory() as scratch:
        constraints = build(Path(scratch))
        # Installing, and the last tests of a package, keep no more than one core busy.
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            failures = pool.map(lambda name: check(name, constraints, Path(scratch)), packages)
            failed = dict(zip(packages, failures, strict=True))
    print("\nwheels:", *(f"\n  {name}: {why or 'passed'}" for name, why in failed.items()))
    return 1 if any(failed.values()) else 0


def build(scratch: Path) -> Path:
    """Build sdists, and wheels from them, into dist/; return the file of pinned versions.

    auditwheel gives the wheel of native code its manylinux tag, and refuses one that needs a
    library that some Linux lacks.
    """
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]
    for kind in ("constraint", "build-constraint"):
        (scratch / kind).write_text("\n".join(settings[f"{kind}-dependencies"]))
    shutil.rmtree(DIST, ignore_errors=True)
    command = (UV, "build", "--quiet", "--all-packages", "--out-dir", DIST)
    # uv unpacks the sdists into its cache: relative to it, ccache knows what the tree compiled.
    cache = subprocess.run((UV, "cache", "dir"), check=True, capture_output=True, text=True)
    env = ENV | {"CCACHE_BASEDIR": cache.stdout.strip()}
    run(*command, "-b", scratch / "build-constraint", env=env)
    for wheel in DIST.glob("*-linux_*.whl"):
        run(sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", DIST, wheel)
        wheel.unlink()
    return scratch / "constraint"


def check(package: str, constraints: Path, scratch: Path) -> str:
    """Install and test a package's wheel; return the command that failed, or an empty string."""
    environment = ROOT / ".nox" / "wheels" / package
    python = environment / "bin" / "python"
    ours = [f"--reinstall-package={name}" for name in PACKAGES]
    where = ("--python", python, "--find-links", DIST, "--constraints", constraints)
    folder = scratch / package
    tests = Path("packages") / package / "tests"
    shutil.copytree(ROOT / tests, folder / tests, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / name, folder / name)
    try:
        if not python.exists():
            run(UV, "venv", "--quiet", "--python", sys.executable, environment)
        # --exact removes what an earlier run installed beyond this; --no-build keeps compilers out.
        install = (UV, "pip", "install", "--quiet", "--exact", "--no-build", *where, *ours)
        run(*install, f"{package}[test]", "pytest-xdist")
        run(python, "-m", "pytest", "--maxfail=10", *SAMPLE, *WORKERS, tests, cwd=folder)
    except subprocess.CalledProcessError as error:
        return f"{' '.join(map(str, error.cmd[:4]))} ... failed"
    return ""


def run(*command: object, cwd: Path = ROOT, env: dict[str, str] = ENV) -> None:
    """Run a command, and print its output when it has ended, because several run at a time."""
    words = [str(part) for part in command]
    out, err = subprocess.PIPE, subprocess.STDOUT
    done = subprocess.run(words, cwd=cwd, env=env, check=False, stdout=out, stderr=err, text=True)
    print(f"\nwheels: {' '.join(words)}\n{done.stdout}", end="", flush=True)
    done.check_returncode()


if __name__ == "__main__":
    sys.exit(main())
