"""Compiling the Triton kernels without a GPU, and what their machine code uses."""

import re
import subprocess
from tempfile import NamedTemporaryFile
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from fdk_cuda.triton.compiled_launch import OPTIONS
from fdk_cuda.triton.configs import GPUS, DgradWgmmaConfig, GemmConfig, GemmWgmmaConfig
from fdk_cuda.triton.configs.dgrad import dgrad_config
from fdk_cuda.triton.configs.experts import ExpertConfig
from fdk_cuda.triton.configs.gemm import GEMM_FUSED_BITS, dequantise_config, takes_table
from fdk_cuda.triton.configs.gemv import gemv_config
from fdk_cuda.triton.configs.gpus import WGMMA_TILE_N, WGMMA_WARPS
from fdk_cuda.triton.kernels.dequantise import dequantise_kernel
from fdk_cuda.triton.kernels.dgrad import dgrad_kernel
from fdk_cuda.triton.kernels.dgrad_wgmma import dgrad_wgmma_kernel
from fdk_cuda.triton.kernels.expert_gemm import expert_gemm_kernel
from fdk_cuda.triton.kernels.expert_gemv import expert_gemv_kernel
from fdk_cuda.triton.kernels.gemm import gemm_kernel
from fdk_cuda.triton.kernels.gemm_wgmma import gemm_wgmma_kernel
from fdk_cuda.triton.kernels.gemv import gemv_kernel
from fdk_cuda.triton.kernels.tma_pipeline import shared_layout
from fdk_cuda.triton.launch import limit
from fdk_cuda.triton.layout import POSITIONS, PackedLayout, words_of
from fdk_cuda.triton.packed_weight import PackedWeight

# Bytes of stack per thread. Configurations were chosen with Triton 3.7, where none uses any; other
# versions allocate registers differently, and a few configurations spill.
MAX_STACK = 0 if triton.__version__.startswith("3.7.") else 64
# Shared memory that a program may ask for, by compute capability.
TARGETS = {major * 10 + minor: gpu.shared_bytes for (major, minor), gpu in GPUS.items()}
TENSORS = {
    **dict.fromkeys(("x_ptr", "y_ptr", "bias_ptr", "out_ptr"), "*bf16"),
    **dict.fromkeys(("scale_ptr", "zero_ptr"), "*bf16"),
    **dict.fromkeys(("words_ptr", "lanes_ptr"), "*i32"),
    "values_ptr": "*i16",
    **dict.fromkeys(("order_ptr", "tiles_ptr", "counts_ptr"), "*i32"),
    "ids_ptr": "*i64",
    **dict.fromkeys(
        ("routing_ptr", "midpoints_ptr", "table_ptr", "wanted_ptr", "signs_ptr"), "*fp32"
    ),
    **dict.fromkeys(("reference_ptr", "feedback_ptr", "scales_ptr", "zeros_ptr"), "*fp32"),
    "residual_ptr": "*fp32",
    "codes_ptr": "*u8",
}


def registers_and_stack(compiled: Any) -> tuple[int, int]:
    """Returns registers and bytes of stack per thread, as ptxas allocated them."""
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", done.stdout).groups()
    return int(registers), int(stack)


def check_stack(compiled: Any) -> None:
    """Asserts that nothing spills, with the Triton that configurations were chosen with."""
    _, stack = registers_and_stack(compiled)
    assert stack <= MAX_STACK


def check_warp_reduction(compiled: object) -> None:
    """``add_warps`` sums over the first dimension, of which each warp holds one element."""
    text = compiled.asm["ttgir"]
    name = re.search(r"st\.shared\.v4\.f32.*: tensor<[0-9x]+xf32, (#\w+)>", text)[1]
    layout = re.search(rf"^{name} = (.*)", text, re.MULTILINE)[1]
    first, warps = re.fullmatch(r".*register = (.*), warp = (.*), block.*", layout).groups()
    assert set(re.findall(r"\[(\d+), ", first)) == {"0"}, layout
    assert "0" not in re.findall(r"\[(\d+), ", warps), layout


