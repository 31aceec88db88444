"""tools/run_on_device.sh with a stand-in adb, device and NDK; executables run under qemu."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "tools" / "run_on_device.sh"
TOOLS = ("cmake", "ninja", "qemu-aarch64", "aarch64-linux-gnu-g++")
# Emulation is a hundred times slower than a phone.
SMALL = ["--", "--sizes", "8x128", "--seconds", "0", "--rotate-mb", "1", "--cores", "1"]
# Like adb, it joins the words of a command with spaces for the device's shell to split again.
ADB = r"""#!/bin/sh
if [ "$1" = -s ]; then shift 2; fi
verb=$1; shift
local_path() { echo "$1" | sed "s#/data/local/tmp#$DEVICE/tmp#g"; }
case $verb in
    devices) echo "List of devices attached"; cat "$DEVICE/devices" ;;
    push)
        target=$(local_path "$2")
        cp "$1" "$target.elf"
        printf '#!/bin/sh\nexec qemu-aarch64 -cpu max "%s.elf" "$@"\n' "$target" > "$target" ;;
    pull) cp "$(local_path "$1")" "$2" ;;
    shell)
        case "$*" in
            "getprop ro.product.cpu.abilist") echo arm64-v8a,armeabi-v7a ;;
            "getprop ro.product.model") echo "Emulated 8" ;;
            *) exec sh -c "$(local_path "$*")" ;;
        esac ;;
esac
"""
# To CMake, an NDK is a toolchain file; this one's compiler is Debian's.
TOOLCHAIN = """
if(NOT ANDROID_ABI STREQUAL "arm64-v8a" OR NOT ANDROID_STL STREQUAL "c++_static")
  message(FATAL_ERROR "stand-in NDK: asked for ${ANDROID_ABI} with ${ANDROID_STL}")
endif()
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES ANDROID_ABI ANDROID_STL)
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
"""
Run = Callable[..., subprocess.CompletedProcess[str]]


def write_script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def make_ndk(folder: Path) -> Path:
    """A folder that looks like an NDK, to the script and to CMake."""
    toolchain = folder / "build" / "cmake" / "android.toolchain.cmake"
    toolchain.parent.mkdir(parents=True)
    toolchain.write_text(TOOLCHAIN)
    return folder


@pytest.fixture
def device(tmp_path: Path) -> Path:
    """The folder of a device; `devices` in it is what adb lists."""
    folder = tmp_path / "device"
    write_script(tmp_path / "bin" / "adb", ADB)
    (folder / "tmp").mkdir(parents=True)
    (folder / "devices").write_text("emulated\tdevice\n")
    return folder


@pytest.fixture
def run(device: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Runs the script with the stand-in adb first on PATH and no NDK to be found."""
    for name in ("ANDROID_NDK_HOME", "ANDROID_NDK_ROOT", "ANDROID_HOME", "ANDROID_SDK_ROOT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DEVICE", str(device))
    monkeypatch.setenv("CMAKE_GENERATOR", "Ninja")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")

    def run_script(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        env = os.environ | environment
        return subprocess.run([SCRIPT, *arguments], env=env, capture_output=True, text=True)

    return run_script


@pytest.fixture
def can_build() -> None:
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        pytest.skip(f"needs {', '.join(missing)} on PATH; .ci/run installs them")


def only(tools: tuple[str, ...], folder: Path) -> str:
    """A PATH with these tools and those that every system has."""
    folder.mkdir()
    always = ("bash", "sh", "cat", "sed", "env", "dirname", "awk", "tr", "git", "sort", "basename")
    for tool in (*tools, *always, "wc"):
        found = shutil.which(tool)
        assert found is not None, tool
        (folder / tool).symlink_to(found)
    return str(folder)


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_dry_run_touches_nothing(run: Run, device: Path, tmp_path: Path) -> None:
    assert "--build-dir" in run("--help").stdout
    done = run("--dry-run", "--build-dir", str(tmp_path / "b"), "--", "--bits", "2")
    assert done.returncode == 0, done.stderr
    steps = [line.split() for line in done.stderr.splitlines() if line.startswith("+ ")]
    verbs = [step[2] for step in steps if step[1] == "adb"]
    assert verbs == ["shell", "push", "shell", "shell", "pull", "shell"]
    assert "static-arm64" in steps[0]
    assert "rm" in " ".join(steps[-1])
    assert not (tmp_path / "b").exists()
    assert not list((device / "tmp").iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--fast"], "unknown option --fast"),
        (["--serial"], "--serial needs a value"),
        (["--dry-run", "--abi", "armeabi-v7a"], "not for armeabi-v7a"),
        (["--serial", "abc"], "no device abc; connected: emulated"),
        (["--abi", "x86_64"], "supports arm64-v8a,armeabi-v7a, not x86_64"),
    ],
)
def test_wrong_options_are_refused(run: Run, arguments: list[str], message: str) -> None:
    done = run(*arguments)
    assert (done.returncode, message in done.stderr) == (1, True), done.stderr


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        ("", "no device: connect one"),
        ("a\tdevice\nb\tdevice\n", "several devices, choose one with --serial"),
        ("a\tunauthorized\n", "accept this computer's key"),
        ("a\toffline\n", "device a is offline, not ready"),
    ],
)
def test_a_device_that_is_not_ready(run: Run, device: Path, listed: str, message: str) -> None:
    (device / "devices").write_text(listed)
    done = run()
    assert (done.returncode, message in done.stderr) == (1, True), done.stderr


