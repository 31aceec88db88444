"""The Triton backend reports a missing C compiler, unless the launcher is built."""

import os
import stat
import sysconfig
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from triton.runtime import build, driver

from fdk_cuda.triton import backend, toolchain
from fdk_formats import Format
from fdk_formats.testing import Case

NO_COMPILER = "needs a C compiler: Triton builds its launcher with one, found no CC, gcc or clang"
PROBLEM = Case(Format.parse("nf4-g64"), 1, 64, 64, torch.bfloat16).problem


@pytest.fixture(autouse=True)
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Returns the only folder of PATH, empty; no CC, a GPU, and no launcher."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(backend, "unsupported_gpu", lambda device: None)
    monkeypatch.setattr(driver, "_active", None)
    monkeypatch.setattr(driver, "_default", None)
    monkeypatch.setattr(type(driver), "default", property(no_launcher))
    toolchain._fails.cache_clear()
    yield tmp_path
    toolchain._fails.cache_clear()


def no_launcher(driver: object) -> None:
    raise RuntimeError("Failed to find C compiler")


def add_program(folder: Path, name: str) -> str:
    program = folder / name
    program.touch()
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return str(program)


def reason() -> str | None:
    return backend.TritonBackend().unsupported(PROBLEM)


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reason() == NO_COMPILER
    monkeypatch.setenv("CC", "no-such-cc")
    assert "Triton builds its launcher with CC, found no 'no-such-cc'" in reason()


def test_no_headers(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_program(bare, "gcc")
    monkeypatch.setattr(sysconfig, "get_path", lambda name, scheme: str(bare))
    assert reason() == f"needs Python.h: Triton builds its launcher with it, found none in {bare}"
    (bare / "Python.h").touch()
    assert reason() is None


def test_built_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """No compiler is missing if the launcher is cached on disk or in this process."""
    monkeypatch.setattr(type(driver), "default", property(lambda driver: object()))
    assert reason() is None


@pytest.mark.parametrize("programs", [(), ("gcc",), ("clang",), ("clang", "gcc"), ("cc",)])
@pytest.mark.parametrize("named", [None, "gcc", "own-cc"])
def test_c_compiler(
    programs: tuple[str, ...], named: str | None, bare: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler is the one that the installed Triton would run."""
    for program in programs:
        add_program(bare, program)
    if named is not None:
        monkeypatch.setenv("CC", named)
    run = []
    monkeypatch.setattr(build.subprocess, "check_call", lambda command, **_: run.append(command[0]))
    find = getattr(build, "_find_compiler", None)  # from Triton 3.8 on
    if find is not None:
        monkeypatch.setattr(build, "_find_compiler", find.__wrapped__)
    none = pytest.raises(RuntimeError, match="Failed to find C compiler")
    with none if toolchain.c_compiler() is None else nullcontext():
        build._build("name", "name.c", os.fspath(bare), [], [], [], [])
    assert run == [program for program in (toolchain.c_compiler(),) if program is not None]
