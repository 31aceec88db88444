"""tools/run_on_device.sh with the real adb client, an emulated device and a stand-in NDK.

The tests start their own adb server; pushed ARM executables run through qemu.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "tools" / "run_on_device.sh"
TOOLS = ("adb", "cmake", "ninja", "qemu-aarch64", "aarch64-linux-gnu-g++")
CACHE = os.environ.get("CMAKE_CXX_COMPILER_LAUNCHER", "")
# Emulation is a hundred times slower than a phone.
SMALL = ["--", "--sizes", "8x128", "--seconds", "0", "--rotate-mb", "1", "--cores", "1"]
# The toolchain file of the stand-in NDK, whose compiler is Debian's.
TOOLCHAIN = """
if(NOT ANDROID_ABI STREQUAL "arm64-v8a" OR NOT ANDROID_STL STREQUAL "c++_static")
  message(FATAL_ERROR "stand-in NDK: asked for ${ANDROID_ABI} with ${ANDROID_STL}")
endif()
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES ANDROID_ABI ANDROID_STL)
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER ${CMAKE_CURRENT_LIST_DIR}/../../toolchains/clang++)
set(CMAKE_EXE_LINKER_FLAGS_INIT -static)
"""


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("ANDROID_NDK_HOME", "ANDROID_NDK_ROOT", "ANDROID_HOME", "ANDROID_SDK_ROOT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CMAKE_GENERATOR", "Ninja")


@pytest.fixture(scope="module")
def adb_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of a private adb server, which sees no other devices."""
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        pytest.skip(f"needs {', '.join(missing)} on PATH; .ci/run installs them")
    home = str(tmp_path_factory.mktemp("adb"))
    for _ in range(5):  # another process may take the port before adb does
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        server = {"ANDROID_ADB_SERVER_PORT": str(port), "HOME": home, "ADB_MDNS": "0"}
        started = subprocess.run(
            ["adb", "start-server"], env=os.environ | server, capture_output=True, text=True
        )
        if started.returncode == 0:
            break
    else:
        pytest.fail(f"adb does not start its server: {started.stderr}")
    yield server
    subprocess.run(["adb", "kill-server"], env=os.environ | server, capture_output=True)


class Emulated:
    """A running device, its folder and its name in `adb devices`."""

    def __init__(self, root: Path, server: dict[str, str], *options: str) -> None:
        self.root, self.server = root, server
        command = [sys.executable, ROOT / "tests" / "emulated_device.py", "--root", root, *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.serial = f"127.0.0.1:{self.process.stdout.readline().strip()}"
        try:
            self.adb("connect", self.serial)
        except BaseException:
            self.process.kill()
            raise

    def adb(self, *arguments: str) -> None:
        subprocess.run(["adb", *arguments], env=os.environ | self.server, check=True)

    def close(self) -> None:
        self.adb("disconnect", self.serial)
        self.process.kill()
        self.process.communicate()

    def left_behind(self) -> list[str]:
        return sorted(path.name for path in (self.root / "data/local/tmp").iterdir())


@pytest.fixture
def device(tmp_path: Path, adb_server: dict[str, str]) -> Iterator[Emulated]:
    emulated = Emulated(tmp_path / "device", adb_server)
    yield emulated
    emulated.close()


def run(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    environment = os.environ | (env or {})
    return subprocess.run([SCRIPT, *arguments], env=environment, capture_output=True, text=True)


def only(tools: tuple[str, ...], folder: Path) -> str:
    """Return a PATH with only these tools and those that the script needs."""
    folder.mkdir()
    for tool in (*tools, "bash", "env", "dirname", "awk", "tr", "git", "sort", "basename", "wc"):
        found = shutil.which(tool)
        assert found is not None, tool
        (folder / tool).symlink_to(found)
    return str(folder)


def make_ndk(folder: Path) -> Path:
    """Make a folder that looks like an NDK; it logs the commands of Debian's cross-compiler.

    ccache, if it is used, wraps Debian's compiler: it would treat each stand-in as a new one.
    """
    toolchain = folder / "build" / "cmake" / "android.toolchain.cmake"
    toolchain.parent.mkdir(parents=True)
    toolchain.write_text(TOOLCHAIN)
    compiler = folder / "toolchains" / "clang++"
    compiler.parent.mkdir()
    compiler.write_text(
        f'#!/bin/sh\necho "$@" >> "{folder}/log"\nexec {CACHE} aarch64-linux-gnu-g++ "$@"\n'
    )
    compiler.chmod(0o755)
    return folder


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_help() -> None:
    done = run("--help")
    assert done.returncode == 0
    named = ("--serial", "--abi", "--output", "--dry-run", "ANDROID_NDK_HOME", "--activations int8")
    for option in named:
        assert option in done.stdout


def test_dry_run_touches_nothing(tmp_path: Path) -> None:
    env = {"PATH": only((), tmp_path / "bin")}  # neither adb nor a compiler
    (tmp_path / "bin" / "cmake").symlink_to("/bin/false")
    done = run("--dry-run", "--build-dir", str(tmp_path / "b"), "--", "--bits", "2", env=env)
    assert done.returncode == 0, done.stderr
    steps = [line for line in done.stderr.splitlines() if line.startswith("+ ")]
    assert [step.split()[1:3] for step in steps if "adb" in step] == [
        ["adb", "shell"],
        ["adb", "push"],
        ["adb", "shell"],
        ["adb", "shell"],
        ["adb", "pull"],
        ["adb", "shell"],
    ]
    assert "--preset static-arm64" in steps[0]
    assert "rm" in steps[-1]
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--fast"], "unknown option --fast"),
        (["--serial"], "--serial needs a value"),
        (["--dry-run", "--abi", "armeabi-v7a"], "not for armeabi-v7a"),
    ],
)
def test_wrong_options(arguments: list[str], message: str) -> None:
    done = run(*arguments)
    assert (done.returncode, message in done.stderr) == (1, True), done.stderr


