"""The kernels of decode/ against torch: in Triton's interpreter here, and on a GPU."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fdk_bench.decode import random_llama
from fdk_bench.decode.llama import Concatenated, Llama, LlamaSize, TritonOps
from fdk_bench.decode.random_llama import build_llama
from fdk_bench.decode.step import WARM_STEPS, Step, captured_prompt, first_tokens, step_seconds
from fdk_bench.models import ModelCase

pytest.importorskip("triton")

from fdk_bench.decode.gemv_bf16 import RowLinear, takes

# Sizes of each case by the function of interpreted_decode.py that takes them.
CASES = {
    "attend": [
        "4-2-32-2-192-0-1-64-4-3",
        "6-2-32-3-192-64-1-64-4-3",
        "4-4-16-1-192-130-1-32-4-3",
        "12-2-32-2-192-130-3-64-4-3",
        "4-2-32-1-320-20-4-16-4-3",
        "4-2-32-1-192-130-2-128-8-1",
        "6-2-32-2-192-170-1-256-8-1",
        "6-2-32-1-320-170-10-16-4-3",  # parts without entries, eight at once
    ],
    "short": [
        "4-2-32-2-192-0",
        "6-2-32-3-192-64",
        "4-4-16-1-192-130",
        "12-2-32-2-64-63",
        "16-1-16-1-200-199",
        "3-3-64-1-256-255",
    ],
    "refused": ["34-2-32", "4-2-96", "4-2-8"],
    "prompt": ["6-2-16-2-70-67", "4-4-32-1-8-2"],
    "rest": ["3-96", "1-1040"],
    "gemv": [
        "13-72",
        "5-3072",
        "3-11264",
        "2-21504",
    ],
    "choice": ["1-40", "3-4099"],
}


@pytest.mark.parametrize("what", CASES)
def test_interpreted(what):
    """Run the cases of a kind in one process, whose start takes longer than most of them."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    script = Path(__file__).with_name("interpreted_decode.py")
    command = [sys.executable, "-W", "ignore", str(script), what, *CASES[what]]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_config_and_parts():
    from fdk_bench.decode.attention import config_for, parts_of

    assert config_for(8, 192) == (64, 8, 1)
    assert config_for(32, 192) == (256, 8, 1)
    assert config_for(128, 192) == (256, 8, 1)
    assert config_for(8, 2112) == (128, 8, 1)
    assert config_for(128, 2112) == (128, 8, 2)
    assert config_for(512, 192) == (32, 4, 3)
    assert config_for(2048, 192) == (32, 2, 3)
    # In float32 as many bytes.
    assert config_for(32, 192, 4) == (128, 8, 1)
    assert config_for(2048, 192, 4) == (16, 2, 3)
    assert parts_of(8, 192, 64) == 3
    assert parts_of(8, 2112, 128) == 17
    assert parts_of(8, 4096, 64) == 33  # two programs for each multiprocessor
    assert parts_of(128, 2112, 128) == 2
    assert parts_of(512, 2112, 32) == 1


@pytest.mark.parametrize(
    ("batch", "kv_heads", "length", "dtype", "short"),
    [
        (1, 8, 192, torch.bfloat16, True),
        (4, 8, 256, torch.float16, True),
        (5, 8, 192, torch.bfloat16, False),
        (1, 8, 257, torch.bfloat16, False),
        (1, 8, 256, torch.float32, False),  # too much for the shared memory
    ],
)
def test_short_caches(batch, kv_heads, length, dtype, short):
    from fdk_bench.decode.attention import is_short

    cache = torch.empty(2, batch, kv_heads, length, 128, device="meta", dtype=dtype)
    assert is_short(cache) == short


