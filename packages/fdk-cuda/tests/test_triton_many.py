"""``gemm_wgmma_kernel`` compiles for Hopper without a GPU, spills nothing and never serialises."""

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed")
pytest.importorskip("triton.experimental.gluon", reason="this Triton has no Gluon")

import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402
from triton_cases import check_hopper, weight  # noqa: E402

from fdk_cuda.triton import TritonLayout  # noqa: E402
from fdk_cuda.triton.autotune import candidates  # noqa: E402
from fdk_cuda.triton.configs import GPUS, H200, GemmWgmmaConfig  # noqa: E402
from fdk_cuda.triton.configs.gemm import (  # noqa: E402
    GEMM_WGMMA_FUSED_BITS,
    fits_gemm_wgmma,
    gemm_wgmma_config,
    last_wave,
    serves_gemm_wgmma,
)
from fdk_cuda.triton.configs.gpus import WGMMA_TILE_N, WGMMA_WARPS  # noqa: E402
from fdk_cuda.triton.kernels.gemm_wgmma import gemm_wgmma_kernel  # noqa: E402
from fdk_cuda.triton.kernels.tma_pipeline import shared_layout  # noqa: E402
from fdk_cuda.triton.layout import (  # noqa: E402
    POSITIONS,
    TABLE_BYTES,
    PackedLayout,
    unpack_codes,
    unpack_scale,
    words_of,
)
from fdk_cuda.triton.remembered import OPTIONS  # noqa: E402
from fdk_formats import Format  # noqa: E402
from fdk_formats.testing import random_quantised  # noqa: E402

DTYPES = {"bf16": tl.bfloat16, "fp16": tl.float16}
TENSORS = {"words_ptr": "*i32", "values_ptr": "*i16", "lanes_ptr": "*i32", "bias_ptr": "*bf16"}


def compile_many(
    bits: int,
    config: GemmWgmmaConfig,
    *,
    affine: bool | int,
    dtype: str = "bf16",
    scale: str = "*bf16",
    zero: str = "*bf16",
) -> object:
    """With a bias and 16-bit results, or float32 parts of k."""
    constants = {
        "BITS": bits,
        "WORDS": words_of(bits),
        "POSITIONS": POSITIONS[bits],
        "PADDED_GROUP": 64,
        "ONE_GROUP": False,
        "AFFINE": affine,
        "HAS_BIAS": config.splits == 1,
        "X_DTYPE": DTYPES[dtype],
        "BLOCK_M": config.block_m,
        "STAGES": config.stages,
        "CLUSTER": config.cluster,
    }
    out, size = (dtype, 16) if config.splits == 1 else ("fp32", 32)
    rows, own_rows = config.block_m, config.block_m // config.cluster
    others = TENSORS | {
        "x_desc": f"tensordesc<{dtype}[{rows}, 64],{shared_layout(16)!r}>",
        "out_desc": f"tensordesc<{out}[{own_rows}, {WGMMA_TILE_N}],{shared_layout(size)!r}>",
        "scale_ptr": scale,
        "zero_ptr": zero,
    }
    names = gemm_wgmma_kernel.arg_names
    signature = {n: "constexpr" if n in constants else others.get(n, "i32") for n in names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if name.endswith("_ptr") or name == "n"
    }
    source = GluonASTSource(gemm_wgmma_kernel, signature, constants, aligned)
    options = OPTIONS | {"num_warps": WGMMA_WARPS}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def check(compiled: object, bits: int) -> None:
    """Besides, room for what assembly declares, and one product waited for behind the next."""
    check_hopper(compiled)
    assert compiled.metadata.shared + TABLE_BYTES.get(bits, 0) <= GPUS[9, 0].shared_bytes
    assert "wgmma.wait_group.sync.aligned 1" in compiled.asm["ptx"]


@pytest.mark.parametrize("bits", range(1, 9))
def test_many(bits: int) -> None:
    config = gemm_wgmma_config(PackedLayout(8192, 8192, bits, 64), 256, H200)
    assert config.split_k == (1 if bits in (5, 7) else 2)
    check(compile_many(bits, config, affine=False), bits)


@pytest.mark.parametrize(("bits", "rows"), [(3, 128), (4, 256), (7, 128), (8, 256)])
def test_many_affine(bits: int, rows: int) -> None:
    check(compile_many(bits, GemmWgmmaConfig(rows), affine=True), bits)


@pytest.mark.parametrize("rows", [64, 128, 256])
@pytest.mark.parametrize("bits", [1, *GEMM_WGMMA_FUSED_BITS])
def test_many_affine_otherwise(bits: int, rows: int) -> None:
    """By one multiply-add, and 1 bit by two values, whose two programs of 64 rows fit."""
    config = gemm_wgmma_config(PackedLayout(8192, 8192, bits, 64), rows, H200, affine=True)
    compiled = compile_many(bits, config, affine=True if bits == 1 else 2)
    check(compiled, bits)
    assert config.block_m == rows
    if rows == 64 and bits <= 2:
        assert config == GemmWgmmaConfig(64, 4, 1)


