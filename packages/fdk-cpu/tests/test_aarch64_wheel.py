"""The wheel for 64-bit ARM: cross-built, its module imported by an emulated ARM Python.

Slow (a build of all kernels): run by `nox -s wheel-arm`.
"""

import importlib.util
import shutil
import subprocess
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

SOURCE = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    path = SOURCE / "tools" / "aarch64_wheel.py"
    if not path.is_file():
        pytest.skip("runs without the source of the kernels")
    spec = importlib.util.spec_from_file_location("aarch64_wheel", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tools = ("aarch64-linux-gnu-g++", "readelf", module.UV)
    if missing := [name for name in tools if shutil.which(name) is None]:
        pytest.skip(f"needs {', '.join(missing)} on PATH; .ci/run installs them")
    return module


@pytest.fixture(scope="module")
def wheel(tool: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tool.build(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def extension(tool: ModuleType, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tool.unpack_module(wheel, tmp_path_factory.mktemp("module"))


def test_tags_and_records(tool: ModuleType, wheel: Path) -> None:
    tag = f"cp{tool.VERSION.replace('.', '')}"
    assert wheel.name.endswith(f"-{tag}-{tag}-{tool.PLATFORM}.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        record = next(name for name in names if name.endswith("/RECORD"))
        lines = archive.read(record).decode().splitlines()
        assert {line.split(",")[0] for line in lines} == names
        tags = archive.read(record.replace("RECORD", "WHEEL")).decode()
    assert f"Tag: {tag}-{tag}-{tool.PLATFORM}" in tags


def test_asks_for_nothing_newer_than_its_tag(tool: ModuleType, extension: Path) -> None:
    assert tool.machine_of(extension) == "AArch64"
    assert tool.glibc_of(extension) <= tool.GLIBC
    assert {name.split(".")[0] for name in tool.needed_by(extension)} <= {
        *("libc", "libm", "libpthread", "ld-linux-aarch64")
    }


@pytest.mark.parametrize(
    ("core", "isas"),
    [
        ("cortex-a76", "scalar neon neondot"),
        ("max,sve-max-vq=1", "scalar neon neondot neonbf16 sve2"),
    ],
)
def test_imports(tool: ModuleType, extension: Path, tmp_path: Path, core: str, isas: str) -> None:
    if shutil.which("qemu-aarch64") is None:
        pytest.skip("needs qemu-aarch64 on PATH; .ci/run installs it")
    try:
        root = tool.fetch_python(tmp_path / "python")
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs Debian's Python {tool.VERSION} for arm64: {error}")
    assert tool.import_emulated(extension, root, core) == isas