def check_not_serialised(compiled: Any) -> None:
    """Asserts that ptxas keeps wgmmas in flight; C7510 to C7515 say that it waits for each."""
    command = [get_ptxas(90).path, "-arch=sm_90a", "-v", "-o", "/dev/null", "/dev/stdin"]
    done = subprocess.run(command, input=compiled.asm["ptx"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "serialized" not in done.stderr, done.stderr


def check_hopper(compiled: Any) -> None:
    """Asserts that a Gluon kernel spills nothing and keeps wgmmas in flight, A in registers."""
    check_stack(compiled)
    check_not_serialised(compiled)
    ptx = compiled.asm["ptx"]
    # Operand A is four registers; a descriptor of shared memory would be one.
    products = operands_of(ptx)
    assert products
    assert all(operand.count("%") + operand.count("$") == 4 for operand in products)
    # Sums are stored over x: after a barrier, for the last wait is of one group of warps.
    end = ptx[ptx.rindex("wgmma.wait_group.sync.aligned 0") :]
    assert "bar.sync" in re.split(r"st\.shared|stmatrix", end)[0]


def operands_of(ptx: str) -> list[str]:
    """Returns operand A of every wgmma."""
    return re.findall(r"wgmma\.mma_async\S* *\{[^}]*\}, *(\{[^}]*\})", ptx)


def static_bytes(compiled: Any) -> int:
    """Returns the shared memory that inline assembly declares, which Triton does not count."""
    arrays = re.findall(r"\.shared \.align 16 \.b8 \w+\[(\d+)\]", compiled.asm["ptx"])
    return sum(map(int, arrays))


def layout_of(bits: int, n: int = 8192, k: int = 8192, group_size: int = 64) -> PackedLayout:
    """Returns the layout of a weight, large by default."""
    return PackedLayout(n, k, bits, group_size)


def compile_kernel(
    kernel: Any,
    target: int,
    layout: PackedLayout,
    affine: bool,
    arguments: dict[str, object],
    *,
    stages: int = 3,
    registers: int = 0,
) -> Any:
    """Compiles for bf16, a bias, and the alignment that sizes of a layout have."""
    none = torch.empty(0)
    w = PackedWeight(none, none, none if affine else None, none, none, layout)
    arguments = w.constants(torch.bfloat16) | {"HAS_BIAS": True} | arguments
    # Triton compiles sizes of 1 as constants.
    ones = [name for name in ("k_tiles", "groups") if getattr(layout, name) == 1]
    never = {parameter.name for parameter in kernel.params if parameter.do_not_specialize}
    arguments |= {name: 1 for name in ones if name not in never}
    aligned = {name for name in ("n", "k") if getattr(layout, name) % 16 == 0}
    names = kernel.arg_names
    signature = {n: "constexpr" if n in arguments else TENSORS.get(n, "i32") for n in names}
    known = {name: value for name, value in arguments.items() if name in names}
    attributes = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if name in TENSORS or name in aligned
    }
    source = ASTSource(kernel, signature, known, attributes)
    warps = {"num_warps": arguments["WARPS"], "num_stages": stages}
    options = OPTIONS | warps | limit(registers)
    return triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)


def compile_gemv(layout: PackedLayout, m: int, target: int, *, affine: bool) -> Any:
    """Compiles the configuration that is chosen for a GPU."""
    config = gemv_config(layout, m, GPUS[divmod(target, 10)], affine=affine)
    arguments = {
        "N_TILES": config.n_tiles,
        "M_TILES": 1 if m <= 8 else 2,
        "WARPS": config.warps,
        "AHEAD": config.ahead,
        "FETCH": config.fetch if target >= 90 else 0,
        "OVERLAP": target >= 90 and config.overlap,
        "MINUS": affine and config.minus,
    }
    return compile_kernel(
        gemv_kernel, target, layout, affine, arguments, registers=config.registers
    )


def compile_gemm(config: GemmConfig, bits: int, affine: bool, target: int) -> Any:
    """Compiles one configuration."""
    arguments = {
        "N_TILES": config.n_tiles,
        "WARPS": config.warps,
        "BLOCK_M": config.block_m,
        "GROUP_M": 4,
        "STAGES": config.stages,
        "TABLE": takes_table(config, bits, 64, TARGETS[target]),
    }
    if affine and bits in GEMM_FUSED_BITS and GPUS[divmod(target, 10)].is_measured:
        arguments["AFFINE"] = 2
    layout = layout_of(bits, 4096, 4096)
    return compile_kernel(gemm_kernel, target, layout, affine, arguments, stages=config.stages)


def compile_expert_gemv(
    layout: PackedLayout, config: ExpertConfig, target: int, *, affine: bool, swiglu: bool = False
) -> Any:
    """Compiles one configuration with tables for each expert."""
    gemv = config.kernel
    arguments = {
        "HAS_ROUTING": not swiglu,
        "OWN_TABLES": True,
        "SORTED": config.is_sorted,
        "SWIGLU": swiglu,
        "N_TILES": gemv.n_tiles,
        "M_TILES": config.rows // 8,
        "WARPS": gemv.warps,
        "AHEAD": gemv.ahead,
        "FETCH": gemv.fetch if target >= 90 else 0,
        "OVERLAP": target >= 90 and gemv.overlap,
        "MINUS": affine and gemv.minus,
    }
    return compile_kernel(
        expert_gemv_kernel, target, layout, affine, arguments, registers=gemv.registers
    )


