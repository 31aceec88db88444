"""Checks that the packages can be released: versions, changelogs, metadata, archives, a clean tree.

    python tools/release_check.py [--tag fdk-cpu-v0.1.0] [--no-build]

With --tag also that the tag is the version of what it publishes, and that its changelog has a date.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = sorted(path.name for path in (ROOT / "packages").iterdir())
UV = os.environ.get("UV", "uv")
REQUIRED = ("name", "version", "description", "readme", "license", "requires-python")
REQUIRED_LISTS = ("authors", "classifiers", "keywords", "license-files")


def project(package: str) -> dict[str, Any]:
    """Return the ``[project]`` table of a package."""
    text = (ROOT / "packages" / package / "pyproject.toml").read_text()
    table: dict[str, Any] = tomllib.loads(text)["project"]
    return table


def package_problems(package: str) -> Iterator[str]:
    """Yield what is wrong with a package's metadata, version, changelog, licence and ranges."""
    table, folder = project(package), ROOT / "packages" / package
    for key in (*REQUIRED, *REQUIRED_LISTS):
        if not table.get(key):
            yield f"pyproject.toml: project.{key} is missing"
    version = table["version"]
    if str(Version(version)) != version:
        yield f"version {version} is not in normal form: {Version(version)}"
    source = (folder / "src" / package.replace("-", "_") / "__init__.py").read_text()
    if f'__version__ = "{version}"' not in source:
        yield f"__version__ is not {version}, the version in pyproject.toml"
    if not re.search(rf"^## {re.escape(version)}\b", (folder / "CHANGELOG.md").read_text(), re.M):
        yield f"CHANGELOG.md has no section {version}"
    if (folder / "LICENSE").read_text() != (ROOT / "LICENSE").read_text():
        yield "LICENSE differs from the repository's"
    extras = table.get("optional-dependencies", {}).values()
    lines = [*table["dependencies"], *(line for extra in extras for line in extra)]
    for wanted in map(Requirement, lines):
        if wanted.name in PACKAGES and not wanted.specifier.contains(
            project(wanted.name)["version"]
        ):
            yield f"wants {wanted}, and the tree has {project(wanted.name)['version']}"


def tag_problems(tag: str) -> Iterator[str]:
    """Yield what is wrong with a tag: an unknown package, another version, no date."""
    match = re.fullmatch(r"(?:(fdk-\w+)-)?v(.+)", tag)
    if match is None or match[1] not in (None, *PACKAGES):
        yield f"tag {tag}: wanted v0.1.0, or a package and its version as in fdk-cpu-v0.1.0"
        return
    for package in [match[1]] if match[1] else PACKAGES:
        version = project(package)["version"]
        if version != match[2]:
            yield f"tag {tag}: {package} is at {version}"
        changelog = (ROOT / "packages" / package / "CHANGELOG.md").read_text()
        if not re.search(rf"^## {re.escape(match[2])} \(\d{{4}}-\d\d-\d\d\)$", changelog, re.M):
            yield f"tag {tag}: CHANGELOG.md of {package} has no date for {match[2]}"


def archive_problems() -> Iterator[str]:
    """Build every sdist, and a wheel from it; yield what uv and twine object to."""
    with tempfile.TemporaryDirectory() as dist:
        if problem := failure(UV, "build", "--quiet", "--all-packages", "--out-dir", dist):
            yield problem
            return
        archives = sorted(str(path) for path in Path(dist).glob("fdk_*"))
        if len(archives) != 2 * len(PACKAGES):
            yield f"wanted an sdist and a wheel of each package, got {', '.join(archives)}"
        if problem := failure(sys.executable, "-m", "twine", "check", "--strict", *archives):
            yield problem


def failure(*command: str) -> str:
    """Run a command in the root; return its output where it fails, else an empty string."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return f"{' '.join(command[:3])}: {done.stdout}{done.stderr}" if done.returncode else ""


def main() -> int:
    """Print every obstacle to a release; return 1 if there is any."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tag", help="the tag that is released")
    parser.add_argument("--no-build", action="store_true", help="leave out building the archives")
    args = parser.parse_args()
    found = [f"{package}: {what}" for package in PACKAGES for what in package_problems(package)]
    found += tag_problems(args.tag) if args.tag else []
    status = ("git", "status", "--porcelain")
    changed = subprocess.run(status, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    found += [f"the tree is not clean:\n{changed}"] if changed else []
    found += [] if args.no_build else archive_problems()
    print("\n".join(found) or "release_check: ready")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
