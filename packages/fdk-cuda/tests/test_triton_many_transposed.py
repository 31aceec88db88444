"""``dgrad_wgmma_kernel`` compiles for Hopper, without a GPU, and spills nothing."""

from dataclasses import replace

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed")
pytest.importorskip("triton.experimental.gluon", reason="this Triton has no Gluon")

import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402
from triton_cases import check_hopper, operands_of  # noqa: E402

from fdk_cuda.triton.configs import (  # noqa: E402
    GPUS,
    H200,
    DgradConfig,
    DgradWgmmaConfig,
    grad_config,
)
from fdk_cuda.triton.configs.dgrad import dgrad_wgmma_config  # noqa: E402
from fdk_cuda.triton.configs.gpus import WGMMA_WARPS  # noqa: E402
from fdk_cuda.triton.kernels.dgrad_wgmma import dgrad_wgmma_kernel  # noqa: E402
from fdk_cuda.triton.kernels.tma_pipeline import shared_layout  # noqa: E402
from fdk_cuda.triton.layout import POSITIONS, TABLE_BYTES, PackedLayout, words_of  # noqa: E402
from fdk_cuda.triton.remembered import OPTIONS  # noqa: E402

POINTERS = {"words_ptr": "*i32", "values_ptr": "*i16", "lanes_ptr": "*i32"}


def compile_transposed(
    bits: int, config: DgradWgmmaConfig, *, affine: bool, scale: str = "*bf16"
) -> object:
    """Groups of 64, parts of n as float32 where it is split."""
    constants = {
        "BITS": bits,
        "WORDS": words_of(bits),
        "POSITIONS": POSITIONS[bits],
        "GROUP": 64,
        "PADDED_GROUP": 64,
        "ONE_GROUP": False,
        "PAIRED": True,
        "AFFINE": affine,
        "X_DTYPE": tl.bfloat16,
        "BLOCK_M": config.block_m,
        "STAGES": config.stages,
        "COUNT": config.positions,
        "ROUND": config.n_tiles,
    }
    others = POINTERS | {
        "zero_ptr": "*bf16" if scale == "*u8" else scale,
        "y_desc": f"tensordesc<bf16[{config.block_m}, 64],{shared_layout(16)!r}>",
        "scale_ptr": scale,
        "out_ptr": "*fp32" if config.split_n > 1 else "*bf16",
    }
    names = dgrad_wgmma_kernel.arg_names
    signature = {n: "constexpr" if n in constants else others.get(n, "i32") for n in names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if name.endswith("_ptr") or name in ("n", "k")
    }
    source = GluonASTSource(dgrad_wgmma_kernel, signature, constants, aligned)
    options = OPTIONS | {"num_warps": WGMMA_WARPS}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


@pytest.mark.parametrize("split_n", [1, 2])
@pytest.mark.parametrize("m", [64, 128, 256])
@pytest.mark.parametrize("affine", [False, True], ids=["codebook", "affine"])
@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_many_transposed(bits: int, affine: bool, m: int, split_n: int) -> None:
    """No stack, room for a table, and products that run while the next weights are decoded."""
    chosen = dgrad_wgmma_config(PackedLayout(8192, 8192, bits, 64), m, H200, affine=affine)
    compiled = compile_transposed(bits, replace(chosen, split_n=split_n), affine=affine)
    ptx = compiled.asm["ptx"]
    check_hopper(compiled)
    assert compiled.metadata.shared + TABLE_BYTES.get(bits, 0) <= GPUS[9, 0].shared_bytes
    assert len(operands_of(ptx)) == 4 * chosen.positions
    running = chosen.positions * chosen.n_tiles
    assert ptx.count(f"wgmma.wait_group.sync.aligned {running}") == 4 // chosen.n_tiles


@pytest.mark.parametrize("scale", ["*fp16", "*fp32", "*u8"])
@pytest.mark.parametrize(
    ("bits", "affine"), [(1, True), (2, False), (4, False), (4, True), (8, False)]
)
def test_many_transposed_scales(bits: int, affine: bool, scale: str) -> None:
    """Scales of another dtype than dy, zero points alike; bytes are exponents."""
    chosen = dgrad_wgmma_config(PackedLayout(8192, 8192, bits, 64), 128, H200, affine=affine)
    check_hopper(compile_transposed(bits, chosen, affine=affine, scale=scale))


@pytest.mark.parametrize(
    ("n", "bits", "m", "config"),
    [
        (8192, 4, 64, DgradWgmmaConfig(64, 8)),
        (8192, 4, 128, DgradWgmmaConfig(128, 4)),
        (8192, 1, 65, DgradWgmmaConfig(128, 4, n_tiles=2)),
        (8192, 4, 129, DgradWgmmaConfig(256, 2, n_tiles=2)),
        (8192, 2, 256, DgradWgmmaConfig(128, 2)),
        (8192, 3, 65, None),  # three words a unit
        (8192, 4, 257, None),
        (4096, 4, 256, DgradWgmmaConfig(256, 2, n_tiles=2)),
        (2048, 4, 64, DgradWgmmaConfig(64, 4)),  # parts of 512 rows of W
        (2048, 4, 128, DgradWgmmaConfig(128, 4)),
        (2048, 4, 129, None),
        (1024, 4, 64, None),
    ],
)
def test_gradient_config(n: int, bits: int, m: int, config: DgradWgmmaConfig | None) -> None:
    assert grad_config(PackedLayout(n, 8192, bits, 64), m, H200) == config


