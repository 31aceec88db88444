"""Processes that start at once on one GPU with an empty cache."""

import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
import torch
from marlin_cases import pack, random_x

pytestmark = pytest.mark.gpu

PROCESSES, N, K = 8, 1000, 1088
# One kernel each: gemv_int8_limbs.cu, small_m.cu, for many rows hopper_gemm.cu or dequantise.cu.
ROWS = (1, 16, 200)
barrier = None


def keep(own):
    """Keeps the barrier for ``first_calls`` in this process."""
    global barrier
    barrier = own


def first_calls(cache):
    """Returns y for each m, by kernels that this process compiles or finds in ``cache``."""
    os.environ["FDK_CUDA_CACHE"] = cache
    _, layout = pack("custom1-g64", N, K)
    xs = [random_x(m, K, seed=m) for m in ROWS]
    torch.cuda.synchronize()
    barrier.wait()
    return [layout(x).float().cpu().numpy() for x in xs]


def test_cold_start_of_eight_processes_on_one_gpu(tmp_path):
    q, _ = pack("custom1-g64", N, K)
    context = get_context("forkserver")
    options = {"initializer": keep, "initargs": (context.Barrier(PROCESSES),)}
    with ProcessPoolExecutor(PROCESSES, context, **options) as pool:
        results = list(pool.map(first_calls, [str(tmp_path)] * PROCESSES))
    W_hat = q.dequantise(torch.bfloat16).float().cpu()
    for m, *ys in zip(ROWS, *results, strict=True):
        assert all((y == ys[0]).all() for y in ys), m
        wanted = random_x(m, K, seed=m).float().cpu() @ W_hat.T
        assert (torch.from_numpy(ys[0]) - wanted).norm() <= 4e-3 * wanted.norm(), m
    assert not list(tmp_path.glob("*.partial"))
    assert len(list(tmp_path.glob("*.cubin"))) >= len(ROWS)
