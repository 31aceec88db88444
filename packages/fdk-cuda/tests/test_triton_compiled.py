"""Every kernel compiles, without a GPU, for every generation it serves, and spills no register."""

import re

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton_cases import GEMM_CONFIGS, check_stack, registers_and_stack  # noqa: E402

from fdk_cuda.triton.configs import GPUS, GemmConfig  # noqa: E402
from fdk_cuda.triton.configs.dgrad import dgrad_config  # noqa: E402
from fdk_cuda.triton.configs.gemm import (  # noqa: E402
    GEMM_FUSED_BITS,
    dequantise_config,
    fit,
    gemm_config,
    takes_table,
)
from fdk_cuda.triton.configs.gemv import gemv_config  # noqa: E402
from fdk_cuda.triton.configs.gpus import H200_PROCESSORS, STATIC_SMEM_BYTES  # noqa: E402
from fdk_cuda.triton.kernels.dequantise import dequantise_kernel  # noqa: E402
from fdk_cuda.triton.kernels.dgrad import dgrad_kernel, is_in_layout  # noqa: E402
from fdk_cuda.triton.kernels.gemm import gemm_kernel  # noqa: E402
from fdk_cuda.triton.kernels.gemv import gemv_kernel  # noqa: E402
from fdk_cuda.triton.kernels.ptx_smem import gemv_smem_bytes, table_bytes  # noqa: E402
from fdk_cuda.triton.launch import limit  # noqa: E402
from fdk_cuda.triton.layout import POSITIONS, STRIDES, PackedLayout  # noqa: E402
from fdk_cuda.triton.packed_weight import PackedWeight  # noqa: E402
from fdk_cuda.triton.remembered import OPTIONS  # noqa: E402

# Compute capability, and bytes of shared memory that a program may take.
TARGETS = {major * 10 + minor: gpu.shared_bytes for (major, minor), gpu in GPUS.items()}
TENSORS = {
    "x_ptr": "*bf16",
    "y_ptr": "*bf16",
    "words_ptr": "*i32",
    "scale_ptr": "*bf16",
    "zero_ptr": "*bf16",
    "values_ptr": "*i16",
    "lanes_ptr": "*i32",
    "bias_ptr": "*bf16",
    "out_ptr": "*bf16",
}
# One width of each way to decode.
BITS = (1, 3, 4, 8)

LARGE = (4096, 4096, 64)


def constants(bits: int, affine: bool, shape: tuple[int, int, int] = LARGE) -> dict[str, object]:
    """Of a weight of n, k and a group size, for a product with a bias."""
    none = torch.empty(0)
    a = PackedLayout(shape[0], shape[1], bits, shape[2])
    w = PackedWeight(none, none, none if affine else None, none, none, a)
    return w.constants(torch.bfloat16) | {"HAS_BIAS": True}


def compile_kernel(
    kernel: object,
    target: int,
    arguments: dict[str, object],
    warps: int,
    stages: int = 3,
    ones: tuple[str, ...] = (),
    aligned: tuple[str, ...] = ("n", "k"),
    registers: int = 0,
) -> object:
    """For sizes that are 1, if the kernel lets Triton know, and such as are multiples of 16."""
    names = kernel.arg_names
    never = {parameter.name for parameter in kernel.params if parameter.do_not_specialize}
    arguments = arguments | {name: 1 for name in ones if name not in never}
    signature = {
        name: "constexpr" if name in arguments else TENSORS.get(name, "i32") for name in names
    }
    known = {name: value for name, value in arguments.items() if name in names}
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if name in TENSORS or name in aligned
    }
    source = ASTSource(kernel, signature, known, attributes)
    options = OPTIONS | {"num_warps": warps, "num_stages": stages, **limit(registers)}
    return triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("bits", range(1, 9))
