"""Peers: right answers, reasons against cases, and the limit on their time."""

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fdk_bench import timeout
from fdk_bench.cases import KernelCase
from fdk_bench.kernels import KernelRun, absent, measure
from fdk_bench.peers import PEERS, check, llama_cpp, peers_named
from fdk_bench.peers.dense import CompiledReference, DenseTriton
from fdk_bench.peers.llama_cpp import LLAMA_CPP, OwnThread, Product
from fdk_bench.peers.packages import add_nearest, gemlite_error
from fdk_bench.timeout import TookTooLongError, time_limit


# torch's compiler calls what torch itself deprecates.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
@pytest.mark.parametrize("k", [64, 256])
def test_peer_gives_the_right_answer(peer, k):
    case = KernelCase(3, 64, k, "custom4-g64", "bf16", "cpu", peer.name)
    if reason := peer.missing() or peer.unsupported(case):
        pytest.skip(f"{peer.name}: {reason}")
    prepared = peer.prepare(case, 2)
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(m, k, generator=generator).bfloat16() for m in (1, 3)]
    with torch.inference_mode():
        assert all(error < 2e-2 for error in check(prepared, inputs))
        assert torch.equal(prepared.calls[0](inputs[1]), prepared.calls[1](inputs[1]))
    # 4 bits and 16 to 32 of scale and zero point for 64 weights.
    assert 4.25 <= (prepared.nbytes - prepared.codebook_bytes) * 8 / (64 * k) <= 4.5


@pytest.mark.parametrize(
    ("peer", "bits", "text"),
    [(peer, bits, type.name) for peer in LLAMA_CPP for bits, type in peer.types.items()],
)
def test_llama_cpp_types(peer, bits, text):
    case = KernelCase(1, 64, 256, f"custom{bits}-g64", "bf16", "cpu", peer.name)
    assert peer.unsupported(case) is None
    if reason := peer.missing():
        pytest.skip(f"{peer.name}: {reason}")
    prepared = peer.prepare(case, 1)
    check(prepared, [torch.randn(1, 256, generator=torch.Generator().manual_seed(0)).bfloat16()])
    stored = prepared.nbytes * 8 / (64 * 256)
    assert bits <= stored <= bits + 0.75
    assert f"llama.cpp {text} ({stored:g} bits)" in prepared.backend


@pytest.mark.parametrize(
    ("layout", "text", "is_apart"),
    [("CPU", "", False), ("CPU_REPACK", " repacked", False), ("AMX", " for AMX", True)],
)
def test_llama_cpp_names_its_layout(layout, text, is_apart, monkeypatch):
    """Turns by AMX run in a thread whose tiles no other code configures."""
    engine = SimpleNamespace(rest=lambda: None, own_thread=OwnThread())
    monkeypatch.setattr(llama_cpp, "library_folder", Path)
    library = SimpleNamespace(quantise=lambda type, W: torch.zeros(len(W), 144, dtype=torch.uint8))
    monkeypatch.setattr(llama_cpp, "load", lambda folder: library)
    monkeypatch.setattr(llama_cpp, "Engine", lambda library, threads: engine)
    monkeypatch.setattr(llama_cpp, "Product", lambda *args: SimpleNamespace(layout=layout))
    peer = next(peer for peer in LLAMA_CPP if peer.name == "llama.cpp-Q4_0")
    prepared = peer.prepare(KernelCase(1, 64, 256, "custom4-g64", "bf16", "cpu", peer.name), 1)
    assert prepared.backend == f"llama.cpp Q4_0 (4.5 bits){text}"
    (thread,) = prepared.place(lambda: [threading.get_ident()])
    assert (thread != threading.get_ident()) == is_apart


def test_products_by_amx_have_a_thread_of_their_own():
    product = Product.__new__(Product)
    product.layout, product._held = "AMX", []
    product._engine = SimpleNamespace(own_thread=OwnThread())
    product._product = lambda x: threading.get_ident()
    one, three = torch.ones(1, 4), torch.ones(3, 4)
    own = product(three)
    assert own == product(three) != threading.get_ident()
    assert product(one) == threading.get_ident()  # one row takes no tiles
    # A turn of calls runs in that thread already.
    assert product._engine.own_thread(lambda: [product(three), product(one)]) == [own, own]