@pytest.mark.parametrize(
    ("n", "bits", "m", "serves"),
    [
        (8192, 1, 128, True),
        (8192, 1, 129, False),
        (8192, 2, 256, True),
        (4096, 4, 64, True),
        (2048, 4, 64, False),
    ],
)
def test_gradient_config_of_affine_formats(n: int, bits: int, m: int, serves: bool) -> None:
    config = grad_config(PackedLayout(n, 8192, bits, 64), m, H200, affine=True)
    assert isinstance(config, DgradWgmmaConfig) == serves


@pytest.mark.parametrize("gpu", [gpu for gpu in GPUS.values() if not gpu.is_measured])
def test_gradient_config_of_affine_7_bits_elsewhere(gpu: object) -> None:
    """By eight warps they would spill, and by four they decode each weight four times."""
    a = PackedLayout(8192, 8192, 7, 64)
    assert grad_config(a, 64, gpu, affine=True) is None
    assert grad_config(a, 32, gpu, affine=True) is not None
    assert grad_config(a, 64, gpu) is not None


@pytest.mark.parametrize(
    ("n", "k", "bits", "group_size", "affine", "serves"),
    [
        (4096, 4096, 3, 64, False, True),
        (4096, 4096, 3, 32, False, False),  # too many scales for eight warps, by which it gains
        (4096, 4096, 3, 64, True, False),
        (4096, 4096, 6, 64, False, False),
        (8192, 4096, 6, 64, False, True),
        (8192, 4096, 6, 32, False, False),
        (8192, 8192, 6, 32, False, True),
        (8192, 4096, 6, 64, True, False),
    ],
)
def test_gradient_config_of_long_units(
    n: int, k: int, bits: int, group_size: int, affine: bool, serves: bool
) -> None:
    config = grad_config(PackedLayout(n, k, bits, group_size), 64, H200, affine=affine)
    assert isinstance(config, DgradConfig) == serves
    assert serves or config is None


def test_gradient_config_of_few_rows() -> None:
    for m, gpu in ((32, H200), (33, GPUS[8, 0])):
        config = grad_config(PackedLayout(8192, 8192, 4, 64), m, gpu)
        assert isinstance(config, DgradConfig)


@pytest.mark.parametrize(
    ("bits", "m", "affine", "warps", "split_n"),
    [
        (4, 1, False, 8, 4),
        (2, 8, False, 4, 8),
        (8, 1, False, 4, 4),
        (4, 16, False, 4, 8),
        (4, 16, True, 4, 4),
        (7, 16, False, 4, 16),
        (4, 32, True, 4, 4),
        (3, 32, False, 8, 2),
        (6, 64, False, 8, 1),
        (7, 32, True, 8, 2),
        (5, 64, True, 4, 2),
        (5, 64, False, 8, 1),
        (7, 64, True, 8, 1),
    ],
)
def test_transposed_config(bits: int, m: int, affine: bool, warps: int, split_n: int) -> None:
    """As many programs as the machine holds; of 6 bits to 64 rows too."""
    config = grad_config(PackedLayout(8192, 8192, bits, 64), m, H200, affine=affine)
    assert isinstance(config, DgradConfig)
    assert (config.warps, config.split_n, config.table) == (warps, split_n, bits not in (2, 5))
    assert POSITIONS[bits] % config.warps == 0


@pytest.mark.parametrize(
    ("n", "group_size", "bits", "affine", "m", "positions", "ahead", "split_n"),
    [
        (8192, 64, 1, False, 8, 32, 1, 8),
        (8192, 64, 3, False, 1, 32, 1, 8),
        (8192, 64, 3, True, 1, 32, 0, 8),
        (8192, 128, 5, False, 1, 16, 1, 4),
        (8192, 64, 4, False, 32, 8, 1, 4),
        (8192, 64, 4, True, 32, 8, 1, 4),
        (8192, 64, 7, False, 64, 8, 1, 1),
        (4096, 64, 5, False, 64, 8, 1, 1),
        (4096, 64, 5, False, 32, 8, 0, 4),
        (8192, 64, 7, False, 8, 16, 2, 4),
        (8192, 32, 3, False, 1, 8, 1, 4),  # too many scales
        (8192, 64, 3, False, 9, 16, 0, 16),
        (8192, 64, 2, False, 16, 16, 1, 8),
        (8192, 64, 1, True, 16, 8, 2, 4),
        (8192, 64, 4, True, 16, 8, 2, 4),
        (4096, 64, 3, False, 9, 8, 0, 16),
        (4096, 64, 3, False, 1, 8, 1, 4),
    ],
)
def test_positions_of_a_program(
    n: int,
    group_size: int,
    bits: int,
    affine: bool,
    m: int,
    positions: int,
    ahead: int,
    split_n: int,
) -> None:
    a = PackedLayout(n, 8192, bits, group_size)
    config = grad_config(a, m, H200, affine=affine)
    assert isinstance(config, DgradConfig)
    assert (config.positions, config.ahead, config.split_n) == (positions, ahead, split_n)
