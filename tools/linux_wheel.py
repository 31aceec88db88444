"""Builds the wheel of fdk-cpu for Linux on x86-64 or 64-bit ARM, tagged with the glibc it asks for.

    python tools/linux_wheel.py --machine aarch64 --out dist --check

For the Python that runs this. Needs uv, and for another machine than this one Debian's
cross-compiler (g++-aarch64-linux-gnu). --check imports the module: for another machine it needs
qemu-user and a Python for it of the same version, whose packages it fetches into a folder of its
own with apt-get (8 MB), so the version has to be Debian's.
"""

import argparse
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "packages" / "fdk-cpu"
UV = os.environ.get("UV", "uv")
HOST = platform.machine()
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
# By the name that Python gives a machine, that of Debian.
MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
# Older systems lack the C++ runtime of this compiler (GCC 12). Linked in whole it asks for glibc
# 2.36, with libgcc for 2.35, and the parts that are used for 2.34. Hidden, its symbols do not meet
# those of the runtime that torch loads.
STATIC_RUNTIME = {
    "CMAKE_MODULE_LINKER_FLAGS": "-static-libstdc++ -Wl,--exclude-libs,ALL -Wl,--gc-sections"
}
# What a manylinux wheel may expect of every system (PEP 600), but the C++ runtime.
SYSTEM_LIBRARIES = {
    *("libc", "libm", "libpthread", "libdl", "librt", "libgcc_s"),
    *("ld-linux-x86-64", "ld-linux-aarch64"),
}
PACKAGES = (
    *(f"python{VERSION}-minimal", f"libpython{VERSION}-minimal", f"libpython{VERSION}-stdlib"),
    *("libc6", "libexpat1", "libgcc-s1", "zlib1g"),
)
# The module alone: the package imports torch, which is not there.
IMPORT = """
import sys
sys.path.insert(0, sys.argv[1])
import _native
print(*_native.instruction_sets())
assert _native.layout_sizes(8, 128, 64, 4) == (512, 16)
"""


def suffix_of(machine: str) -> str:
    """The end of the name of an extension module for this Python on a machine."""
    return f".cpython-{VERSION.replace('.', '')}-{machine}-linux-gnu.so"


def build(out: Path, machine: str = HOST) -> Path:
    """The wheel, built by uv with the workspace's pins."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]
    environment = static_runtime() if machine == HOST else cross(machine)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as pins:
        pins.writelines(f"{line}\n" for line in settings["build-constraint-dependencies"])
        pins.flush()
        command: list[str | Path] = [UV, "build", "--quiet", "--wheel", PACKAGE, "--out-dir", out]
        command += ["-b", pins.name, "--python", sys.executable]
        subprocess.run(command, env=os.environ | environment, check=True)
    return retag(next(out.glob(f"fdk_cpu-*-linux_{machine}.whl")))


def static_runtime() -> dict[str, str]:
    """The environment in which a build for this machine brings its C++ runtime."""
    return {"CMAKE_ARGS": as_arguments(STATIC_RUNTIME)}


def cross(machine: str) -> dict[str, str]:
    """The environment of a build for another machine."""
    suffix = suffix_of(machine)
    defines = STATIC_RUNTIME | {
        "CMAKE_SYSTEM_NAME": "Linux",
        "CMAKE_SYSTEM_PROCESSOR": machine,
        "CMAKE_CXX_COMPILER": f"{machine}-linux-gnu-g++",
        "PYTHON_MODULE_EXTENSION": suffix,
    }
    return {
        "_PYTHON_HOST_PLATFORM": f"linux-{machine}",
        "SETUPTOOLS_EXT_SUFFIX": suffix,
        "CMAKE_ARGS": as_arguments(defines),
    }


def as_arguments(defines: dict[str, str]) -> str:
    """CMake's options, as scikit-build-core reads them from the environment."""
    return shlex.join(f"-D{name}={value}" for name, value in defines.items())


def retag(wheel: Path) -> Path:
    """A wheel of ``linux_<machine>`` as one of ``manylinux_<glibc>_<machine>``, in its place.

    Raises:
        ValueError: where its modules need a library that a Linux may lack.
    """
    old_tag = wheel.stem.rpartition("-")[2]
    with tempfile.TemporaryDirectory() as scratch:
        modules = unpack_modules(wheel, Path(scratch))
        if foreign := [name for module in modules for name in foreign_libraries(module)]:
            raise ValueError(f"{wheel.name}: needs {', '.join(foreign)}, which a Linux may lack")
        glibc = max(glibc_of(module) for module in modules)
    tag = f"many{old_tag.replace('_', '_{}_{}_', 1).format(*glibc)}"
    command: list[str | Path] = [sys.executable, "-m", "wheel", "tags", "--remove"]
    command += ["--platform-tag", tag, wheel]
    subprocess.run(command, check=True, capture_output=True)
    return wheel.with_name(wheel.name.replace(old_tag, tag))


