"""The Gluon GEMM for Hopper: its configurations, compiled and run.

No interpreter runs Gluon: answers are checked on a GPU only.
"""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
pytest.importorskip("triton.experimental.gluon", reason="this Triton has no Gluon")

from triton_cases import DTYPES, FORMATS, one_hot, packed_weight
from triton_compile import check_hopper, compile_gemm_wgmma, layout_of

from fdk_cuda.triton import launch
from fdk_cuda.triton.autotune import candidates
from fdk_cuda.triton.configs import GPUS, H200, GemmConfig, GemmWgmmaConfig
from fdk_cuda.triton.configs.gemm import (
    GEMM_WGMMA_FUSED_BITS,
    WORDY_BITS,
    fits_gemm_wgmma,
    gemm_wgmma_config,
    last_wave,
    serves_gemm_wgmma,
)
from fdk_cuda.triton.layout import POSITIONS, TABLE_BYTES, unpack_codes, unpack_scale
from fdk_formats import Format
from fdk_formats.testing import Case, nrmse, poisoned, random_quantised


def check(compiled: object, bits: int) -> None:
    """Like ``check_hopper``; the table of inline assembly fits, and one wgmma stays in flight."""
    check_hopper(compiled)
    assert compiled.metadata.shared + TABLE_BYTES.get(bits, 0) <= GPUS[9, 0].shared_bytes
    assert "wgmma.wait_group.sync.aligned 1" in compiled.asm["ptx"]


@pytest.mark.parametrize("bits", range(1, 9))
def test_codebooks(bits: int) -> None:
    config = gemm_wgmma_config(layout_of(bits), 256, H200)
    assert config.split_k == (1 if bits in (5, 7) else 2)
    check(compile_gemm_wgmma(bits, config, affine=False), bits)


@pytest.mark.parametrize(("bits", "rows"), [(3, 128), (4, 256), (7, 128), (8, 256)])
def test_affine(bits: int, rows: int) -> None:
    check(compile_gemm_wgmma(bits, GemmWgmmaConfig(rows), affine=True), bits)


@pytest.mark.parametrize("rows", [64, 128, 256])
@pytest.mark.parametrize("bits", [1, *GEMM_WGMMA_FUSED_BITS])
def test_affine_by_multiply_add(bits: int, rows: int) -> None:
    """1 bit selects one of two values instead; two programs of 64 rows fit a processor."""
    config = gemm_wgmma_config(layout_of(bits), rows, H200, affine=True)
    compiled = compile_gemm_wgmma(bits, config, affine=True if bits == 1 else 2)
    check(compiled, bits)
    assert config.block_m == rows
    if rows == 64 and bits <= 2:
        assert config == GemmWgmmaConfig(64, 4, 1)