def llama_on_gpu(size, dtype, *, crowded=True):
    generator = torch.Generator("cuda").manual_seed(0)

    def linear(name, n, k):
        layer = nn.Linear(k, n, bias=False, device="meta")
        W = torch.randn(n, k, device="cuda", generator=generator) * k**-0.5
        layer.weight = nn.Parameter(W.to(dtype), requires_grad=False)
        return layer if crowded else Concatenated(layer)

    torch.manual_seed(0)
    return Llama(size, linear, device="cuda", dtype=dtype)


def logits_of(llama, tokens, length):
    """Return logits after a prompt of all but three tokens, and after each of those."""
    llama.prepare(len(tokens), length)
    t = tokens.shape[1] - 3
    found = [llama(tokens[:, :t], torch.arange(t, device="cuda"))]
    for i in range(t, t + 3):
        found.append(llama(tokens[:, i : i + 1], torch.tensor([i], device="cuda")))
    return torch.stack(found)


@pytest.mark.gpu
@pytest.mark.parametrize("crowded", [True, False])
@pytest.mark.parametrize("heads", [4, 6])
@pytest.mark.parametrize(("batch", "tokens", "length"), [(1, 9, 64), (3, 140, 192), (1, 700, 1088)])
@torch.inference_mode()
def test_logits_on_gpu(batch, tokens, length, heads, crowded):
    """The error against float64 is at most twice that of torch's own kernels in bf16."""
    size = LlamaSize(128 * heads, 2, heads, 2, 1056, vocabulary=1000)
    llama = llama_on_gpu(size, torch.bfloat16, crowded=crowded)
    exact = llama_on_gpu(size, torch.bfloat16, crowded=crowded).double()
    exact.dtype = torch.float64
    ids = torch.randint(size.vocabulary, (batch, tokens), device="cuda")
    expected, plain = logits_of(exact, ids, length), logits_of(llama, ids, length).double()
    llama.compile_blocks()
    ours = logits_of(llama, ids, length).double()
    allowed = 2 * (plain - expected).norm() / expected.norm()
    assert (ours - expected).norm() / expected.norm() <= allowed <= 0.1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "k"), [(1001, 520), (640, 4096), (300, 21504)])
@torch.inference_mode()
def test_gemv_on_gpu(n, k, dtype):
    """One row has at most twice torch's error against float64; several rows go to torch."""
    torch.manual_seed(0)
    layer = RowLinear(k, n, bias=False, device="cuda", dtype=dtype)
    x = torch.randn(3, 1, k, device="cuda").to(dtype)
    expected = x.double() @ layer.weight.double().T
    plain = torch.nn.functional.linear(x, layer.weight)
    assert torch.equal(layer(x), plain)
    assert takes(x[:1], layer.weight)
    torch.full((n,), torch.nan, device="cuda", dtype=dtype)  # memory that y may get
    error = (layer(x[:1]).double() - expected[:1]).norm()
    assert error <= 2 * (plain[:1].double() - expected[:1]).norm()


@pytest.mark.parametrize(
    ("rows", "k", "dtype", "fits"),
    [
        (1, 64, torch.bfloat16, True),
        (1, 32768, torch.float16, True),
        (1, 32776, torch.float16, False),
        (1, 0, torch.bfloat16, False),
        (1, 60, torch.bfloat16, False),
        (2, 64, torch.bfloat16, False),
        (1, 64, torch.float32, False),
    ],
)
def test_gemv_takes(rows, k, dtype, fits):
    """Fake tensors stand for those of a GPU; tensors on a CPU are not supported."""
    for device in ("cuda", "cpu"):
        with FakeTensorMode():
            x = torch.empty(rows, 1, k, device=device, dtype=dtype)
            weight = torch.empty(7, k, device=device, dtype=dtype)
            assert takes(x, weight) == (fits and device == "cuda")
            assert not takes(x, torch.empty(k, 7, device=device, dtype=dtype).T)


@pytest.mark.parametrize("bias", [False, True])
def test_gemv_leaves_the_rest_to_torch(bias):
    torch.manual_seed(0)
    layer = RowLinear(64, 7, bias=bias)
    x = torch.randn(1, 64)
    assert torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias))