def test_own_thread_is_in_the_mode_of_its_caller():
    own = OwnThread()
    assert not own(torch.is_inference_mode_enabled)
    with torch.inference_mode():
        assert own(torch.is_inference_mode_enabled)
    with pytest.raises(RuntimeError, match="Boolean value of Tensor"):
        own(lambda: bool(torch.ones(2)))


# See above.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_every_case_of_the_compiled_peer_is_compiled(monkeypatch):
    compiled, compile = set(), torch.compile

    def backend(module, inputs):  # runs it as it is: no compiler is needed
        x = next(t for t in inputs if t.dtype == torch.bfloat16 and t.shape[-1] == k)
        compiled.add((x.shape[0], k, bits))
        return module.forward

    monkeypatch.setattr(torch, "compile", partial(compile, backend=backend))
    peer = CompiledReference()
    with torch.inference_mode():
        for k, bits in itertools.product((64, 128), (4, 2, 1)):
            case = KernelCase(1, 32, k, f"custom{bits}-g64", "bf16", "cpu", peer.name)
            call = peer.prepare(case, 1).calls[0]
            for m in (1, 2, 3):
                call(torch.ones(m, k).bfloat16())
    torch.compiler.reset()
    assert compiled == set(itertools.product((1, 2, 3), (64, 128), (4, 2, 1)))


def test_peers_say_what_they_do_not_take(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    # As if a GPU and fdk-cuda were installed.
    monkeypatch.setattr(DenseTriton, "missing", lambda self: None)
    case = KernelCase(1, 64, 64, "custom3-g64", "bf16", "cpu", "")
    reasons = {peer.name: peer.unsupported(case) for peer in PEERS}
    assert reasons["int4pack"] == "needs 4 bits, got custom3-g64"
    assert reasons["tinygemm"] == "needs cuda, got cpu"
    assert reasons["triton-16"] == "needs cuda, got cpu"
    on_gpu = replace(case, device="cuda")
    assert DenseTriton().unsupported(on_gpu) == "needs 16 bits, got custom3-g64"
    missing = absent(run_of(peers=PEERS, formats=["bf16", "custom3-g64"]))
    assert missing["int4pack"] == "needs 4 bits, got custom3-g64"
    assert missing["triton-16"] == "needs cuda, got cpu"


def test_plain_triton_says_what_is_missing(monkeypatch):
    peer, installed = DenseTriton(), set()
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name in installed or None)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert peer.missing() == "needs an NVIDIA GPU: torch finds none"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert peer.missing() == "pip install triton"
    installed.add("triton")
    assert peer.missing() is None


def test_plain_triton_beside_16_bits(tmp_path):
    """In a separate process: Triton's interpreter is chosen when a kernel is defined."""
    pytest.importorskip("triton", reason="Triton is not installed")
    command = (
        "kernels", "--device", "cpu", "-n", "40", "-k", "64", "-m", "1,3", "-b", "16,4",
        "--backend", "reference", "--against", "triton-16", "--json", "--out", str(tmp_path),
        "--copies", "2", "--inner-reps", "1", "--outer-reps", "3",
    )  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "fdk_bench", *command],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    of = {(r["case"]["backend"], r["case"]["m"]): r["values"] for r in rows}
    assert set(of) == {(name, m) for name in ("torch", "triton-16", "reference") for m in (1, 3)}
    for m in (1, 3):
        torch_time = of["torch", m]["time"]
        assert of["torch", m]["speedup_16"] is None
        for name in ("triton-16", "reference"):
            assert of[name, m]["speedup_16"] == pytest.approx(torch_time / of[name, m]["time"])
            # Peers of other widths are not compared.
            assert of[name, m]["best_peer"] is None
        assert of["triton-16", m]["weight_bytes"] == 40 * 64 * 2


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_plain_triton_on_gpu(dtype):
    peer = DenseTriton()
    case = KernelCase(1, 264, 1040, dtype, dtype, "cuda", peer.name)
    assert peer.missing() is None
    assert peer.unsupported(case) is None
    prepared = peer.prepare(case, 2)
    inputs = [torch.randn(m, 1040, device="cuda").to(case.torch_dtype) for m in (1, 2, 64, 300)]
    with torch.inference_mode():
        assert len(check(prepared, inputs)) == len(inputs)


def test_peers_named():
    assert [peer.name for peer in peers_named(["int4pack", "tinygemm", "int4pack"])] == [
        "int4pack",
        "tinygemm",
    ]
    assert peers_named(["all"]) == list(PEERS)
    assert peers_named(["none"]) == []
    with pytest.raises(ValueError, match=r"wanted all, none or .*; got nobody"):
        peers_named(["nobody"])