@pytest.mark.parametrize("rows", [64, 256])
@pytest.mark.parametrize("bits", [1, *GEMM_WGMMA_FUSED_BITS])
def test_affine_with_float32_scales(bits: int, rows: int) -> None:
    """A subtraction and a product, by the same configurations."""
    zero = ("*fp32", "*u8")[(bits + rows // 64) % 2]
    config = gemm_wgmma_config(layout_of(bits), rows, H200, affine=True)
    check(compile_gemm_wgmma(bits, config, affine=True, scale="*fp32", zero=zero), bits)


@pytest.mark.parametrize(
    ("bits", "config"),
    [
        (4, GemmWgmmaConfig(128, 2, 2)),
        (4, GemmWgmmaConfig(256, 4, 2)),
        (7, GemmWgmmaConfig(128, 2, 2)),
    ],
)
def test_clusters(bits: int, config: GemmWgmmaConfig) -> None:
    """A peer's partial sums fit in shared memory, and no block exits before they arrive."""
    compiled = compile_gemm_wgmma(bits, config, affine=False)
    check(compiled, bits)
    assert compiled.metadata.shared >= 128 * config.block_m * 4 // 2
    ptx = compiled.asm["ptx"]
    ready = ptx[ptx.rindex("wgmma.wait_group.sync.aligned 0") : ptx.index("st.shared::cluster")]
    assert "barrier.cluster.wait" in ready  # the peer's products have read x
    end = ptx.rpartition("st.shared::cluster.v4.f32")[2]
    assert "barrier.cluster.wait" in end.partition("ld.shared.v4.f32")[0]
    assert "bar.sync" in end.rpartition("ld.shared.v4.f32")[2].partition("stmatrix")[0]


def test_exponent_scales() -> None:
    check(compile_gemm_wgmma(4, GemmWgmmaConfig(128), affine=False, dtype="fp16", scale="*u8"), 4)


@pytest.mark.parametrize(
    ("n", "k", "group_size", "fits"),
    [
        (8192, 8192, 64, True),
        (8192, 8192, 128, True),
        (8200, 8192, 8192, True),
        (8192, 8192, 32, False),  # two scales per step
        (8196, 8192, 64, False),  # TMA cannot store such rows of y
    ],
)
def test_serves_shapes(n: int, k: int, group_size: int, fits: bool) -> None:
    a = layout_of(4, n, k, group_size)
    assert fits_gemm_wgmma(a) == fits
    for m in (64, 65, 1024, 1025):
        assert serves_gemm_wgmma(a, m, H200) == (fits and m in (65, 1024))
        assert not any(serves_gemm_wgmma(a, m, gpu) for own, gpu in GPUS.items() if own != (9, 0))


@pytest.mark.parametrize(
    ("n", "k", "bits", "from_rows"),
    [
        (8192, 8192, 5, 33),
        (8192, 8192, 6, 65),
        (14336, 4096, 4, 33),
        (4096, 14336, 8, 65),
        (4096, 4096, 4, 65),
        (4096, 4096, 6, None),
        (4096, 4096, 7, 33),
        (2048, 4096, 4, None),
    ],
)
def test_serves_from_rows(n: int, k: int, bits: int, from_rows: int | None) -> None:
    a = layout_of(bits, n, k)
    served = [m for m in (16, 32, 33, 64, 65, 128) if serves_gemm_wgmma(a, m, H200)]
    assert served == [m for m in (33, 64, 65, 128) if from_rows is not None and m >= from_rows]
    assert serves_gemm_wgmma(a, 256, H200) == (from_rows is not None and (n, bits) != (4096, 7))


@pytest.mark.parametrize(
    ("bits", "affine", "rows"),
    [
        (2, False, (33, 64, 65, 256, 512, 1024)),
        (3, False, (65, 256, 512, 1024)),  # gemm_kernel up to 64
        (4, False, (65, 256, 512, 1024)),
        (5, False, (33, 64, 65, 256)),
        (7, True, (33, 64, 65, 256)),
        (8, False, (65, 256, 512)),
        (8, True, (33, 64, 65, 256, 512)),
        (1, True, (33, 64, 65, 256, 512, 1024)),
        (2, True, (33, 64, 65, 256, 512, 1024)),
        (4, True, (65, 256, 512)),
    ],
)
def test_serves_rows_of_8192_x_8192(bits: int, affine: bool, rows: tuple[int, ...]) -> None:
    """It serves the cases in which it is the fastest on an H200."""
    a = layout_of(bits)
    tried = (32, 33, 64, 65, 256, 257, 512, 513, 1024, 1025)
    served = {m for m in tried if serves_gemm_wgmma(a, m, H200, affine=affine)}
    last = max(rows)
    assert served == {m for m in tried if min(rows) <= m <= last}
    assert set(rows) <= served


def test_candidates_split_at_most_the_tiles() -> None:
    for k in (128, 256, 8192):
        a = layout_of(4, 8192, k)
        found = candidates(a, 256, H200, affine=False)
        splits = {c.split_k for c in found if isinstance(c, GemmWgmmaConfig)}
        assert splits == {s for s in (1, 2, 4) if s <= a.k_tiles}


@pytest.mark.parametrize(
    ("n", "m", "bits", "config"),
    [
        (8192, 128, 4, GemmWgmmaConfig(128, 2, 2)),
        (8192, 256, 4, GemmWgmmaConfig(256, 2, 2)),
        (8192, 512, 4, GemmWgmmaConfig(256)),
        (28672, 256, 4, GemmWgmmaConfig(256)),
        (4096, 256, 4, GemmWgmmaConfig(256, 4, 2)),
        (14336, 64, 4, GemmWgmmaConfig(64, 2, 2)),
        (8192, 64, 2, GemmWgmmaConfig(64, 4, 2)),
        (8192, 64, 7, GemmWgmmaConfig(64, 2, 2)),
        (8192, 64, 3, GemmWgmmaConfig(64, 2, 2)),
        (8192, 256, 7, GemmWgmmaConfig(128)),
    ],
)
def test_config(n: int, m: int, bits: int, config: GemmWgmmaConfig) -> None:
    """There are as many programs as SMs; split k adds at most one wave."""
    assert gemm_wgmma_config(layout_of(bits, n), m, H200) == config


@pytest.mark.parametrize(
    ("n", "m", "first"),
    [
        (14336, 1024, 99 * 128),  # 3 rounds of 132 programs, and 52
        (28672, 512, 198 * 128),
        (6144, 1000, 33 * 128),
        (28672, 1024, None),  # 6 rounds, and 104
        (28672, 256, None),
        (8192, 512, None),  # one round
        (8192, 256, None),  # k is in two parts already
        (21504, 128, 132 * 128),
        (21504, 64, None),  # two programs a processor: one round
    ],
)
def test_last_wave(n: int, m: int, first: int | None) -> None:
    config = gemm_wgmma_config(layout_of(4, n), m, H200)
    assert last_wave(m, n, config, H200) == first


@pytest.mark.parametrize("group_size", [64, None])
@pytest.mark.parametrize("codebook", ["custom", "affine"])
def test_outputs_of_a_weight(codebook: str, group_size: int | None) -> None:
    q = random_quantised(Format(codebook, 3, group_size), 300, 192)
    w = packed_weight(q)
    for part in (slice(0, 128), slice(128, None)):
        own = w.outputs(part)
        a = own.layout
        assert a.n == len(q.scale[part])
        assert own.words.shape == a.words_shape
        assert torch.equal(unpack_codes(own.words, a), q.codes()[part])
        assert torch.equal(unpack_scale(own.scale, a), q.scale[part])
        if q.zero_point is not None:
            assert torch.equal(unpack_scale(own.zero_point, a), q.zero_point[part])


@pytest.fixture
def hopper() -> None:
    if not launch.gpu_at(torch.cuda.current_device()).limits.gemm_wgmma_m:
        pytest.skip("needs a GPU of compute capability 9.0 and a Triton with Gluon")


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("codebook", "bits"), FORMATS)
def test_gemm_wgmma(codebook: str, bits: int) -> None:
    """Sizes that end within a tile, groups of whole rows, split k with an empty last split."""
    widest = 128 if bits in WORDY_BITS else 256
    for group_size, m, n, k, config in (
        (64, 200, 328, 64 * 41, GemmWgmmaConfig(widest, 2, 2)),
        (128, 77, 136, 128 * 9, GemmWgmmaConfig(128)),
        (None, 300, 264, 1000, GemmWgmmaConfig(widest)),
        (64, 65, 136, 9 * 16 * POSITIONS[bits], GemmWgmmaConfig(64, 4, 1 + bits % 2)),
    ):
        case = Case(Format(codebook, bits, group_size), m, n, k, DTYPES[m == 200], "cuda")
        q = case.quantised()
        w, w_hat = packed_weight(q), q.dequantise(case.dtype)
        rows = torch.arange(0, k, k // m)[:m]
        selected = one_hot(rows, k, case.dtype)
        x, bias = case.random(m, k), case.random(n)
        oracle = x.double() @ w_hat.double().T + bias.double()
        torch_y = torch.nn.functional.linear(x, w_hat, bias)
        with poisoned():
            assert torch.equal(launch.gemm_wgmma(selected, w, None, config), w_hat.T[rows])
            y = launch.gemm_wgmma(x, w, bias, config)
            assert nrmse(y, oracle) <= 1.1 * nrmse(torch_y, oracle)
            assert torch.equal(y, launch.gemm_wgmma(x, w, bias, config))


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("zeros", ["float", "int"])
@pytest.mark.parametrize("scales", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("bits", [1, *GEMM_WGMMA_FUSED_BITS])
def test_affine_scales(bits: int, scales: str, zeros: str) -> None:
    """Weights have the reference's bits, by selection, multiply-add, or subtraction and product."""
    format = Format("affine", bits, 64, scale_dtype=scales, zero_point=zeros)
    for m, dtype in ((64, DTYPES[0]), (256, DTYPES[1])):
        case = Case(format, m, 264, 64 * 9, dtype, "cuda")
        q = case.quantised()
        w, w_hat = packed_weight(q), q.dequantise(dtype)
        rows = torch.arange(0, case.k, case.k // m)[:m]
        selected = one_hot(rows, case.k, dtype)
        with poisoned():
            for config in (GemmWgmmaConfig(64), GemmWgmmaConfig(256, 2, 2)):
                assert torch.equal(launch.gemm_wgmma(selected, w, None, config), w_hat.T[rows])
            y = launch.gemm(selected, w, None, GemmConfig(1, 4, 32))
            assert torch.equal(y, w_hat.T[rows])


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("codebook", ["custom", "affine"])
def test_last_wave_on_gpu(codebook: str) -> None:
    """A last wave of few programs is a separate launch, in pairs that share k."""
    processors = launch.gpu_at(torch.cuda.current_device()).processors
    m, n, k = 300, (processors // 2 + 3) * 128 - 56, 64 * 9
    assert last_wave(m, n, GemmWgmmaConfig(256), launch.gpu_at(0)) == processors // 2 * 128
    case = Case(Format(codebook, 4, 64), m, n, k, torch.bfloat16, "cuda")
    q = case.quantised()
    w, w_hat = packed_weight(q), q.dequantise(case.dtype)
    x, bias = case.random(m, k), case.random(n)
    for own, torch_own in ((None, 0), (bias, bias.double())):
        oracle = x.double() @ w_hat.double().T + torch_own
        torch_y = torch.nn.functional.linear(x, w_hat, own)
        with poisoned():
            y = launch.gemm_wgmma(x, w, own, GemmWgmmaConfig(256))
            assert nrmse(y, oracle) <= 1.1 * nrmse(torch_y, oracle)
            assert torch.equal(y, launch.gemm_wgmma(x, w, own, GemmWgmmaConfig(256)))


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_dependent_launches_overlap() -> None:
    """Each kernel starts before the previous one ends, whose output it reads as x."""
    case = Case(Format("custom", 4, 64), 300, 2048, 2048, torch.bfloat16, "cuda")
    ws = [packed_weight(case.quantised()) for _ in range(3)]
    configs = (GemmWgmmaConfig(256, 2, 2), GemmWgmmaConfig(128), GemmWgmmaConfig(128, 4, 2))
    generator = torch.Generator("cuda").manual_seed(0)
    xs = torch.randn(4, case.m, case.k, device="cuda", generator=generator).bfloat16()

    def run(x: torch.Tensor, synchronise: bool) -> torch.Tensor:
        for w, config in zip(ws, configs, strict=True):
            x = launch.gemm_wgmma(x, w, None, config)
            if synchronise:
                torch.cuda.synchronize()
        return x

    wanted = [run(x, True) for x in xs]
    assert all(y.isfinite().all() and y.any() for y in wanted)
    for _ in range(20):
        torch.cuda._sleep(2_000_000)  # so that launches queue up and kernels overlap
        ys = [run(x, False) for x in xs]
        assert all(map(torch.equal, ys, wanted))


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_scales_end_with_the_groups() -> None:
    """Past the last group both x and the scale are 0: 0 times infinity would be NaN."""
    case = Case(Format("custom", 3, 64), 80, 136, 64 * 9, torch.bfloat16, "cuda")
    # Values and x of one sign: infinities of both signs would sum to NaN.
    codebook = torch.arange(1.0, 9.0, device="cuda") / 8
    w = packed_weight(replace(case.quantised(), codebook=codebook))
    w.scale[:, -1] = torch.inf
    x = torch.ones(case.m, case.k, device="cuda", dtype=torch.bfloat16)
    y = launch.gemm_wgmma(x, w, None, GemmWgmmaConfig(128))
    assert y is not None
    assert y.isposinf().all()
    assert torch.equal(y, launch.gemm(x, w, None, GemmConfig(1, 4, 32)))