def test_missing_tools_are_named(run: Run, tmp_path: Path) -> None:
    done = run(PATH=only((), tmp_path / "no_adb"))
    assert done.returncode == 1
    assert "needs adb on PATH" in done.stderr
    (tmp_path / "no_adb" / "adb").symlink_to(tmp_path / "bin" / "adb")
    (tmp_path / "no_adb" / "cmake").symlink_to("/bin/true")
    done = run(PATH=str(tmp_path / "no_adb"))
    assert "no compiler for arm64-v8a: set ANDROID_NDK_HOME" in done.stderr
    done = run(ANDROID_NDK_HOME=str(tmp_path))
    assert f"ANDROID_NDK_HOME={tmp_path} is not an NDK" in done.stderr


@pytest.mark.parametrize("where", ["named", "newest of the SDK"])
def test_dry_run_finds_the_ndk(run: Run, tmp_path: Path, where: str) -> None:
    ndk = make_ndk(tmp_path / "Android" / "Sdk" / "ndk" / "27.0.1")
    other = make_ndk(tmp_path / "Android" / "Sdk" / "ndk" / "9.9.9")
    done = run("--dry-run", **({"ANDROID_NDK_HOME": str(other)} if where == "named" else {}))
    assert f"NDK {other if where == 'named' else ndk}" in done.stderr
    assert "--preset android-arm64" in done.stderr


@pytest.mark.usefixtures("can_build")
def test_runs_on_a_device(run: Run, device: Path, tmp_path: Path) -> None:
    output = tmp_path / "results" / "rows.jsonl"
    build = ["--build-dir", str(tmp_path / "build"), "--output", str(output)]
    done = run(*build, *SMALL, "--bits", "4,1", "--threads", "1,2", "--activations", "int8")
    assert done.returncode == 0, done.stderr
    assert f"4 rows in {output}" in done.stdout
    rows = rows_of(output)
    found = [(row["case"]["format"], row["threads"]) for row in rows]
    assert found == [(f"custom{bits}-g64", threads) for bits in (4, 1) for threads in (1, 2)]
    for row in rows:
        assert (row["device"], row["error"]) == ("Emulated 8", None)
        assert row["case"]["activations"] == "int8"
        assert row["platform"].endswith("aarch64")
        assert 0 < row["values"]["min_us"] <= row["values"]["median_us"]
        assert row["values"]["nrmse"] < 2**-7
    assert not list((device / "tmp").iterdir())

    # A failure on the device fails the script, which cleans up all the same.
    done = run(*build, "--", "--bits", "9")
    assert done.returncode == 1
    assert "--bits: wanted 1 to 8, got '9'" in done.stdout + done.stderr
    assert "ended with status 2 on the device" in done.stderr
    assert not list((device / "tmp").iterdir())


@pytest.mark.usefixtures("can_build")
def test_the_preset_configures_with_an_ndk(tmp_path: Path) -> None:
    env = os.environ | {"ANDROID_NDK_HOME": str(make_ndk(tmp_path / "ndk"))}
    source = ROOT / "packages" / "fdk-cpu"
    command = ["cmake", "-S", source, "--preset", "android-arm64", "-B", tmp_path / "build"]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
