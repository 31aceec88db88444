"""The kernels of decode/ against torch: in Triton's interpreter here, and on a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton")

from fdk_transformers.decode.gemv_bf16 import gemv, takes

# Sizes of each case by the function of interpreted_decode.py that takes them.
CASES = {
    "attend": [
        "4-2-32-2-192-0-0-1-64-4-3",
        "6-2-32-3-192-64-1-1-64-4-3",
        "4-4-16-1-192-130-0-1-32-4-3",
        "12-2-32-2-192-130-1-3-64-4-3",
        "4-2-32-1-320-20-0-4-16-4-3",
        "4-2-32-1-192-130-1-2-128-8-1",
        "6-2-32-2-192-170-0-1-256-8-1",
        "6-2-32-3-320-170-0-10-16-4-3",  # parts without entries, eight at once
    ],
    "short": [
        "4-2-32-2-192-0-1",
        "6-2-32-3-192-64-0",
        "4-4-16-1-192-130-1",
        "12-2-32-2-64-63-0",
        "16-1-16-1-200-199-0",
        "3-3-64-1-256-255-1",
    ],
    "refused": ["34-2-32", "4-2-96", "4-2-8"],
    "prompt": ["6-2-16-2-70-67-0-40", "4-4-32-1-8-2-1-1"],
    "rest": ["3-96", "1-1040"],
    "gemv": [
        "13-72",
        "5-3072",
        "3-11264",
        "2-21504",
    ],
    "choice": ["1-40", "3-4099"],
    "model": ["0"],
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
    from fdk_transformers.decode.attention import config_for, parts_of

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
    from fdk_transformers.decode.attention import is_short

    cache = torch.empty(2, batch, kv_heads, length, 128, device="meta", dtype=dtype)
    assert is_short(cache) == short


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "k"), [(1001, 520), (640, 4096), (300, 21504)])
@torch.inference_mode()
def test_gemv_on_gpu(n, k, dtype):
    """One row has at most twice torch's error against float64."""
    weight = (torch.randn(n, k, device="cuda") * k**-0.5).to(dtype)
    x = torch.randn(1, 1, k, device="cuda").to(dtype)
    expected = x.double() @ weight.double().T
    plain = torch.nn.functional.linear(x, weight)
    assert takes(x, weight)
    torch.full((n,), torch.nan, device="cuda", dtype=dtype)  # memory that y may get
    error = (gemv(x, weight).double() - expected).norm()
    assert error <= 2 * (plain.double() - expected).norm()


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
