"""Profiles: the output of Nsight Compute and objdump, from stand-ins on PATH."""

import json
import shutil
import subprocess

import pytest
from typer.testing import CliRunner

from fdk_bench.cases import KernelCase, parse_case
from fdk_bench.cli import app
from fdk_bench.kernels import contender_of
from fdk_bench.peers import Dense
from fdk_bench.profile import (
    KernelProfile,
    functions_of,
    kernel_files,
    parse_ncu,
    sources_of,
)

NCU = """==PROF== Connected to process 1
==PROF== Profiling "gemv" - 0: 0%....50%....100% - 8 passes
"ID","Kernel Name","gpu__time_duration.sum","dram__throughput.avg.pct_of_peak_sustained_elapsed",\
"sm__issue_active.avg.pct_of_peak_sustained_elapsed","launch__registers_per_thread"
"","","us","%","%","register/thread"
"0","void gemv<4>(int, char)","1,010.5","76.25","51","128"
"1","add","1.5","3.5","n/a","16"
==PROF== Disconnected
"""
LISTING = """
a.out:     file format elf64-x86-64

0000000000001000 <void fdk::gemv<fdk::Avx2, 4, 1>(fdk::Weight const&)>:
    1000:\tvmovups (%rdi),%ymm0
    1004:\tvfmadd231ps %ymm1,%ymm2,%ymm0
    1009:\tvmovups %ymm0,0x20(%rsp)
    100f:\tret

0000000000001010 <void fdk::gemv<fdk::Avx2, 8, 1>(fdk::Weight const&)>:
    1010:\tret
0000000000001020 <other>:
    1020:\tnop
"""


SYMBOLS = """
a.out:     file format elf64-x86-64

SYMBOL TABLE:
0000000000000000 l    df *ABS*\t0000000000000000              linear_avx2.cpp
0000000000001000 l     F .text\t0000000000000010              _ZN3fdk4gemvILi4EEEv
0000000000003000 l     O .rodata\t0000000000000040              table
0000000000001010 l     F .text\t0000000000000010              _ZN3fdk4gemvILi8EEEv
0000000000000000 l    df *ABS*\t0000000000000000              linear_int8_avx2.cpp
0000000000002000 l     F .text\t0000000000000010              _ZN3fdk4gemvILi2EEEv
0000000000001020 g     F .text\t0000000000000001              other
"""


def run(*arguments):
    return CliRunner().invoke(app, ["profile", *map(str, arguments)])