def compile_expert_gemm(
    layout: PackedLayout, config: ExpertConfig, target: int, *, affine: bool, swiglu: bool = False
) -> Any:
    """Compiles one configuration with tables for each expert."""
    gemm = config.kernel
    arguments = {
        "HAS_ROUTING": not swiglu,
        "OWN_TABLES": True,
        "SWIGLU": swiglu,
        "N_TILES": gemm.n_tiles,
        "WARPS": gemm.warps,
        "BLOCK_M": gemm.block_m,
        "GROUP_M": 4,
        "STAGES": gemm.stages,
        "TABLE": takes_table(gemm, layout.bits, layout.padded_group, TARGETS[target]),
    }
    if affine and layout.bits in GEMM_FUSED_BITS and GPUS[divmod(target, 10)].is_measured:
        arguments["AFFINE"] = 2
    return compile_kernel(expert_gemm_kernel, target, layout, affine, arguments, stages=gemm.stages)


def compile_dequantise(layout: PackedLayout, affine: bool, target: int) -> Any:
    """Compiles the configuration that is chosen for a format."""
    config = dequantise_config(layout.bits, affine=affine)
    arguments = {"WARPS": config.warps, "AHEAD": config.ahead, "TABLE": config.table}
    return compile_kernel(dequantise_kernel, target, layout, affine, arguments)


def compile_dgrad(bits: int, affine: bool, m: int, target: int) -> Any:
    """Compiles the configuration that is chosen for a GPU."""
    layout = layout_of(bits)
    config = dgrad_config(layout, m, GPUS[divmod(target, 10)], affine=affine)
    arguments = {
        "N_TILES": config.n_tiles,
        "M_TILES": config.m_tiles,
        "COUNT": min(config.positions, POSITIONS[bits]),
        "WARPS": config.warps,
        "AHEAD": config.ahead,
        "TABLE": config.table,
        "OVERLAP": target >= 90 and config.overlap,
    }
    return compile_kernel(dgrad_kernel, target, layout, affine, arguments)


def compile_gluon(kernel: Any, constants: dict[str, object], types: dict[str, str]) -> Any:
    """Compiles a kernel in Gluon for Hopper; other arguments are 32-bit integers."""
    from triton.experimental.gluon._runtime import GluonASTSource

    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if name.endswith("_ptr") or name in ("n", "k")
    }
    source = GluonASTSource(kernel, signature, constants, aligned)
    options = OPTIONS | {"num_warps": WGMMA_WARPS}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def compile_gemm_wgmma(
    bits: int,
    config: GemmWgmmaConfig,
    *,
    affine: bool | int,
    dtype: str = "bf16",
    scale: str = "*bf16",
    zero: str = "*bf16",
) -> Any:
    """Compiles one configuration: with a bias and 16-bit results, or float32 partial sums."""
    constants = {
        "BITS": bits,
        "WORDS": words_of(bits),
        "POSITIONS": POSITIONS[bits],
        "PADDED_GROUP": 64,
        "ONE_GROUP": False,
        "AFFINE": affine,
        "HAS_BIAS": config.splits == 1,
        "X_DTYPE": {"bf16": tl.bfloat16, "fp16": tl.float16}[dtype],
        "BLOCK_M": config.block_m,
        "STAGES": config.stages,
        "CLUSTER": config.cluster,
    }
    out, size = (dtype, 16) if config.splits == 1 else ("fp32", 32)
    rows, own_rows = config.block_m, config.block_m // config.cluster
    types = TENSORS | {
        "x_desc": f"tensordesc<{dtype}[{rows}, 64],{shared_layout(16)!r}>",
        "out_desc": f"tensordesc<{out}[{own_rows}, {WGMMA_TILE_N}],{shared_layout(size)!r}>",
        "scale_ptr": scale,
        "zero_ptr": zero,
    }
    return compile_gluon(gemm_wgmma_kernel, constants, types)


def compile_dgrad_wgmma(
    bits: int, config: DgradWgmmaConfig, *, affine: bool, scale: str = "*bf16"
) -> Any:
    """Compiles one configuration: groups of 64, float32 partial sums where n is split."""
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
    types = TENSORS | {
        "zero_ptr": "*bf16" if scale == "*u8" else scale,
        "y_desc": f"tensordesc<bf16[{config.block_m}, 64],{shared_layout(16)!r}>",
        "scale_ptr": scale,
        "out_ptr": "*fp32" if config.split_n > 1 else "*bf16",
    }
    return compile_gluon(dgrad_wgmma_kernel, constants, types)
