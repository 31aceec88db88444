"""Times every kernel with pytest-benchmark, against the time to read its bytes.

    GOMP_SPINCOUNT=0 python packages/fdk-cpu/benchmarks/suite.py
    ... -k blockwise --benchmark-json=out/suite.json

Arguments go to pytest. In extra_info, `floor_ms` is the time for the bytes (weights, or input and
output) at the bandwidth of `read_sum`, and `share` is that over the median. Weights rotate through
more copies than the caches hold; a wrong result is not timed.
"""

import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import pytest
import torch

import fdk_cpu
from fdk_cpu import copy_memory, read_sum
from fdk_cpu.blockwise import KERNELS
from fdk_cpu.dense import gemm, gemv
from fdk_formats import Format
from fdk_formats.blockwise import TORCH_KERNELS, dynamic_map, four_bit_code
from fdk_formats.testing import nrmse, random_quantised

ROTATED_BYTES = 192 << 20
MAX_ERROR = 1e-2  # of a product in bf16
SIZE = 4096
FORMATS = ("custom8-g64", "affine4-g64", *(f"custom{bits}-g64" for bits in (4, 3, 2, 1)))


@pytest.fixture(params=[1, 2], ids=["1-thread", "2-threads"], autouse=True)
def threads(request: pytest.FixtureRequest):
    """Threads of every kernel."""
    # pytest-benchmark 5.2.3 reads this attribute, which pytest 9.2 no longer has.
    request.node._nodeid = request.node.nodeid
    fdk_cpu.set_num_threads(request.param)
    yield
    fdk_cpu.set_num_threads(None)


@pytest.fixture
def timed(benchmark, threads):
    """Time calls in turn, each moving `nbytes`, and record the read floor."""

    def run(calls: Sequence[Callable[[], object]], nbytes: int) -> None:
        bandwidth = read_bandwidth()
        turns = itertools.cycle(calls)
        benchmark(lambda: next(turns)())
        floor = nbytes / bandwidth
        benchmark.extra_info["megabytes"] = nbytes / 1e6
        benchmark.extra_info["read_gb_s"] = bandwidth / 1e9
        benchmark.extra_info["floor_ms"] = 1e3 * floor
        benchmark.extra_info["share"] = floor / benchmark.stats.stats.median
        benchmark.extra_info["instruction_set"] = fdk_cpu.instruction_set()

    return run


def read_bandwidth() -> float:
    """Bytes a second, the median of nine reads."""
    data, times = torch.ones(ROTATED_BYTES, dtype=torch.uint8), []
    for _ in range(9):
        start = time.perf_counter()
        read_sum(data)
        times.append(time.perf_counter() - start)
    return ROTATED_BYTES / statistics.median(times)


def copies(nbytes: int) -> range:
    """Copies of a weight, enough to exceed the caches."""
    return range(max(3, min(100, ROTATED_BYTES // nbytes)))


@pytest.mark.parametrize("m", [1, 16])
@pytest.mark.parametrize("format", FORMATS)
def test_linear(timed, format: str, m: int) -> None:
    """x @ W_hat.T, bf16."""
    x = normal(m, SIZE).bfloat16()
    q = random_quantised(Format.parse(format), SIZE, SIZE)
    backend = fdk_cpu.CpuBackend()
    layout = backend.pack(q, dtype=x.dtype)
    wanted = x.double() @ q.dequantise(x.dtype).double().T
    assert nrmse(layout(x), wanted) < MAX_ERROR
    nbytes = sum(buffer.nbytes for buffer in layout.buffers())
    layouts = [backend.pack(q, dtype=x.dtype) for _ in copies(nbytes)]
    timed([lambda w=w: w(x) for w in layouts], nbytes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("m", [1, 16])
def test_dense_linear(timed, m: int, dtype: torch.dtype) -> None:
    """x @ W.T with a weight that is not quantised."""
    x, weight = normal(m, SIZE).to(dtype), normal(SIZE, SIZE).to(dtype)
    product = gemv if m == 1 else gemm
    assert nrmse(product(x, weight), x.double() @ weight.double().T) < MAX_ERROR
    weights = [weight.clone() for _ in copies(weight.nbytes)]
    timed([lambda w=w: product(x, w) for w in weights], weight.nbytes)


def test_blockwise_quantise_8bit(timed) -> None:
    """float32 to 8 bits, blocks of 256."""
    x, code = normal(SIZE * SIZE), dynamic_map()
    packed, absmax = KERNELS.quantise_8bit(x, code, 256)
    assert torch.equal(packed, TORCH_KERNELS.quantise_8bit(x, code, 256)[0])
    timed([lambda: KERNELS.quantise_8bit(x, code, 256)], x.nbytes + packed.nbytes + absmax.nbytes)


def test_blockwise_dequantise_8bit(timed) -> None:
    """8 bits to float32, blocks of 256."""
    x, code = normal(SIZE * SIZE), dynamic_map()
    arguments = *TORCH_KERNELS.quantise_8bit(x, code, 256), code, 256, torch.float32
    back = KERNELS.dequantise_8bit(*arguments)
    assert torch.equal(back, TORCH_KERNELS.dequantise_8bit(*arguments))
    timed([lambda: KERNELS.dequantise_8bit(*arguments)], x.nbytes + x.numel())


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_blockwise_quantise_4bit(timed, kind: str) -> None:
    """bf16 to 4 bits, blocks of 64."""
    x = normal(SIZE * SIZE).bfloat16()
    packed, absmax = KERNELS.quantise_4bit(x, kind, 64)
    assert torch.equal(packed, TORCH_KERNELS.quantise_4bit(x, kind, 64)[0])
    timed([lambda: KERNELS.quantise_4bit(x, kind, 64)], x.nbytes + packed.nbytes + absmax.nbytes)


def test_blockwise_dequantise_4bit(timed) -> None:
    """4 bits to bf16, blocks of 64."""
    x, code = normal(SIZE * SIZE).bfloat16(), four_bit_code("nf4")
    packed, absmax = TORCH_KERNELS.quantise_4bit(x, "nf4", 64)
    arguments = packed, absmax, code, 64, x.numel(), x.dtype
    back = KERNELS.dequantise_4bit(*arguments)
    assert torch.equal(back, TORCH_KERNELS.dequantise_4bit(*arguments))
    timed([lambda: KERNELS.dequantise_4bit(*arguments)], x.nbytes + packed.nbytes + absmax.nbytes)


def test_copy_memory(timed) -> None:
    """A copy: as many bytes read as written."""
    source = torch.ones(ROTATED_BYTES // 2, dtype=torch.uint8)
    to = torch.empty_like(source)
    copy_memory(source, to)
    assert torch.equal(source, to)
    timed([lambda: copy_memory(source, to)], 2 * source.nbytes)


def normal(*shape: int) -> torch.Tensor:
    """Standard normal values, the same every run."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


if __name__ == "__main__":
    limits = ["--benchmark-max-time=0.3", "--benchmark-min-rounds=5", "--benchmark-sort=name"]
    columns = ["--benchmark-columns=min,median,iqr", "-q"]
    raise SystemExit(pytest.main([__file__, *limits, *columns, *sys.argv[1:]]))
