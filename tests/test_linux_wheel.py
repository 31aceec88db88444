"""The wheel of fdk-cpu for 64-bit ARM: cross-built, its module imported by an emulated ARM Python.

Slow (a build of all kernels): run by `nox -s wheel-arm`. That for this machine is tagged, installed
and tested by the session `wheels`.
"""

import shutil
import subprocess
import zipfile
from pathlib import Path

import linux_wheel
import pytest
from linux_wheel import (
    VERSION,
    emulated_python,
    fetch_python,
    foreign_libraries,
    glibc_of,
    import_module,
    machine_of,
    suffix_of,
    unpack_modules,
)

MACHINE = "aarch64"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tools = (f"{MACHINE}-linux-gnu-g++", "readelf", linux_wheel.UV)
    if missing := [name for name in tools if shutil.which(name) is None]:
        pytest.skip(f"needs {', '.join(missing)} on PATH; .ci/run installs them")
    return linux_wheel.build(tmp_path_factory.mktemp("wheel"), MACHINE)


@pytest.fixture(scope="module")
def module(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    (found,) = unpack_modules(wheel, tmp_path_factory.mktemp("module"))
    return found


def test_tags_and_records(wheel: Path, module: Path) -> None:
    version = f"cp{VERSION.replace('.', '')}"
    tag = "{}-{}-manylinux_{}_{}_{}".format(version, version, *glibc_of(module), MACHINE)
    assert wheel.name.endswith(f"-{tag}.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        record = next(name for name in names if name.endswith("/RECORD"))
        lines = archive.read(record).decode().splitlines()
        assert {line.split(",")[0] for line in lines} == names
        assert f"Tag: {tag}\n" in archive.read(record.replace("RECORD", "WHEEL")).decode()


def test_asks_for_no_more_than_linux_has(module: Path) -> None:
    assert module.name == f"_native{suffix_of(MACHINE)}"
    assert machine_of(module) == "AArch64"
    assert glibc_of(module) <= (2, 34)  # as the README of fdk-cpu says
    assert foreign_libraries(module) == []


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Debian's Python for ARM."""
    tools = (f"qemu-{MACHINE}", "apt-get", "dpkg")
    if missing := [tool for tool in tools if shutil.which(tool) is None]:
        pytest.skip(f"needs {', '.join(missing)} on PATH; .ci/run installs qemu")
    try:
        return fetch_python(tmp_path_factory.mktemp("python"), MACHINE)
    except subprocess.CalledProcessError as error:
        if error.cmd[-1] != "update":  # without a network nothing can be fetched
            raise
        pytest.skip(f"needs Debian's Python {VERSION} for {MACHINE}: {error}")


@pytest.mark.parametrize(
    ("core", "isas"),
    [
        ("cortex-a76", "scalar neon neondot"),
        ("max,sve-max-vq=1", "scalar neon neondot neonbf16 neoni8mm sve2"),
    ],
)
def test_imports(module: Path, root: Path, core: str, isas: str) -> None:
    assert import_module(module, emulated_python(root, MACHINE, core)) == isas