def test_small(bits: int, target: int) -> None:
    """What is chosen for few and many outputs, up to 8 rows of x and up to 16, in turns."""
    n, m = ((4096, 8), (28672, 16), (4096, 16), (28672, 8))[(bits + target // 10) % 4]
    check_small(compile_small(bits, bits == 8, n, m, target))


@pytest.mark.parametrize("target", [80, 90, 120])
@pytest.mark.parametrize(
    ("bits", "affine"), [(4, True), (5, True), (6, True), (7, True), (8, False)]
)
def test_small_otherwise(bits: int, affine: bool, target: int) -> None:
    """Affine codes without a table, and the widest of codebooks, up to 16 rows."""
    check_small(compile_small(bits, affine, 28672, 16, target))


@pytest.mark.parametrize("m", [1, 16])
@pytest.mark.parametrize("bits", range(1, 8))
def test_small_affine(bits: int, m: int) -> None:
    """Configurations of their own, and programs that run all at once."""
    config = gemv_config(PackedLayout(8192, 8192, bits, 64), m, GPUS[9, 0], affine=True)
    compiled = compile_small(bits, True, 8192, m, 90, 8192)
    check_stack(compiled)
    if m == 1 and bits <= 4:
        programs = -(-8192 // (16 * config.n_tiles))
        registers, _ = registers_and_stack(compiled)
        # A processor of compute capability 9.0 hands them out by eights.
        fitting = 65536 // (32 * config.warps * 8 * triton.cdiv(registers, 8))
        assert programs <= fitting * H200_PROCESSORS


@pytest.mark.parametrize("n", [4096, 8192, 28672])
@pytest.mark.parametrize("bits", STRIDES)
def test_small_table(bits: int, n: int) -> None:
    """A table in shared memory, the sums of the warps, and what Triton takes, unasked."""
    for m in (8, 16):
        compiled = compile_small(bits, False, n, m, 90)
        assert static_bytes(compiled) >= table_bytes(bits, False)
        assert compiled.metadata.shared + static_bytes(compiled) <= STATIC_SMEM_BYTES
        check_small(compiled)


def check_small(compiled: object) -> None:
    check_stack(compiled)
    assert_sums_by_warp(compiled)


def static_bytes(compiled: object) -> int:
    """Of shared memory that assembly declares, of which Triton does not know."""
    arrays = re.findall(r"\.shared \.align 16 \.b8 \w+\[(\d+)\]", compiled.asm["ptx"])
    return sum(map(int, arrays))


@pytest.mark.parametrize("m", [1, 16])
@pytest.mark.parametrize("rows", [True, False], ids=["row", "groups"])
@pytest.mark.parametrize("affine", [False, True], ids=["codebook", "affine"])
@pytest.mark.parametrize("bits", range(1, 9))
def test_small_shared(bits: int, affine: bool, rows: bool, m: int) -> None:
    """What is declared and what Triton takes is no more than was counted, and fits unasked.

    Of the conformance kit's shapes: one tile of k, or few; x ends within a tile.
    """
    group_size = 88 if rows else (16, 24)[(bits + m) % 2]
    n, k = 37, 88 if rows else 3 * group_size
    layout = PackedLayout(n, k, bits, group_size)
    config = gemv_config(layout, m, GPUS[9, 0], affine=affine)
    m_tiles = 1 if m <= 8 else 2
    compiled = compile_small(bits, affine, n, m, 90, k, group_size)
    counted, _ = gemv_smem_bytes(config.n_tiles, m_tiles, config.warps, table_bytes(bits, affine))
    assert compiled.metadata.shared + static_bytes(compiled) <= counted <= STATIC_SMEM_BYTES


@pytest.mark.parametrize("target", [80, 100, 120])
@pytest.mark.parametrize(("bits", "m"), [(1, 1), (1, 16), (2, 1), (3, 1), (4, 1)])
def test_small_affine_elsewhere(bits: int, m: int, target: int) -> None:
    """What is limited to registers on Hopper, or spilled with two tiles, without either."""
    check_small(compile_small(bits, True, 8192, m, target, 8192))


def assert_sums_by_warp(compiled: object) -> None:
    """``add_warps`` adds what differs in the first dimension, one of its elements a warp."""
    text = compiled.asm["ttgir"]
    name = re.search(r"st\.shared\.v4\.f32.*: tensor<[0-9x]+xf32, (#\w+)>", text)[1]
    layout = re.search(rf"^{name} = (.*)", text, re.MULTILINE)[1]
    first, warps = re.fullmatch(r".*register = (.*), warp = (.*), block.*", layout).groups()
    assert set(re.findall(r"\[(\d+), ", first)) == {"0"}, layout
    assert "0" not in re.findall(r"\[(\d+), ", warps), layout


def compile_small(
    bits: int, affine: bool, n: int, m: int, target: int, k: int = 4096, group_size: int = 64
) -> object:
    """By the configuration that is chosen for a GPU."""
    a = PackedLayout(n, k, bits, group_size)
    config = gemv_config(a, m, GPUS[divmod(target, 10)], affine=affine)
    arguments = constants(bits, affine, (n, k, group_size)) | {
        "N_TILES": config.n_tiles,
        "M_TILES": 1 if m <= 8 else 2,
        "WARPS": config.warps,
        "AHEAD": config.ahead,
        "FETCH": config.fetch if target >= 90 else 0,
        "OVERLAP": target >= 90 and config.overlap,
        "MINUS": affine and config.minus,
    }
    ones = [name for name in ("k_tiles", "groups") if getattr(a, name) == 1]
    aligned = [name for name, size in (("n", n), ("k", k)) if size % 16 == 0]
    return compile_kernel(
        gemv_kernel,
        target,
        arguments,
        config.warps,
        ones=tuple(ones),
        aligned=tuple(aligned),
        registers=config.registers,
    )


@pytest.mark.parametrize(
    ("target", "bits", "config"),
    [(90, 4, config) for config in GEMM_CONFIGS]
    + [(target, bits, GEMM_CONFIGS[1]) for target in TARGETS for bits in (4, 8)],
    ids=str,
)
def test_gemm(target: int, bits: int, config: GemmConfig) -> None:
    config = fit(config, bits, TARGETS[target])
    compiled = compile_gemm(config, bits, bits == 8, target)
    check_stack(compiled)


@pytest.mark.parametrize(("bits", "m"), [(4, 64), (4, 128), (6, 64), (8, 64), (8, 128)])
def test_gemm_table(bits: int, m: int) -> None:
    """Triton asks for more shared memory than a program gets unasked, and there is as much."""
    config = gemm_config(PackedLayout(8192, 8192, bits, 64), m, GPUS[9, 0])
    assert takes_table(config, bits, 64, TARGETS[90])
    assert not takes_table(config, bits, 16, TARGETS[90])
    compiled = compile_gemm(config, bits, False, 90)
    assert compiled.metadata.shared > STATIC_SMEM_BYTES
    assert compiled.metadata.shared + table_bytes(bits, False) <= TARGETS[90]
    check_stack(compiled)


def compile_gemm(config: GemmConfig, bits: int, affine: bool, target: int) -> object:
    arguments = constants(bits, affine) | {
        "N_TILES": config.n_tiles,
        "WARPS": config.warps,
        "BLOCK_M": config.block_m,
        "GROUP_M": 4,
        "STAGES": config.stages,
        "TABLE": takes_table(config, bits, 64, TARGETS[target]),
    }
    if affine and bits in GEMM_FUSED_BITS and GPUS[divmod(target, 10)].is_measured:
        arguments["AFFINE"] = 2
    return compile_kernel(gemm_kernel, target, arguments, config.warps, config.stages)


@pytest.mark.parametrize("target", [80, 90, 120])
@pytest.mark.parametrize("bits", range(1, 9))
def test_dequantise(bits: int, target: int) -> None:
    """Of affine formats every other; a table, if there is one, and Triton's memory fit unasked."""
    compiled = compile_dequantise(bits, (bits + target // 10) % 2 == 0, target)
    check_stack(compiled)
    assert compiled.metadata.shared + static_bytes(compiled) <= STATIC_SMEM_BYTES


@pytest.mark.parametrize("bits", range(1, 9))
def test_dequantise_one_tile(bits: int) -> None:
    """Triton knows sizes that are 1 when it compiles."""
    compile_dequantise(bits, bits % 2 == 0, 90, (37, 64, 64), ones=("k_tiles", "groups"))


def compile_dequantise(
    bits: int,
    affine: bool,
    target: int,
    shape: tuple[int, int, int] = LARGE,
    ones: tuple[str, ...] = (),
) -> object:
    config = dequantise_config(bits, affine=affine)
    arguments = constants(bits, affine, shape) | {
        "WARPS": config.warps,
        "AHEAD": config.ahead,
        "TABLE": config.table,
    }
    return compile_kernel(dequantise_kernel, target, arguments, config.warps, ones=ones)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("bits", BITS)
def test_transposed(bits: int, target: int) -> None:
    m = (1, 16, 64)[bits % 3]
    compiled = compile_transposed(bits, bits == 8, m, target)
    check_stack(compiled)


@pytest.mark.parametrize("m", [1, 16, 64])
@pytest.mark.parametrize("affine", [False, True], ids=["codebook", "affine"])
@pytest.mark.parametrize("bits", range(1, 9))
def test_transposition_is_in_its_layout(bits: int, affine: bool, m: int) -> None:
    """Codes are transposed where a lane holds four neighbours: elsewhere it would be wrong.

    So are sums of warps, where each warp holds its own. A table, these sums and Triton's own memory
    are no more than a program gets unasked.
    """
    compiled = compile_transposed(bits, affine, m, 90)
    assert is_in_layout(compiled.asm["ttgir"])
    assert_shares_by_warp(compiled)
    assert compiled.metadata.shared + static_bytes(compiled) <= STATIC_SMEM_BYTES
    check_stack(compiled)


def assert_shares_by_warp(compiled: object) -> None:
    """``add_shares`` adds what differs in the first dimension, one of its elements a warp."""
    text = compiled.asm["ttgir"]
    uses = re.findall(r"st\.shared\.v4\.f32.*-> (tensor<.*>)", text)
    names = {name for use in uses for name in re.findall(r"x\w+, (#\w+)>", use)}
    assert len(names) == 1, names
    layout = re.search(rf"^{names.pop()} = (.*)", text, re.MULTILINE)[1]
    assert layout.startswith("#ttg.nvidia_mma<{versionMajor = 2"), layout
    assert f"warpsPerCTA = [{compiled.metadata.num_warps}, 1, 1]" in layout, layout


def compile_transposed(bits: int, affine: bool, m: int, target: int) -> object:
    """By the configuration that is chosen for a GPU."""
    a = PackedLayout(8192, 8192, bits, 64)
    gpu = GPUS[divmod(target, 10)]
    config = dgrad_config(a, m, gpu, affine=affine)
    arguments = constants(bits, affine, (8192, 8192, 64)) | {
        "N_TILES": config.n_tiles,
        "M_TILES": config.m_tiles,
        "COUNT": min(config.positions, POSITIONS[bits]),
        "WARPS": config.warps,
        "AHEAD": config.ahead,
        "TABLE": config.table,
        "OVERLAP": target >= 90 and config.overlap,
    }
    return compile_kernel(dgrad_kernel, target, arguments, config.warps)
