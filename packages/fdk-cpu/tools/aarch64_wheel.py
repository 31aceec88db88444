"""Cross-builds the wheel for 64-bit ARM Linux, and imports it there by emulation.

    python packages/fdk-cpu/tools/aarch64_wheel.py --out dist

For the Python that runs this. Needs uv and Debian's cross-compiler (g++-aarch64-linux-gnu); --check
needs qemu-aarch64 and a Python for ARM of the same version, whose packages it fetches into a folder
of its own with apt-get (8 MB), so the version has to be Debian's.
"""

import argparse
import base64
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "packages" / "fdk-cpu"
UV = os.environ.get("UV", "uv")
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
SUFFIX = f".cpython-{VERSION.replace('.', '')}-aarch64-linux-gnu.so"
# The C++ runtime of Debian 12's compiler, linked in, asks for 2.36; `glibc_of` checks.
GLIBC = (2, 36)
PLATFORM = f"manylinux_{GLIBC[0]}_{GLIBC[1]}_aarch64"
DEFINES = {
    "CMAKE_SYSTEM_NAME": "Linux",
    "CMAKE_SYSTEM_PROCESSOR": "aarch64",
    "CMAKE_CXX_COMPILER": "aarch64-linux-gnu-g++",
    # Older systems lack the C++ runtime of this compiler.
    "CMAKE_MODULE_LINKER_FLAGS": "-static-libstdc++ -static-libgcc",
    "PYTHON_MODULE_EXTENSION": SUFFIX,
}
PACKAGES = (
    *(f"python{VERSION}-minimal", f"libpython{VERSION}-minimal", f"libpython{VERSION}-stdlib"),
    *("libc6", "libexpat1", "zlib1g"),
)
# The module alone: the package imports torch, which is not there.
IMPORT = """
import sys
sys.path.insert(0, sys.argv[1])
import _native
print(*_native.instruction_sets())
assert _native.layout_sizes(8, 128, 64, 4) == (512, 16)
"""


def build(out: Path) -> Path:
    """The wheel, built by uv with the workspace's pins."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]
    defines = " ".join(f"'-D{name}={value}'" for name, value in DEFINES.items())
    cross = {
        "_PYTHON_HOST_PLATFORM": "linux-aarch64",
        "SETUPTOOLS_EXT_SUFFIX": SUFFIX,
        "CMAKE_ARGS": defines,
    }
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as pins:
        pins.writelines(f"{line}\n" for line in settings["build-constraint-dependencies"])
        pins.flush()
        command = [UV, "build", "--quiet", "--wheel", PACKAGE, "--out-dir", out, "-b", pins.name]
        subprocess.run([*command, "--python", sys.executable], env=os.environ | cross, check=True)
    return retag(next(out.glob("fdk_cpu-*-linux_aarch64.whl")))


def retag(wheel: Path) -> Path:
    """The wheel with the platform that says which glibc it asks for, in place of the old one."""
    target = wheel.with_name(wheel.name.replace("linux_aarch64", PLATFORM))
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as new:
        files = {info.filename: old.read(info) for info in old.infolist()}
        tags = next(name for name in files if name.endswith(".dist-info/WHEEL"))
        record = tags.replace("WHEEL", "RECORD")
        files[tags] = files[tags].replace(b"-linux_aarch64", f"-{PLATFORM}".encode())
        digest = base64.urlsafe_b64encode(hashlib.sha256(files[tags]).digest()).decode().rstrip("=")
        line = f"{tags},sha256={digest},{len(files[tags])}"
        lines = files[record].decode().splitlines()
        lines = [line if entry.startswith(f"{tags},") else entry for entry in lines]
        files[record] = ("\n".join(lines) + "\n").encode()
        for name, content in files.items():
            new.writestr(name, content)
    wheel.unlink()
    return target


def unpack_module(wheel: Path, folder: Path) -> Path:
    """The extension module of a wheel; it must be there, by its name for ARM."""
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(f"fdk_cpu/_native{SUFFIX}", folder))


def machine_of(module: Path) -> str:
    """What `readelf` calls the machine of an ELF file."""
    return re.search(r"Machine:\s+(\S+)", readelf("-h", module))[1]


def glibc_of(module: Path) -> tuple[int, int]:
    """The newest version of glibc whose symbols a module asks for."""
    found = re.findall(r"GLIBC_(\d+)\.(\d+)", readelf("-V", module))
    return max((int(major), int(minor)) for major, minor in found)


def needed_by(module: Path) -> list[str]:
    """The shared libraries that a module asks for."""
    return re.findall(r"\(NEEDED\).*\[(.*)\]", readelf("-d", module))


def readelf(option: str, module: Path) -> str:
    """What `readelf` says about a module."""
    command = ["readelf", "-W", option, module]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def fetch_python(folder: Path) -> Path:
    """Debian's Python for ARM, unpacked below a folder; nothing of the system changes.

    Raises:
        subprocess.CalledProcessError: where apt-get or a package is missing.
    """
    root, lists, cache = folder / "root", folder / "lists", folder / "cache"
    for path in (root, lists / "partial", cache / "archives" / "partial"):
        path.mkdir(parents=True)
    (folder / "status").touch()
    settings = {
        "Dir::State::lists": lists,
        "Dir::State::status": folder / "status",
        "Dir::Cache": cache,
        "APT::Architecture": "arm64",
        "APT::Architectures::": "arm64",
        "APT::Sandbox::User": "root",
    }
    apt = [
        "apt-get",
        "-qq",
        *(item for pair in settings.items() for item in ("-o", "=".join(map(str, pair)))),
    ]
    subprocess.run([*apt, "update"], check=True, capture_output=True)
    subprocess.run([*apt, "download", *PACKAGES], cwd=folder, check=True, capture_output=True)
    for package in folder.glob("*.deb"):
        subprocess.run(["dpkg", "-x", package, root], check=True)
    return root


def import_emulated(module: Path, root: Path, core: str = "max") -> str:
    """What the module prints when it is imported by a Python for ARM under qemu."""
    python = root / "usr" / "bin" / f"python{VERSION}"
    command = ["qemu-aarch64", "-cpu", core, "-L", root, python, "-I", "-c", IMPORT, module.parent]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"the module does not import: {done.stderr}")
    return done.stdout.strip()


def main() -> None:
    """Builds the wheel; checks what it asks for, and with --check that it imports."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--check", action="store_true", help="import it under qemu")
    args = parser.parse_args()
    wheel = build(args.out.resolve())
    with tempfile.TemporaryDirectory() as scratch:
        module = unpack_module(wheel, Path(scratch))
        if machine_of(module) != "AArch64" or glibc_of(module) > GLIBC:
            raise SystemExit(f"{wheel.name} holds {machine_of(module)}, glibc {glibc_of(module)}")
        print(f"{wheel}: AArch64, glibc {'.'.join(map(str, glibc_of(module)))}", end="; ")
        print("needs", ", ".join(needed_by(module)))
        if args.check:
            print("imported:", import_emulated(module, fetch_python(Path(scratch) / "python")))


if __name__ == "__main__":
    main()
