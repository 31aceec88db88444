"""Plans for few rows of each expert of a stack, and the choice between few and many rows."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from fdk_cuda.marlin import cost_model
from fdk_cuda.marlin.heuristics_small_m import BARRIER_BYTES, STAGES, Device
from fdk_cuda.marlin.instantiations import TABLE_BYTES, TileShape, Variant
from fdk_cuda.marlin.layout import BLOCK_K, Geometry

# Rows of a tile, and the mean rows of an expert up to which this kernel runs. Tokens spread
# unevenly: tiles have more rows than the mean, so that most experts need one, which reads their
# weights once. Above, hopper_gemm.cu runs (H200, 4 bits, MLP in microseconds with this kernel and
# with that: mean 4, Mixtral 209, 260, Qwen3-30B-A3B 107, 154; mean 6, DeepSeek-V2-Lite 114, 145;
# mean 16, Mixtral 515, 270; nothing between was timed).
TILE_ROWS = 8
MAX_MEAN_ROWS = 8
# Pairs are not sorted with one token, or where at most one in this many experts is hit: few share
# an expert then. The threshold is that of the Triton kernels.
SPARSE = 4
# Fragments of 16 outputs of a unit, and blocks of 64 inputs of a stage.
TILES = ((2, 2), (4, 1))
WARPS = (16, 12, 8)
# Tiles that a thread block has room for (expert_units.cuh), less two that it may have in part.
MAX_WHOLE_TILES = 62
# Address of the tables in shared memory, of which the driver keeps some.
TABLE_ADDRESS, RESERVED_BYTES = 0x10000, 1024
# Microseconds of the cost model: the least for a block of 32 x 64 weights of one warp, however few
# warps there are; a unit's store; and its sum over warps. Fitted to 192 timed plans at 4 bits: the
# chosen one takes 1.2 % more than the fastest on average, 5 % at most.
BLOCK_LATENCY, STORE_COST, SUM_COST = 0.35, 0.6, 1.5
# Bytes of memory in which a thread block sorts pairs, which tables fill later.
SORT_BYTES = TABLE_BYTES
MAX_EXPERTS = 512  # so many leave room for 3800 pairs


@dataclass(frozen=True)
class ExpertPlan:
    """A way to run small_m_experts.cu.

    Attributes:
        shape: shape of the instantiation; a unit has the outputs of a warp.
        rows: rows of a tile at most.
        split: neighbouring warps that share the inputs of a unit.
        buffers: buffers of partial sums.
        n_units: units along the outputs of an expert.
        shared_bytes: shared memory of a thread block.
    """

    shape: TileShape
    rows: int
    split: int
    buffers: int
    n_units: int
    shared_bytes: int


def tile_rows(tokens: int, top_k: int, experts: int) -> int | None:
    """Returns the rows of a tile; 1 where pairs are not sorted, None where there are many rows."""
    pairs = tokens * top_k
    if tokens == 1 or pairs * SPARSE <= experts:
        return 1
    mean = -(-pairs // experts)
    return TILE_ROWS if mean <= MAX_MEAN_ROWS else None


def plan_experts(
    geometry: Geometry, dtype: torch.dtype, pairs: int, experts: int, rows: int, device: Device
) -> ExpertPlan:
    """Returns the plan for pairs that are spread evenly over the experts of a stack.

    Args:
        geometry: of the weight of an expert.
        dtype: dtype of x.
        pairs: pairs of tokens and experts.
        experts: experts of the stack.
        rows: rows of a tile at most; 1 where each pair is a tile.
        device: the GPU.
    """
    tiles = expected_tiles(pairs, experts, rows)
    plans = expert_plans(geometry, Variant.of(geometry, dtype), rows, device)
    return min(plans, key=lambda plan: expert_cost(geometry, plan, tiles, device))


def expected_tiles(pairs: int, experts: int, rows: int) -> float:
    """Returns the mean number of tiles where each pair may go to any expert."""
    if rows == 1:
        return pairs
    hit = experts * (1 - (1 - 1 / experts) ** pairs)
    # The last tile of an expert is half full on average, unless it is the only one.
    return max(hit, pairs / rows + hit / 2)


def expert_plans(
    geometry: Geometry, variant: Variant, rows: int, device: Device
) -> Iterator[ExpertPlan]:
    """Yields every plan that fits."""
    for tile, warps in itertools.product(TILES, WARPS):
        shape = TileShape(*tile, 1, 1, warps, is_spread=rows == 1)
        if warps > most_warps(variant, shape):
            continue
        stages = geometry.padded_k // (BLOCK_K * shape.k_blocks)
        for split in range(1, min(warps, stages) + 1):
            if warps % split:
                continue
            for buffers in (2, 1) if split > 1 else (1,):
                needed = shared_bytes(geometry, shape, rows, buffers)
                if needed <= device.shared_bytes:
                    n_units = geometry.padded_n // shape.tile_n
                    # More than half of an SM's, see plan_of_shape.
                    shared = max(needed, device.shared_bytes // 2 + 1024)
                    yield ExpertPlan(shape, rows, split, buffers, n_units, shared)
                    break


def most_warps(variant: Variant, shape: TileShape) -> int:
    """Returns how many warps get enough registers, see ``heuristics_small_m.most_warps``."""
    bits = variant.bits
    heavy = variant.per_row == 2 or variant.scale_dtype == torch.float32
    if heavy:
        is_tight = bits == 8 or (bits in (5, 7) and shape.fragments == 2)
        return 8 if is_tight else 12
    if bits == 8 and shape.fragments == 4 and not shape.is_spread:
        return 8
    is_tight = bits == 8 or bits == (5 if shape.is_spread else 7)
    is_tight |= variant.affine and shape.fragments == 2 and not shape.is_spread
    return 12 if is_tight else 16


def expert_cost(geometry: Geometry, plan: ExpertPlan, tiles: float, device: Device) -> float:
    """Returns the cost model's microseconds for a plan, beyond what every plan takes."""
    shape = plan.shape
    units = math.ceil(tiles * plan.n_units / device.sm_count)  # of the busiest thread block
    rounds, last = divmod(units, shape.warps // plan.split)
    stages = -(-geometry.padded_k // (BLOCK_K * shape.k_blocks * plan.split))
    cost, blocks = _block_cost(geometry.bits, shape), stages * shape.stage_blocks

    def round_cost(warps: int) -> float:
        return blocks * max(BLOCK_LATENCY, warps * cost) + (
            SUM_COST if plan.split > 1 else STORE_COST
        )

    return rounds * round_cost(shape.warps) + (round_cost(last * plan.split) if last else 0)


def most_pairs(experts: int) -> int:
    """Returns how many pairs a thread block can sort, see PairSort in expert_units.cuh."""
    bins = experts + 1
    words = SORT_BYTES // 4 - (max(WARPS) + 1) * bins - bins // 32 - 2
    return words // 2


def _block_cost(bits: int, shape: TileShape) -> float:
    """Returns the cost of a block of 32 x 64 weights, as in small_m.cu."""
    narrow = cost_model.SPREAD_COST if shape.is_spread else cost_model.NARROW_COST
    return narrow[cost_model.WarpTile(shape.fragments, shape.k_blocks)][bits]


def shared_bytes(geometry: Geometry, shape: TileShape, rows: int, buffers: int) -> int:
    """Returns the shared memory of a thread block, see SharedMemory in small_m_experts.cu."""
    pipeline = STAGES * shape.stage_blocks * geometry.shape[2]
    slots = 4 if shape.is_spread else TILE_ROWS
    tiles = 4 * (4 + (MAX_WHOLE_TILES + 2) * (1 + slots))
    front = -(-(shape.warps * STAGES * BARRIER_BYTES + tiles) // 128) * 128
    sums = buffers * shape.warps * rows * (16 * shape.fragments + 4) * 4
    if geometry.bits in (1, 2, 5):  # two tables one after the other
        return front + 2 * TABLE_BYTES + shape.warps * pipeline + sums
    front_warps = min(shape.warps, (TABLE_ADDRESS - RESERVED_BYTES - front) // pipeline)
    return TABLE_ADDRESS + TABLE_BYTES + (shape.warps - front_warps) * pipeline + sums