def run_of(**changes):
    run = KernelRun(
        shapes=[(32, 64)],
        ms=[1],
        formats=["custom4-g32"],
        dtype="bf16",
        device="cpu",
        backends=["reference"],
        copies=1,
        inner=1,
        outer=1,
    )
    return replace(run, **changes)


class Slow:
    """A peer that compiles forever."""

    name, note = "slow", ""

    def missing(self):
        return None

    def unsupported(self, case):
        return "needs codes" if case.quantised is None else None

    def prepare(self, case, copies=None):
        while True:
            time.sleep(0.01)


def test_slow_peer_is_a_row():
    rows = list(measure(run_of(peers=[Slow()], peer_seconds=0.1)))
    assert [(row.case.backend, row.values is None) for row in rows] == [
        ("slow", True),
        ("reference", False),
    ]
    said = "TookTooLongError: packing, compiling and checking took more than 0.1 s"
    assert rows[0].error == said


def test_time_limit():
    with time_limit(None, "nothing"), time_limit(5.0, "nothing"):
        pass
    said = r"a loop took more than 0.05 s"
    with pytest.raises(TookTooLongError, match=said), time_limit(0.05, "a loop"):
        time.sleep(5)
    time.sleep(0.1)  # the timer is gone


def test_time_limit_of_code_that_catches_exceptions(monkeypatch):
    """The error is raised again, and once more at the end."""
    monkeypatch.setattr(timeout, "AGAIN_SECONDS", 0.05)
    caught = []

    def loop():
        for _ in range(3):
            try:
                time.sleep(5)
            except Exception as error:
                caught.append(error)

    with pytest.raises(TookTooLongError, match="a loop"), time_limit(0.05, "a loop"):
        loop()
    assert len(caught) == 3


def test_time_limit_gives_back_an_earlier_timer():
    rung = []
    before = signal.signal(signal.SIGALRM, lambda *_: rung.append(1))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with time_limit(60.0, "nothing"):
            pass
        assert 0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 0.2
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        with time_limit(60.0, "a nap"):
            time.sleep(0.1)
        time.sleep(0.1)  # it was due inside
        assert rung == [1]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_gemlite_is_allowed_what_sums_of_16_bits_lose():
    # 1024 parts of 16 weights: 32 times a rounding of 2^-9 (bf16) or 2^-12.
    for dtype, error in ("bf16", 2**-4), ("fp16", 2**-7):
        case = KernelCase(1, 64, 16384, "custom4-g64", dtype, "cuda", "gemlite")
        assert gemlite_error(case) == error


def test_gemlite_takes_the_configurations_of_the_nearest_shape():
    stored = {
        "GEMM": {
            "(16, 4096, 4096, 64, 8, 104)": {"BLOCK_SIZE_K": 8, "num_warps": 1},
            "(16, 28672, 4096, 64, 8, 104)": {"BLOCK_SIZE_K": 64, "num_warps": 2},
            "(64, 28672, 4096, 64, 8, 104)": {"BLOCK_SIZE_K": 8, "num_warps": 4},
            "(16, 8192, 8192, 128, 8, 104)": {"BLOCK_SIZE_K": 64, "num_warps": 8},  # other groups
            "(16, 8192, 8192, 64, 1, 408)": {"BLOCK_SIZE_K": 64, "num_warps": 8},  # 8-bit x
        },
        "GEMV": {},
    }
    before = dict(stored["GEMM"])
    for bits in (4, 1):
        add_nearest(stored, KernelCase(1, 28672, 8192, f"int{bits}-g64", "bf16", "cuda", ""))
    added = {key: value for key, value in stored["GEMM"].items() if key not in before}
    # A block of k holds at least the weights of a word.
    assert added == {
        "(16, 28672, 8192, 64, 8, 104)": {"BLOCK_SIZE_K": 64, "num_warps": 2},
        "(64, 28672, 8192, 64, 8, 104)": {"BLOCK_SIZE_K": 8, "num_warps": 4},
        "(16, 28672, 8192, 64, 32, 101)": {"BLOCK_SIZE_K": 64, "num_warps": 2},
        "(64, 28672, 8192, 64, 32, 101)": {"BLOCK_SIZE_K": 32, "num_warps": 4},
    }
    assert stored["GEMV"] == {}
