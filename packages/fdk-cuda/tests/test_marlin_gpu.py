"""The Marlin backends on a GPU: conformance, every m, many runs, streams, graphs, compile."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from marlin_cases import BITS, DTYPES, KIT, check, pack, random_x, repeats_bit_for_bit

from fdk_cuda.marlin import MARLIN, MARLIN_LUT, backend, precompile
from fdk_cuda.marlin.ops import MAX_FUSED_ROWS, dequantise
from fdk_formats.format import Format
from fdk_formats.testing import cases, check_backend, poisoned, random_quantised

pytestmark = pytest.mark.gpu

LUT_CASES = list(cases(codebooks=("custom",), ms=(1, 3, 9), **KIT))
GRID_CASES = list(cases(codebooks=("affine", "int"), ms=(1, 3, 9), **KIT))


@pytest.mark.parametrize("case", LUT_CASES, ids=str)
def test_lut_conformance(case):
    check_backend(MARLIN_LUT, case)


@pytest.mark.parametrize("case", GRID_CASES, ids=str)
def test_conformance(case):
    check_backend(MARLIN, case)


# Partial tiles, several tiles per block, clusters of every size, rows of padding alone.
SHAPES = [(1, 64), (37, 192), (64, 4096), (1000, 2048), (4096, 4096), (8224, 1024), (14336, 576)]


@pytest.mark.parametrize(("n", "k"), SHAPES, ids=lambda v: str(v))
@pytest.mark.parametrize("format", [f"custom{bits}-g64" for bits in BITS] + ["affine4-g32"])
def test_every_m(format, n, k):
    q, layout = pack(format, n, k)
    bias = random_x(n, seed=5)
    for m in (1, 2, 4, 5, 8, 9, 16, 17, 33, 64, 65, MAX_FUSED_ROWS, 200, 256, 1024):
        check(layout, q, random_x(m, k, seed=m), bias)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dequantise_is_exact(bits, dtype):
    for codebook, group in itertools.product(("custom", "affine"), (32, 64, None)):
        q, layout = pack(Format(codebook, bits, group), 1000, 1216, dtype)
        with poisoned():
            W_hat = dequantise(layout.packed, layout.codebook, str(q.format), *q.shape)
        assert torch.equal(W_hat, q.dequantise(dtype)), q.format


def test_pack_on_gpu_gives_the_bytes_of_the_cpu():
    for format in ("custom3-g64", "affine8-g32", "custom1-row"):
        q = random_quantised(Format.parse(format), 100, 192)
        backend = MARLIN if q.format.is_affine else MARLIN_LUT
        on_cpu = backend.pack(q, dtype=torch.bfloat16)
        on_gpu = backend.pack(q.to("cuda"), dtype=torch.bfloat16)
        assert torch.equal(on_cpu.packed, on_gpu.packed.cpu())


REPEATED = [f"custom{bits}-g64" for bits in BITS] + [f"affine{bits}-g64" for bits in (1, 2, 4, 8)]


@pytest.mark.parametrize("format", REPEATED)
@pytest.mark.parametrize("m", [1, 4, 8, 16])
def test_repeats_bit_for_bit(format, m):
    q, layout = pack(format, 4096, 4096)
    x = random_x(m, 4096)
    first = check(layout, q, x)
    assert repeats_bit_for_bit(lambda: layout(x), first)


@pytest.mark.parametrize("m", [4, 64, 300])
@pytest.mark.parametrize("normalised", [True, False])
def test_dependent_launches_overlap(normalised, m):
    """Each kernel starts before the previous one ends: one of ours, or one of torch."""
    layers = [pack(f"custom{4 - i % 4}-g64", 4096, 4096, seed=i)[1] for i in range(8)]
    x = random_x(m, 4096)

    def run(*, synchronise):
        y = x
        for layout in layers:
            for step in (layout, lambda y: y / y.norm() * 64)[: 1 + normalised]:
                y = step(y)
                if synchronise:
                    torch.cuda.synchronize()
        return y

    wanted = run(synchronise=True)
    for _ in range(50):
        assert torch.equal(run(synchronise=False), wanted)


@pytest.mark.parametrize("m", [16, 64, 256])
def test_on_two_streams(m):
    weights = [pack("custom4-g64", 4096, 4096, seed=i) for i in range(2)]
    x = random_x(m, 4096)
    expected = [layout(x) for _, layout in weights]
    streams = [torch.cuda.Stream() for _ in weights]
    torch.cuda.synchronize()
    for _ in range(50):
        outs = []
        for stream, (_, layout) in zip(streams, weights, strict=True):
            with torch.cuda.stream(stream):
                outs.append([layout(x) for _ in range(4)])
        torch.cuda.synchronize()
        for out, wanted in zip(outs, expected, strict=True):
            assert all(torch.equal(y, wanted) for y in out)


@pytest.mark.parametrize("m", [1, 16, 40, 100, 600])
def test_cuda_graph(m):
    _, layout = pack("custom2-g64", 4096, 4096)
    x = random_x(m, 4096)
    layout(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layout(x)
        z = layout(y)
    for seed in range(3):
        x.copy_(random_x(m, 4096, seed=seed + 10))
        y.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, layout(x))
        assert torch.equal(z, layout(y))


# torch 2.11 raises a deprecation warning when Inductor is first imported.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*")
@pytest.mark.parametrize("m", [3, 80])
def test_compiles(m):
    _, layout = pack("custom4-g64", 256, 512)
    function = torch.compile(lambda x: layout(x * 2) + 1, fullgraph=True)
    x = random_x(m, 512).requires_grad_()
    y = function(x)
    assert torch.equal(y, layout(x * 2) + 1)
    (dx,) = torch.autograd.grad(y.sum(), x)
    (expected,) = torch.autograd.grad((layout(x * 2) + 1).sum(), x)
    assert torch.equal(dx, expected)


def test_in_a_new_thread():
    """Runs in a thread that has not used the GPU."""
    _, layout = pack("custom4-g64", 256, 512)
    x = random_x(3, 512)
    expected = layout(x)
    torch.cuda.synchronize()
    with ThreadPoolExecutor(1) as executor:
        assert torch.equal(executor.submit(layout, x).result(), expected)


def test_precompile(monkeypatch, tmp_path):
    monkeypatch.setenv("FDK_CUDA_CACHE", str(tmp_path))
    layers = [("custom4-g64", 4096, 4096), ("custom4-g64", 11008, 4096)]
    count = precompile(layers)
    stored = {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*.cubin")}
    assert 3 <= count == len(stored)
    assert precompile(layers) == count
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.glob("*.cubin")} == stored


def test_opcheck():
    _, layout = pack("custom4-g64", 256, 512)
    x = random_x(3, 512).requires_grad_()
    bias = random_x(256).requires_grad_()
    args = (x, layout.packed, layout.codebook, str(layout.format), False, bias, 256, 512)
    torch.library.opcheck(torch.ops.fdk_cuda.marlin_linear.default, args)


@pytest.mark.parametrize("m", [2, 40])
def test_misaligned_x(m):
    q, layout = pack("custom4-g64", 256, 512)
    x = random_x(m * 512 + 1)[1:].view(m, 512)
    check(layout, q, x)


def test_wrong_dtype():
    _, layout = pack("custom4-g64", 256, 512)
    with pytest.raises(TypeError, match=r"x must be torch\.bfloat16, got torch\.float16"):
        layout(random_x(1, 512, dtype=torch.float16))


@pytest.mark.parametrize("m", [1, 3, 16])
def test_cached_launches(m, monkeypatch):
    """The second call of a shape does not reach the op."""
    _, layout = pack("nf4-g64", 200, 256)
    _, other = pack("nf4-g64", 200, 256, seed=5)
    bias = random_x(200, seed=3)
    x = random_x(m, 256)
    for shape in ((m, 256), (1, m, 256)):
        x = x.view(shape)
        for b in (None, bias, bias.expand(2, 200).T[:, 0]):
            first = layout(x, b)
            with monkeypatch.context() as patch:
                if b is None or b.is_contiguous():
                    patch.setattr(backend, "linear_op", lambda *args: pytest.fail("not cached"))
                with poisoned():
                    second = layout(x, b)
                third = layout(x, b)
            assert torch.equal(first, second)
            assert torch.equal(first, third)
            assert second.shape == (*shape[:-1], 200)
    with pytest.raises(TypeError, match="must be"):
        layout(x.half())
    leaf = x.clone().requires_grad_()
    layout(leaf, bias).sum().backward()
    assert leaf.grad.isfinite().all()
    layout.packed, layout.codebook = other.packed, other.codebook
    assert torch.equal(layout(x, bias), other(x, bias))
