"""The parts of a record, and what compiles ahead for them."""

import itertools
import re
import sys
import time

import pytest
import typer

from fdk_bench.cases import formats_of, shapes_of
from fdk_bench.cli import app
from fdk_bench.commands.parts import ON_CPU, ON_GPU
from fdk_bench.commands.warming import Task, run_side_by_side
from fdk_bench.kernels import KernelRun
from fdk_bench.peers import PEERS, peers_named


@pytest.mark.parametrize("part", [*ON_GPU, *ON_CPU], ids=lambda part: part.name)
def test_arguments_of_parts(part):
    """Each is what its command takes."""
    command = typer.main.get_command(app).commands[part.benchmark]
    for arguments in (part.arguments, *part.warm):
        command.make_context(part.benchmark, list(arguments))


@pytest.mark.parametrize(
    "part", [p for p in ON_GPU if p.benchmark == "compare" and p.warm], ids=lambda part: part.name
)
def test_what_is_timed_was_compiled_ahead(part, monkeypatch):
    """All cases but cuBLAS's; and what is timed has each width and m of a goal."""
    for peer in PEERS:
        monkeypatch.setattr(type(peer), "missing", lambda self: None)

    def cases(arguments):
        given = dict(zip(arguments[::2], arguments[1::2], strict=True))
        widths = [int(b) for b in given["-b"].split(",")]
        run = KernelRun(
            shapes=shapes_of(given["--shapes"].split(","), [], [], (1, 1)),
            ms=[int(m) for m in given["-m"].split(",")],
            formats=formats_of(widths, given["--format"].split(","), "64", "bf16"),
            dtype="bf16",
            device="cuda",
            backends=given["--backend"].split(","),
            peers=peers_named(given["--against"].split(",")),
            include=given.get("--include", ""),
            exclude=given["--exclude"],
        )
        shapes = [run.contenders(*shape) for shape in run.shapes]
        return [str(c) for contenders in shapes for found, _ in contenders for c in found]

    assert all(cases(arguments) for arguments in part.warm)  # none would be bad usage
    timed = cases(part.arguments)
    ahead = [case for arguments in part.warm for case in cases(arguments)]
    assert len(ahead) == len(set(ahead))
    assert {case for case in timed if not case.endswith("-torch")} == set(ahead)
    if part.name == "widths":
        for m, bits in itertools.product((1, 4, 16, 64, 256, 1024), range(1, 9)):
            assert f"m{m}-n28672-k8192-custom{bits}-g64-bf16-cuda-marlin-lut" in timed
        return
    shape = re.search(r"-n\d+-k\d+", timed[0])[0]
    many_rows = part.name.endswith(("-6144x4096", "-21504x6144", "-128256x4096"))
    for m in (64, 256, 1024, 4096) if many_rows else (1, 4, 16, 64, 256, 1024, 4096):
        for bits in (1, 2, 3, 4, 8):
            assert f"m{m}{shape}-custom{bits}-g64-bf16-cuda-marlin-lut" in timed
            assert f"m{m}{shape}-int{bits}-g64-bf16-cuda-marlin" in timed
            assert f"m{m}{shape}-custom{bits}-g64-bf16-cuda-humming" in timed


def test_side_by_side(tmp_path):
    """Two at a time: the third begins when one ends, and is killed; the fourth never begins."""

    def task(name, code):
        return Task([sys.executable, "-S", "-c", code], tmp_path / name / "log.txt")

    slow = "print('begun', flush=True); import time; time.sleep(600)"
    tasks = [task("a", slow), task("b", "raise SystemExit(3)"), task("c", slow), task("d", "0")]
    start = time.perf_counter()
    assert run_side_by_side(tasks, 2, 5.0) == [-9, 3, -9, -9]
    assert time.perf_counter() - start < 60
    assert (tmp_path / "c" / "log.txt").read_text() == "begun\n"
    assert not (tmp_path / "d").exists()