@pytest.mark.parametrize("zero", ["*fp32", "*u8"])
@pytest.mark.parametrize("rows", [64, 256])
@pytest.mark.parametrize("bits", [1, *GEMM_WGMMA_FUSED_BITS])
def test_many_affine_of_float32(bits: int, rows: int, zero: str) -> None:
    """Scales of float32: a difference and a product, by the same configurations."""
    config = gemm_wgmma_config(PackedLayout(8192, 8192, bits, 64), rows, H200, affine=True)
    check(compile_many(bits, config, affine=True, scale="*fp32", zero=zero), bits)


@pytest.mark.parametrize(
    ("bits", "config"),
    [
        (4, GemmWgmmaConfig(128, 2, 2)),
        (4, GemmWgmmaConfig(256, 4, 2)),
        (7, GemmWgmmaConfig(128, 2, 2)),
    ],
)
def test_many_in_clusters(bits: int, config: GemmWgmmaConfig) -> None:
    """What a neighbour sends fits where it goes, and nobody leaves before it has arrived."""
    compiled = compile_many(bits, config, affine=False)
    check(compiled, bits)
    assert compiled.metadata.shared >= 128 * config.block_m * 4 // 2
    ptx = compiled.asm["ptx"]
    ready = ptx[ptx.rindex("wgmma.wait_group.sync.aligned 0") : ptx.index("st.shared::cluster")]
    assert "barrier.cluster.wait" in ready  # the neighbour's products are done with x
    end = ptx.rpartition("st.shared::cluster.v4.f32")[2]
    assert "barrier.cluster.wait" in end.partition("ld.shared.v4.f32")[0]
    assert "bar.sync" in end.rpartition("ld.shared.v4.f32")[2].partition("stmatrix")[0]


def test_many_otherwise() -> None:
    """Scales of another dtype than x: exponents."""
    check(compile_many(4, GemmWgmmaConfig(128), affine=False, dtype="fp16", scale="*u8"), 4)


@pytest.mark.parametrize(
    ("n", "k", "group_size", "fits"),
    [
        (8192, 8192, 64, True),
        (8192, 8192, 128, True),
        (8200, 8192, 8192, True),
        (8192, 8192, 32, False),  # two scales a step
        (8196, 8192, 64, False),  # rows of y where TMA cannot store
    ],
)
def test_what_many_takes(n: int, k: int, group_size: int, fits: bool) -> None:
    a = PackedLayout(n, k, 4, group_size)
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
def test_from_how_many_rows(n: int, k: int, bits: int, from_rows: int | None) -> None:
    a = PackedLayout(n, k, bits, 64)
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
def test_which_rows_of_8192_x_8192(bits: int, affine: bool, rows: tuple[int, ...]) -> None:
    """Where it was the fastest on an H200; else another kernel, or dequantised."""
    a = PackedLayout(8192, 8192, bits, 64)
    tried = (32, 33, 64, 65, 256, 257, 512, 513, 1024, 1025)
    served = {m for m in tried if serves_gemm_wgmma(a, m, H200, affine=affine)}
    last = max(rows)
    assert served == {m for m in tried if min(rows) <= m <= last}
    assert set(rows) <= served


def test_candidates_leave_every_part_a_tile() -> None:
    for k in (128, 256, 8192):
        a = PackedLayout(8192, k, 4, 64)
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
def test_many_config(n: int, m: int, bits: int, config: GemmWgmmaConfig) -> None:
    """As many programs as processors, and no more than a round of them by splitting k."""
    assert gemm_wgmma_config(PackedLayout(n, 8192, bits, 64), m, H200) == config


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
    config = gemm_wgmma_config(PackedLayout(n, 8192, 4, 64), m, H200)
    assert last_wave(m, n, config, H200) == first


@pytest.mark.parametrize("group_size", [64, None])
@pytest.mark.parametrize("codebook", ["custom", "affine"])
def test_outputs_of_a_weight(codebook: str, group_size: int | None) -> None:
    q = random_quantised(Format(codebook, 3, group_size), 300, 192)
    w = weight(TritonLayout(q))
    for part in (slice(0, 128), slice(128, None)):
        own = w.outputs(part)
        a = own.layout
        assert a.n == len(q.scale[part])
        assert own.words.shape == a.words_shape
        assert torch.equal(unpack_codes(own.words, a), q.codes()[part])
        assert torch.equal(unpack_scale(own.scale, a), q.scale[part])
        if q.zero_point is not None:
            assert torch.equal(unpack_scale(own.zero_point, a), q.zero_point[part])