def test_missing_adb(tmp_path: Path) -> None:
    done = run(env={"PATH": only((), tmp_path / "bin")})
    assert done.returncode == 1
    assert "needs adb on PATH" in done.stderr
    assert "apt-get install adb" in done.stderr


def test_no_device(adb_server: dict[str, str]) -> None:
    done = run(env=adb_server)
    assert done.returncode == 1
    assert "no device: connect one" in done.stderr


def test_several_devices(device: Emulated, adb_server: dict[str, str], tmp_path: Path) -> None:
    other = Emulated(tmp_path / "other", adb_server)
    try:
        done = run(env=adb_server)
        assert "several devices, choose one with --serial" in done.stderr
        assert device.serial in done.stderr
        assert other.serial in done.stderr
    finally:
        other.close()
    done = run("--serial", "abc", env=adb_server)
    assert f"no device abc; connected: {device.serial}" in done.stderr
    done = run("--abi", "x86_64", env=adb_server)
    assert "supports arm64-v8a,armeabi-v7a, not x86_64" in done.stderr


def test_missing_compiler(device: Emulated, adb_server: dict[str, str], tmp_path: Path) -> None:
    done = run(env=adb_server | {"PATH": only(("adb", "cmake"), tmp_path / "bin")})
    assert done.returncode == 1
    assert "no compiler for arm64-v8a: set ANDROID_NDK_HOME" in done.stderr


def test_wrong_ndk(device: Emulated, adb_server: dict[str, str], tmp_path: Path) -> None:
    done = run(env=adb_server | {"ANDROID_NDK_HOME": str(tmp_path)})
    assert done.returncode == 1
    assert f"ANDROID_NDK_HOME={tmp_path} is not an NDK" in done.stderr


@pytest.mark.parametrize("where", ["named", "newest of the SDK"])
def test_dry_run_finds_the_ndk(tmp_path: Path, where: str) -> None:
    ndk = make_ndk(tmp_path / "Android" / "Sdk" / "ndk" / "27.0.1")
    other = make_ndk(tmp_path / "Android" / "Sdk" / "ndk" / "9.9.9")
    env = {"ANDROID_NDK_HOME": str(other)} if where == "named" else {}
    done = run("--dry-run", env=env)
    chosen = other if where == "named" else ndk
    assert f"NDK {chosen}" in done.stderr
    assert "--preset android-arm64" in done.stderr


def test_runs_on_a_device(device: Emulated, adb_server: dict[str, str], tmp_path: Path) -> None:
    output = tmp_path / "results" / "rows.jsonl"
    build = ["--build-dir", str(tmp_path / "build"), "--output", str(output)]
    done = run(*build, *SMALL, "--bits", "4,1", "--threads", "1,2", env=adb_server)
    assert done.returncode == 0, done.stderr
    assert f"4 rows in {output}" in done.stdout
    rows = rows_of(output)
    assert [(row["case"]["format"], row["threads"]) for row in rows] == [
        ("custom4-g64", 1),
        ("custom4-g64", 2),
        ("custom1-g64", 1),
        ("custom1-g64", 2),
    ]
    for row in rows:
        assert set(row) == {
            *("benchmark", "case", "values", "error", "started", "command", "commit"),
            *("device", "threads", "platform", "versions"),
        }
        assert (row["device"], row["error"]) == ("Emulated 8", None)
        assert row["platform"].endswith("aarch64")
        assert row["values"]["nbytes"] == 8 * 128 * int(row["case"]["format"][6]) // 8 + 8 * 2 * 2
        assert 0 < row["values"]["min_us"] <= row["values"]["median_us"]
        assert row["values"]["read_gb_s"] > 0
    assert device.left_behind() == []

    # Benchmark options pass through and show in the rows.
    done = run(*build, *SMALL, "--activations", "int8", "--m", "1,3", env=adb_server)
    assert done.returncode == 0, done.stderr
    rounded = rows_of(output)
    assert [(row["case"]["m"], row["case"]["activations"]) for row in rounded] == [
        (1, "int8"),
        (3, "int8"),
    ]
    assert all("activations" not in row["case"] for row in rows)
    # Against the scalar kernels with int8, not against float.
    assert all(row["error"] is None and row["values"]["nrmse"] < 2**-7 for row in rounded)

    # A failure on the device is reported, and the device cleaned up.
    done = run(*build, "--", "--bits", "9", env=adb_server)
    assert done.returncode == 1
    assert "--bits: wanted 1 to 8, got '9'" in done.stdout + done.stderr
    assert "ended with status 2 on the device" in done.stderr
    assert device.left_behind() == []


def test_builds_with_an_ndk(device: Emulated, adb_server: dict[str, str], tmp_path: Path) -> None:
    ndk = make_ndk(tmp_path / "ndk")
    environment = {"ANDROID_NDK_HOME": str(ndk), "CMAKE_CXX_COMPILER_LAUNCHER": ""}
    output = tmp_path / "rows.jsonl"
    options = ["--build-dir", str(tmp_path / "build"), "--output", str(output)]
    done = run(*options, *SMALL, env=adb_server | environment)
    assert done.returncode == 0, done.stderr
    assert [row["error"] for row in rows_of(output)] == [None]
    assert "linear_neon.cpp" in (ndk / "log").read_text()