def unpack_modules(wheel: Path, folder: Path) -> list[Path]:
    """The extension modules of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".so")]
        return [Path(archive.extract(name, folder)) for name in names]


def machine_of(module: Path) -> str:
    """What `readelf` calls the machine of an ELF file."""
    header = readelf("-h", module)
    return next(line.split(":")[1].strip() for line in header.splitlines() if "Machine:" in line)


def glibc_of(module: Path) -> tuple[int, int]:
    """The newest version of glibc whose symbols a module asks for."""
    found = re.findall(r"GLIBC_(\d+)\.(\d+)", readelf("-V", module))
    return max((int(major), int(minor)) for major, minor in found)


def foreign_libraries(module: Path) -> list[str]:
    """The shared libraries that a module asks for, and that a Linux may lack."""
    needed: list[str] = re.findall(r"\(NEEDED\).*\[(.*)\]", readelf("-d", module))
    return [name for name in needed if name.split(".")[0] not in SYSTEM_LIBRARIES]


def readelf(option: str, module: Path) -> str:
    """What `readelf` says about a module."""
    command: list[str | Path] = ["readelf", "-W", option, module]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def fetch_python(folder: Path, machine: str) -> Path:
    """Debian's Python for a machine, unpacked below a folder; nothing of the system changes.

    Raises:
        subprocess.CalledProcessError: where apt-get or a package is missing.
    """
    root, lists, cache = folder / "root", folder / "lists", folder / "cache"
    for path in (root, lists / "partial", cache / "archives" / "partial"):
        path.mkdir(parents=True)
    (folder / "status").touch()
    settings = {
        "APT::Update::Error-Mode": "any",  # what cannot be fetched is no mere warning
        "Dir::State::lists": lists,
        "Dir::State::status": folder / "status",
        "Dir::Cache": cache,
        "APT::Architecture": MACHINES[machine],
        "APT::Architectures::": MACHINES[machine],
        "APT::Sandbox::User": "root",
        "Acquire::Retries": 3,
        "Acquire::http::Timeout": 20,  # seconds: a mirror that stalls fails, and is not waited for
        "Acquire::https::Timeout": 20,
    }
    options = (word for pair in settings.items() for word in ("-o", "=".join(map(str, pair))))
    apt = ["apt-get", "-qq", *options]
    subprocess.run([*apt, "update"], check=True, capture_output=True)
    subprocess.run([*apt, "download", *PACKAGES], cwd=folder, check=True, capture_output=True)
    for package in folder.glob("*.deb"):
        subprocess.run(["dpkg", "-x", package, root], check=True)
    return root


def import_module(module: Path, python: list[str | Path]) -> str:
    """What the module prints when a Python imports it, by the words of that Python's command.

    Raises:
        ValueError: where it does not import.
    """
    command = [*python, "-I", "-c", IMPORT, module.parent]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise ValueError(f"{module.name} does not import: {done.stderr}")
    return done.stdout.strip()


def emulated_python(root: Path, machine: str, core: str = "max") -> list[str | Path]:
    """The command of the Python below ``root`` on an emulated core."""
    python = root / "usr" / "bin" / f"python{VERSION}"
    return [f"qemu-{machine}", "-cpu", core, "-L", root, python]


def main() -> None:
    """Builds the wheel, and with --check imports its module."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--machine", choices=MACHINES, default=HOST, help="default: this one")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--check", action="store_true", help="import it, emulated where need be")
    args = parser.parse_args()
    wheel = build(args.out.resolve(), args.machine)
    print(wheel)
    if args.check:
        with tempfile.TemporaryDirectory() as scratch:
            python: list[str | Path] = [sys.executable]
            if args.machine != HOST:
                root = fetch_python(Path(scratch) / "python", args.machine)
                python = emulated_python(root, args.machine)
            for module in unpack_modules(wheel, Path(scratch)):
                print(f"{module.name} imports, and offers", import_module(module, python))


if __name__ == "__main__":
    main()