@pytest.mark.parametrize(("format", "crowded"), [("bf16", True), ("custom4-g64", False)])
def test_dense_layers_leave_no_room(format, crowded, monkeypatch):
    case = ModelCase("tiny", 1, format, "reference", "bf16", "cpu", "lm_head", 8, 1, compiled=True)
    decoder = build_llama(case, [1]).decoder
    monkeypatch.setattr("fdk_bench.decode.llama.has_kernels", lambda device: True)
    decoder.compile_blocks()
    assert isinstance(decoder.ops, TritonOps)
    assert decoder.ops.crowded == crowded


def test_dense_layers_of_fp32_are_torchs(monkeypatch):
    monkeypatch.setattr(random_llama, "has_kernels", lambda device: True)
    case = ModelCase("tiny", 1, "bf16", "torch", "bf16", "cuda", "", 8, 1, compiled=True)
    assert random_llama.dense_linear(case) == (RowLinear, "torch, gemv for one row")
    assert random_llama.dense_linear(replace(case, dtype="fp32")) == (nn.Linear, "torch")


@pytest.mark.gpu
@torch.inference_mode()
def test_graph_of_a_step_on_gpu():
    """Replays give the tokens of calls, and the position advances."""
    llama = llama_on_gpu(LlamaSize(512, 2, 4, 2, 1056, vocabulary=5000), torch.bfloat16)
    llama.compile_blocks()
    prompt = torch.randint(5000, (2, 600), device="cuda")
    found = []
    for captured in (False, True):
        llama.prepare(2, 704)
        step = Step(llama, first_tokens(llama, prompt), 600)
        if captured:
            step.warm_up()
        tokens = []
        for _ in range(5):
            step()
            tokens.append(step.tokens.flatten().tolist())
        found.append(tokens)
        assert step.position.item() == 605
    assert found[0] == found[1]


@pytest.mark.gpu
def test_dense_layers_run_gemv_on_gpu():
    """Compiled models run gemv; with --no-compile torch runs the layers."""
    case = ModelCase("tiny", 1, "bf16", "torch", "bf16", "cuda", "lm_head", 8, 1, compiled=True)
    ours, theirs = build_llama(case, [1, 3]), build_llama(replace(case, compiled=False), [1])
    assert (ours.backends, theirs.backends) == ("torch, gemv for one row", "torch")
    assert isinstance(ours.decoder.lm_head, RowLinear)
    assert not isinstance(theirs.decoder.lm_head, RowLinear)


@pytest.mark.gpu
@torch.inference_mode()
def test_seconds_of_steps_on_gpu():
    """Each replay is timed once, after those that warm up."""
    llama = llama_on_gpu(LlamaSize(512, 2, 4, 2, 1056, vocabulary=5000), torch.bfloat16)
    llama.compile_blocks()
    llama.prepare(1, 64)
    prompt = torch.randint(5000, (1, 20), device="cuda")
    step = Step(llama, first_tokens(llama, prompt), 20)
    step.warm_up()
    times = step_seconds(step, torch.device("cuda"), 7)
    assert step.position.item() == 20 + WARM_STEPS + 7
    assert len(times) == 7
    assert min(times) > 0


@pytest.mark.gpu
@torch.inference_mode()
def test_graph_of_a_prompt_on_gpu():
    """A replay fills the cache as the call did."""
    llama = llama_on_gpu(LlamaSize(512, 2, 4, 2, 1056, vocabulary=5000), torch.bfloat16)
    llama.compile_blocks()
    prompt = torch.randint(5000, (3, 130), device="cuda")
    llama.prepare(3, 192)
    first_tokens(llama, prompt)
    expected = llama.cache.clone()
    replay = captured_prompt(llama, prompt)
    llama.cache.zero_()
    assert replay.is_graph
    replay.call()
    assert torch.equal(llama.cache, expected)
    assert expected.any()