def stand_in(folder, name, text, monkeypatch):
    """Put a program on PATH that prints a text and records its arguments."""
    (folder / "text").write_text(text)
    program = folder / name
    program.write_text(f'#!/bin/sh\necho "$@" > {folder}/arguments\ncat {folder}/text\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return lambda: (folder / "arguments").read_text()


@pytest.mark.parametrize(
    ("text", "case"),
    [
        (
            "m1-n64-k128-custom4-g64-bf16-cuda-marlin-lut",
            KernelCase(1, 64, 128, "custom4-g64", "bf16", "cuda", "marlin-lut"),
        ),
        (
            "m16-n64-k128-affine3-row-zint-fp16-cpu",
            KernelCase(16, 64, 128, "affine3-row-zint", "fp16", "cpu", "auto"),
        ),
        (
            "m1-n64-k128-nf4-g64-bf16-int8-cpu-cpu",
            KernelCase(1, 64, 128, "nf4-g64", "bf16", "cpu", "cpu", "int8"),
        ),
        ("m1-n64-k128-bf16-bf16-cpu", KernelCase(1, 64, 128, "bf16", "bf16", "cpu", "torch")),
    ],
)
def test_parse_case(text, case):
    assert parse_case(text) == case
    assert parse_case(str(case)) == case


def test_parse_case_refuses():
    for text, said in (
        ("gemv", "wanted a case such as .*, got 'gemv'"),
        ("m1-n64-k64-int9-bf16-cpu", "int9"),
        ("m0-n64-k64-int4-g64-bf16-cpu", "at least 1, got m=0, n=64, k=64"),
        ("m1-n64-k250-int4-g64-bf16-cpu", "multiple of 64, got k=250"),
        ("m1-n64-k64-int4-g64-bf16-cpu-zzz", "auto, .*, int4pack, .*; got 'zzz'"),
        ("m1-n64-k64-int4-g64-bf16-cpu-torch", "got 'torch'"),
    ):
        with pytest.raises(ValueError, match=said):
            parse_case(text)


def test_contender_of():
    assert isinstance(contender_of(parse_case("m1-n64-k128-bf16-bf16-cpu")), Dense)
    assert contender_of(parse_case("m1-n64-k128-int4-g64-bf16-cpu-int4pack")).name == "int4pack"
    assert contender_of(parse_case("m1-n64-k128-int4-g64-bf16-cpu-cpu")).name == "fdk"


def test_parse_ncu():
    gemv, add = parse_ncu(NCU)
    assert gemv.name == "void gemv<4>(int, char)"
    assert gemv.metrics["gpu__time_duration.sum"] == (1010.5, "us")
    assert gemv.shares == {"device memory": 76.25, "issue slots": 51}
    assert gemv.verdict == "device memory, at 76 %"
    assert add.shares == {"device memory": 3.5}
    assert add.verdict == "latency: nothing is busy, the busiest is device memory at 4 %"
    assert KernelProfile("x", {}).verdict == "no metric was read"
    with pytest.raises(ValueError, match="ERR_NVGPUCTRPERM"):
        parse_ncu("==ERROR== ERR_NVGPUCTRPERM")


def test_functions_of():
    (gemv,) = functions_of(LISTING, r"\bavx2, 4\b")
    assert gemv.mnemonics == {"vmovups": 2, "vfmadd231ps": 1, "ret": 1}
    assert gemv.on_stack == 1
    assert len(functions_of(LISTING, ".")) == 3


def test_functions_tell_their_files():
    sources = sources_of(SYMBOLS)
    files = {0x1000: "linear_avx2.cpp", 0x1010: "linear_avx2.cpp", 0x2000: "linear_int8_avx2.cpp"}
    assert sources == files
    found = functions_of(LISTING, ".", sources)
    assert [function.source for function in found] == ["linear_avx2.cpp"] * 2 + [""]


def test_gpu_case_runs_under_ncu(tmp_path, monkeypatch):
    arguments = stand_in(tmp_path, "ncu", NCU, monkeypatch)
    done = run("m1-n64-k64-int4-g64-bf16-cuda")
    assert done.exit_code == 0, done.output
    assert "bound by device memory, at 76 %" in done.stdout
    assert "profile m1-n64-k64-int4-g64-bf16-cuda --inside" in arguments()
    assert "--profile-from-start off" in arguments()
    done = run("m1-n64-k64-int4-g64-bf16-cuda", "--json")
    verdicts = [json.loads(line)["verdict"] for line in done.stdout.splitlines()]
    assert verdicts[0] == "device memory, at 76 %"


def test_report_of_ncu_is_kept(tmp_path, monkeypatch):
    arguments = stand_in(tmp_path, "ncu", NCU, monkeypatch)
    program, name = tmp_path / "ncu", "m1-n64-k64-int4-g64-bf16-cuda"
    report = tmp_path / "reports" / f"{name}.ncu-rep"
    # Writes a report as the real one does, and prints the table of an existing one.
    program.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/arguments\n'
        f'if [ "$1" = --export ]; then echo report > "$2"; else cat "$2" {tmp_path}/text; fi\n'
    )
    done = run(name, "--out", tmp_path / "reports")
    assert done.exit_code == 0, done.output
    assert report.read_text() == "report\n"
    assert "bound by device memory, at 76 %" in done.stdout
    assert f"ncu's report is in {report}" in done.stderr
    collected, imported = arguments().splitlines()
    assert collected.startswith(f"--export {report} --force-overwrite --set full ")
    assert collected.endswith(f"profile {name} --inside")
    assert imported == f"--import {report} --csv --page raw"
    # The report of an earlier run is not read instead of one that was not written.
    program.write_text("#!/bin/sh\necho ==ERROR== no permission\n")
    done = run(name, "--out", tmp_path / "reports")
    assert (done.exit_code, report.exists()) == (1, False)
    assert "no permission" in done.stderr


def test_ncu_without_a_table(tmp_path, monkeypatch):
    stand_in(tmp_path, "ncu", "==ERROR== no permission", monkeypatch)
    done = run("m1-n64-k64-int4-g64-bf16-cuda")
    assert done.exit_code == 1
    assert "no permission" in done.stderr


def test_missing_tools_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    done = run("m1-n64-k64-int4-g64-bf16-cuda")
    assert (done.exit_code, "ncu is not on PATH" in done.stderr) == (1, True)
    done = run("m1-n64-k64-int4-g64-bf16-cpu")
    assert (done.exit_code, "objdump is not on PATH" in done.stderr) == (1, True)


def test_cpu_case_is_disassembled(tmp_path, monkeypatch):
    arguments = stand_in(tmp_path, "objdump", LISTING, monkeypatch)
    library = tmp_path / "library"
    library.write_text("")
    case = "m1-n64-k64-int4-g64-bf16-cpu"
    done = run(case, "--library", library, "--symbol", "avx2, 4", "--listing")
    assert done.exit_code == 0, done.output
    assert "4 instructions, 1 on the stack: 2 vmovups" in done.stdout
    assert "vfmadd231ps %ymm1,%ymm2,%ymm0" in done.stdout
    assert arguments().split()[-1] == str(library)
    done = run(case, "--library", library, "--symbol", "avx2", "--json")
    assert [json.loads(line)["on_stack"] for line in done.stdout.splitlines()] == [1, 0]
    done = run(case, "--library", library, "--symbol", "neon")
    assert done.exit_code == 1
    assert "no function matches 'neon'" in done.stderr
    assert "stripped" not in done.stderr
    (tmp_path / "text").write_text("")
    done = run(case, "--library", library)
    assert done.exit_code == 1
    assert "is it stripped?" in done.stderr
    assert "cmake -S packages/fdk-cpu" in done.stderr


