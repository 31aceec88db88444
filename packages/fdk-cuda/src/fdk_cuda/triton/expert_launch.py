"""Launches of the Triton kernels for stacks of experts."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor

from fdk_cuda.triton.compiled_launch import INTERPRETED, compile_and_launch, launch_compiled
from fdk_cuda.triton.configs.experts import ExpertConfig
from fdk_cuda.triton.configs.gemm import GEMM_FUSED_BITS, GemmConfig, takes_table
from fdk_cuda.triton.configs.gemv import GemvConfig
from fdk_cuda.triton.kernels.expert_gather import expert_gather_kernel
from fdk_cuda.triton.kernels.expert_gemm import expert_gemm_kernel
from fdk_cuda.triton.kernels.expert_gemv import expert_gemv_kernel
from fdk_cuda.triton.kernels.expert_reduce import expert_reduce_kernel
from fdk_cuda.triton.kernels.expert_sort import count_kernel, sort_kernel
from fdk_cuda.triton.kernels.grouped_matmul import grouped_matmul_kernel
from fdk_cuda.triton.launch import can_overlap, dequantise, gpu_at, limit, pdl, permute
from fdk_cuda.triton.packed_weight import TL_DTYPES, PackedWeight

SORT_BLOCK = 256  # pairs of a program
GATHER_BLOCK = REDUCE_BLOCK = 1024
COLUMN_MULTIPLE = 8  # columns of 16 bytes of x
# Weights of experts that are dequantised at once: 512 MiB in 16 bits.
DEQUANTISED_AT_ONCE = 1 << 28
# Tiles of the product with dequantised experts.
MATMUL_ROWS = 64
MATMUL_BLOCK = {"BLOCK_N": 64, "BLOCK_K": 32, "GROUP_M": 8}


class Routing(NamedTuple):
    """The pairs of a call, sorted by expert, see ``expert_sort``.

    Attributes:
        ids: ``[tokens, top_k]``, int32 or int64.
        order: ``[pairs, int32]``, or the ids where pairs are not sorted.
        tiles: ``[3 * max_tiles + 1, int32]``, or the ids where pairs are not sorted.
        max_tiles: upper bound on the tiles.
        experts: experts of the stack.
    """

    ids: Tensor
    order: Tensor
    tiles: Tensor
    max_tiles: int
    experts: int


def route(ids: Tensor, experts: int, config: ExpertConfig, *, zeros: bool) -> Routing:
    """Sorts the pairs of a call by expert.

    Args:
        ids: ``[tokens, top_k]``, int32 or int64; others than 0 to ``experts - 1`` mean no expert.
        experts: experts of the stack.
        config: has the rows of a tile.
        zeros: whether pairs of no expert have tiles, whose results are zeros. For the GEMM by wgmma
            they never have.
    """
    pairs = ids.numel()
    max_tiles = config.max_tiles(pairs, experts)
    if not config.is_sorted:
        return Routing(ids, ids, ids, max_tiles, experts)
    blocks = triton.cdiv(pairs, SORT_BLOCK)
    order = ids.new_empty(pairs, dtype=torch.int32)
    tiles = ids.new_empty(3 * max_tiles + 1, dtype=torch.int32)
    overlap = can_overlap(ids.get_device())
    constants = {
        "BINS": triton.next_power_of_2(experts + 1),
        "BLOCK": SORT_BLOCK,
        "ROWS": config.rows,
        "ONE_BLOCK": blocks == 1,
        "ZEROS": zeros and not config.is_wgmma,
        "OVERLAP": overlap,
    }
    options = {"num_warps": SORT_BLOCK // 32, **pdl(overlap)}
    counts = order
    if blocks > 1:
        counts = order.new_empty((blocks, constants["BINS"]))
        own = ("count", pairs, experts, ids.dtype)
        if not launch_compiled(own, (ids, counts)):
            compile_and_launch(
                own, count_kernel, (blocks,), (ids, counts), (pairs, experts), constants, **options
            )
    tensors = (ids, counts, order, tiles)
    key = ("sort", pairs, experts, ids.dtype, config.rows, constants["ZEROS"])
    if not launch_compiled(key, tensors):
        sizes = (pairs, experts, blocks, max_tiles)
        compile_and_launch(key, sort_kernel, (blocks,), tensors, sizes, constants, **options)
    return Routing(ids, order, tiles, max_tiles, experts)


def expert_linear(
    x: Tensor,
    w: PackedWeight,
    routing: Routing,
    config: ExpertConfig,
    *,
    bias: Tensor | None = None,
    weights: Tensor | None = None,
    swiglu: bool = False,
) -> Tensor:
    """Computes ``x @ W_hat[expert].T + bias[expert]`` for every pair, by a Triton kernel.

    Args:
        x: ``[tokens, k]``, or a row of each pair, ``[tokens, top_k, k]``.
        w: a stack of experts.
        routing: the experts of the pairs, with the rows of tiles of ``config``.
        config: the kernel.
        bias: ``[experts, n, dtype of x]`` or None.
        weights: ``[tokens, top_k]``, floating: multiplied with the results, which are float32 then.
            Rows of pairs of no expert may stay unwritten.
        swiglu: whether the first half of the outputs are gates of the second.

    Returns:
        ``[pairs, n]``, or ``[pairs, n / 2]``; float32 in the interpreter, as ``new_output``.
    """
    a, pairs = w.layout, routing.ids.numel()
    wide = INTERPRETED or weights is not None
    width = a.n // 2 if swiglu else a.n
    out = x.new_empty((pairs, width), dtype=torch.float32 if wide else x.dtype)
    sharing = routing.ids.shape[1] if x.ndim == 2 else 1
    rows = x.view(-1, a.k)
    arguments = rows, w, routing, bias, weights, out, sharing
    if isinstance(config.kernel, GemvConfig):
        _gemv(*arguments, config.kernel, config, swiglu=swiglu)
    else:
        assert isinstance(config.kernel, GemmConfig)
        _gemm(*arguments, config.kernel, swiglu=swiglu)
    return out


def _gemv(
    x: Tensor,
    w: PackedWeight,
    routing: Routing,
    bias: Tensor | None,
    weights: Tensor | None,
    out: Tensor,
    sharing: int,
    config: GemvConfig,
    tiles: ExpertConfig,
    *,
    swiglu: bool,
) -> None:
    a = w.layout
    ids, order, table, max_tiles, experts = routing
    unused = x  # the kernel does not read it
    tensors = (
        *(x, *w.tensors, unused if bias is None else bias, ids, order, table),
        *(unused if weights is None else weights, out),
    )
    key = ("expert_gemv", max_tiles, tiles, swiglu, *_key(x, w, routing, bias, weights, sharing))
    if launch_compiled(key, tensors):
        return
    is_able = can_overlap(x.get_device())
    overlap = is_able and config.overlap
    constants = w.constants(x.dtype) | {
        "HAS_BIAS": bias is not None,
        "HAS_ROUTING": weights is not None,
        "OWN_TABLES": len(w.values) > 1,
        "SORTED": tiles.is_sorted,
        "SWIGLU": swiglu,
        "N_TILES": config.n_tiles,
        "M_TILES": tiles.rows // 8,
        "WARPS": config.warps,
        "AHEAD": config.ahead,
        "FETCH": config.fetch if is_able else 0,
        "OVERLAP": overlap,
        "MINUS": config.minus and w.has_exact_zeros(x.dtype),
    }
    grid = (triton.cdiv(a.n_tiles, config.n_tiles), max_tiles)
    sizes = (max_tiles, sharing, experts, a.n, a.k, a.k_tiles, a.groups)
    options = {"num_warps": config.warps, **pdl(overlap), **limit(config.registers)}
    compile_and_launch(key, expert_gemv_kernel, grid, tensors, sizes, constants, **options)


def _gemm(
    x: Tensor,
    w: PackedWeight,
    routing: Routing,
    bias: Tensor | None,
    weights: Tensor | None,
    out: Tensor,
    sharing: int,
    config: GemmConfig,
    *,
    swiglu: bool,
) -> None:
    a, gpu = w.layout, gpu_at(x.get_device())
    permuted = permute(x, w)
    _, order, table, max_tiles, experts = routing
    unused = x  # the kernel does not read it
    tensors = (
        *(permuted, *w.tensors, unused if bias is None else bias, order, table),
        *(unused if weights is None else weights, out),
    )
    key = ("expert_gemm", max_tiles, config, swiglu, *_key(x, w, routing, bias, weights, sharing))
    if launch_compiled(key, tensors):
        return
    constants = w.constants(x.dtype) | {
        "HAS_BIAS": bias is not None,
        "HAS_ROUTING": weights is not None,
        "OWN_TABLES": len(w.values) > 1,
        "SWIGLU": swiglu,
        "N_TILES": config.n_tiles,
        "WARPS": config.warps,
        "BLOCK_M": config.block_m,
        "GROUP_M": 4,
        "STAGES": config.stages,
        "TABLE": takes_table(config, a.bits, a.padded_group, gpu.shared_bytes),
    }
    if gpu.is_measured:
        constants |= w.fused(GEMM_FUSED_BITS)
    grid = (triton.cdiv(a.n_tiles, config.n_tiles * config.warps) * max_tiles,)
    sizes = (max_tiles, sharing, experts, a.n, a.k_tiles, a.groups)
    options = {"num_warps": config.warps, "num_stages": config.stages}
    compile_and_launch(key, expert_gemm_kernel, grid, tensors, sizes, constants, **options)


def _key(
    x: Tensor,
    w: PackedWeight,
    routing: Routing,
    bias: Tensor | None,
    weights: Tensor | None,
    sharing: int,
) -> tuple[object, ...]:
    weights_dtype = None if weights is None else weights.dtype
    sizes = routing.experts, len(w.values), sharing
    return (x.dtype, bias is None, weights_dtype, routing.ids.dtype, *sizes, *w.key)


def gather(x: Tensor, routing: Routing) -> Tensor:
    """Returns the rows of x of all pairs, sorted by expert, padded to whole 16 bytes.

    Args:
        x: ``[rows, k]``, a row for one pair or for the neighbouring pairs of a token.
        routing: the experts of the pairs.
    """
    pairs, k = routing.ids.numel(), x.shape[1]
    width = -(-k // COLUMN_MULTIPLE) * COLUMN_MULTIPLE
    out = x.new_empty((pairs, width))
    sharing = pairs // len(x)
    tensors = (x, routing.order, out)
    key = ("expert_gather", pairs, sharing, k, x.dtype)
    if not launch_compiled(key, tensors):
        overlap = can_overlap(x.get_device())
        constants = {"BLOCK": GATHER_BLOCK, "OVERLAP": overlap}
        grid = (pairs, triton.cdiv(width, GATHER_BLOCK))
        sizes = (k, width, sharing)
        compile_and_launch(
            key, expert_gather_kernel, grid, tensors, sizes, constants, **pdl(overlap)
        )
    return out


def expert_reduce(
    partial: Tensor, routing: Routing, dtype: torch.dtype, weights: Tensor | None = None
) -> Tensor:
    """Adds the weighted results of each token's experts.

    Args:
        partial: ``[pairs, n]``, float32 or ``dtype``.
        routing: the experts of the pairs.
        dtype: dtype of the result.
        weights: ``[tokens, top_k]``, floating, to multiply ``partial`` with; None where it is
            weighted.

    Returns:
        ``[tokens, n, dtype]``.
    """
    ids, n = routing.ids, partial.shape[1]
    tokens, top_k = ids.shape
    out = partial.new_empty((tokens, n), dtype=torch.float32 if INTERPRETED else dtype)
    tensors = (partial, ids, ids if weights is None else weights, out)
    dtypes = partial.dtype, ids.dtype, None if weights is None else weights.dtype, dtype
    key = ("expert_reduce", tokens, top_k, n, dtypes, routing.experts)
    if not launch_compiled(key, tensors):
        overlap = can_overlap(out.get_device())
        constants = {"TOP_K": top_k, "BLOCK": REDUCE_BLOCK, "OVERLAP": overlap}
        constants["HAS_ROUTING"] = weights is not None
        grid = (tokens, triton.cdiv(n, REDUCE_BLOCK))
        sizes = (n, routing.experts)
        compile_and_launch(
            key, expert_reduce_kernel, grid, tensors, sizes, constants, **pdl(overlap)
        )
    return out.to(dtype)


def grouped_matmul(
    a: Tensor, b: Tensor, routing: Routing, out: Tensor, *, first_expert: int = 0
) -> None:
    """Computes ``a @ b[expert]`` for the pairs of the experts in ``b``; zeros for pairs of none.

    Args:
        a: ``[tokens, k]`` or ``[pairs, k]``.
        b: ``[count, k, n]``, the matrices of experts from ``first_expert`` on, by strides: whole
            matrices are contiguous, transposed or not.
        routing: the experts of the pairs, with tiles of ``MATMUL_ROWS``.
        out: ``[pairs, n]``.
        first_expert: the first expert in ``b``.
    """
    count, k, n = b.shape
    ids, order, tiles, max_tiles, experts = routing
    sharing = ids.numel() // len(a)
    tensors = (a, b, order, tiles, out)
    strides = b.stride()[1:]
    key = ("grouped_matmul", max_tiles, sharing, experts, first_expert, *b.shape, *strides)
    key = (*key, a.dtype, out.dtype)
    if launch_compiled(key, tensors):
        return
    dot = torch.float32 if INTERPRETED else a.dtype
    constants = {"BLOCK_M": MATMUL_ROWS, **MATMUL_BLOCK}
    constants["DOT_DTYPE"] = TL_DTYPES.get(dot, triton.language.float32)
    grid = (max_tiles * triton.cdiv(n, MATMUL_BLOCK["BLOCK_N"]),)
    sizes = (max_tiles, sharing, experts, first_expert, count, n, k, *strides)
    compile_and_launch(key, grouped_matmul_kernel, grid, tensors, sizes, constants)


def expert_dgrad(grad_y: Tensor, w: PackedWeight, ids: Tensor) -> Tensor:
    """Computes ``dy @ W_hat[expert]`` for every pair, dequantising some experts at a time.

    Args:
        grad_y: ``[pairs, n]``.
        w: a stack of experts.
        ids: ``[tokens, top_k]``.

    Returns:
        ``[pairs, k]``; float32 in the interpreter.
    """

    def weight_of(expert: int) -> Tensor:
        return dequantise(w.expert(expert), grad_y.dtype)

    return grouped_dgrad(grad_y, ids, weight_of, len(w.words), w.layout.k)


def grouped_dgrad(
    grad_y: Tensor, ids: Tensor, weight_of: Callable[[int], Tensor], experts: int, k: int
) -> Tensor:
    """Computes ``dy @ weight_of(expert)`` for every pair, some experts at a time.

    Args:
        grad_y: ``[pairs, n]``.
        ids: ``[tokens, top_k]``.
        weight_of: returns the weight of an expert, ``[n, k, dtype of grad_y]``.
        experts: experts of the stack.
        k: inputs of an expert.

    Returns:
        ``[pairs, k]``; float32 in the interpreter.
    """
    config = ExpertConfig(GemmConfig(1, 4, MATMUL_ROWS), MATMUL_ROWS)
    routing = route(ids, experts, config, zeros=True)
    dtype = torch.float32 if INTERPRETED else grad_y.dtype
    out = grad_y.new_empty((len(grad_y), k), dtype=dtype)
    at_once = max(1, DEQUANTISED_AT_ONCE // (grad_y.shape[1] * k))
    for first in range(0, experts, at_once):
        some = range(first, min(first + at_once, experts))
        weights = torch.stack([weight_of(i) for i in some])
        grouped_matmul(grad_y, weights, routing, out, first_expert=first)
    return out