def test_real_objdump(tmp_path):
    compiler, objdump = shutil.which("cc"), shutil.which("objdump")
    if not (compiler and objdump):
        pytest.skip("needs cc and objdump")
    source = tmp_path / "a.c"
    source.write_text("int twice(int x) { return 2 * x; }\n")
    library = tmp_path / "a.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", source, "-o", library], check=True)
    done = run("m1-n64-k64-int4-g64-bf16-cpu", "--library", library, "--symbol", "^twice$")
    assert done.exit_code == 0, done.output
    assert "1 ret" in done.stdout
    library.write_text("")
    done = run("m1-n64-k64-int4-g64-bf16-cpu", "--library", library)
    assert done.exit_code == 2
    assert f"--library: {objdump} failed: wanted a program or library, got " in done.stderr
    assert "a.so of 0 bytes" in done.stderr


def test_kernels_of_the_installed_package():
    pytest.importorskip("fdk_cpu")
    if not shutil.which("objdump"):
        pytest.skip("needs objdump")
    done = run("m1-n64-k64-custom4-g64-bf16-cpu", "--json")
    assert done.exit_code == 0, done.output
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert any("gemv" in function["name"] for function in found)
    assert all(sum(function["instructions"].values()) > 0 for function in found)
    assert not any("Int8Task" in function["name"] for function in found)
    done = run("m1-n64-k64-custom4-g64-bf16-int8-cpu", "--json")
    assert done.exit_code == 0, done.output
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert all("Int8Task" in function["name"] for function in found)
    done = run("m1-n64-k64-bf16-bf16-cpu")
    assert done.exit_code == 1
    assert "wanted a quantised format, or --symbol" in done.stderr


@pytest.mark.parametrize(
    ("isa", "bits", "activations", "homes"),
    [
        ("amx", 4, "bf16", ["amx", "avx512bf16"]),
        ("amx", 1, "bf16", ["amx", "avx512bf16", "avx512vnni"]),
        ("amx", 4, "fp32", ["avx512"]),
        ("amx", 4, "bf16-int8", ["avx512vnni"]),
        ("avx512bf16", 4, "bf16", ["avx512bf16"]),
        ("avx512bf16", 2, "bf16", ["avx512bf16", "avx512vnni"]),
        ("avx512bf16", 4, "fp16", ["avx512"]),
        ("avx512bf16", 4, "fp32", ["avx512"]),
        ("avx512bf16", 4, "fp32-int8", ["avx512vnni"]),
        ("avx512", 4, "bf16", ["avx512"]),
        ("avx512", 4, "bf16-int8", ["avx2"]),
        ("avx2", 4, "bf16", ["avx2"]),
        ("avx2", 4, "fp32", ["avx2"]),
    ],
)
def test_kernels_in_use_come_first(isa, bits, activations, homes):
    fdk_cpu = pytest.importorskip("fdk_cpu")
    if not shutil.which("objdump"):
        pytest.skip("needs objdump")
    if isa not in fdk_cpu.instruction_sets():
        pytest.skip(f"needs {isa}")
    fdk_cpu.set_instruction_set(isa)
    try:
        done = run(f"m16-n64-k64-custom{bits}-g64-{activations}-cpu", "--json")
    finally:
        fdk_cpu.set_instruction_set("auto")
    assert done.exit_code == 0, done.output
    sources = [json.loads(line)["source"] for line in done.stdout.splitlines()]
    ranks = [
        next((i for i, home in enumerate(homes) if f"_{home}." in source), len(homes))
        for source in sources
    ]
    assert ranks == sorted(ranks)
    assert set(ranks) >= set(range(len(homes)))


@pytest.mark.parametrize(
    ("case", "isa", "homes"),
    [
        ("m1-n64-k64-nf4-g64-bf16-cpu", "amx", ("amx", "avx512bf16", "avx512vnni")),
        ("m1-n64-k64-nf4-g64-fp32-cpu", "amx", ("avx512",)),
        ("m1-n64-k64-nf4-g64-fp16-int8-cpu", "amx", ("avx512vnni",)),
        ("m1-n64-k64-nf4-g64-bf16-cpu", "neoni8mm", ("neonbf16",)),
        ("m1-n64-k64-nf4-g64-fp16-cpu", "sve2", ("neon",)),
        ("m1-n64-k64-nf4-g64-fp32-cpu", "scalar", ("scalar",)),
    ],
)
def test_homes_of_kernels(case, isa, homes):
    """The same choice as kernels_for and int8_kernels_for in fdk-cpu's native code."""
    assert kernel_files(parse_case(case), isa) == homes


def test_bad_usage(refused):
    refused(run, "gemv", said="wanted a case such as")
    refused(run, "m1-n64-k64-int4-g64-bf16-cpu", "--library", "absent", said="absent")
    said = "--symbol: wanted a regular expression, got '('"
    refused(run, "m1-n64-k64-int4-g64-bf16-cpu", "--symbol", "(", said=said)
    said = "--out: wanted a case on cuda"
    refused(run, "m1-n64-k64-int4-g64-bf16-cpu", "--out", "profiles", said=said)
