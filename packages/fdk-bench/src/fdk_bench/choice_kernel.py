"""Triton kernels that choose the next tokens: the largest of each row of logits."""

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from fdk_bench.launches import launch_options

PART = 2048  # logits of a program


# logits :: [b, vocabulary, dtype]
# values :: [b, parts, float32]
# places :: [b, parts, int32]
@triton.jit  # type: ignore[untyped-decorator]
def largest_of_parts_kernel(  # type: ignore[no-untyped-def] # noqa: D103
    logits, values, places, vocabulary, PART: tl.constexpr, PDL: tl.constexpr
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, part = tl.program_id(1).to(tl.int64), tl.program_id(0)
    tokens = part * PART + tl.arange(0, PART)
    x = tl.load(logits + row * vocabulary + tokens, mask=tokens < vocabulary, other=float("-inf"))
    value, place = tl.max(x.to(tl.float32), axis=0, return_indices=True)
    mine = row * tl.num_programs(0) + part
    tl.store(values + mine, value)
    tl.store(places + mine, part * PART + place)


# values, places :: as above
# tokens         :: [b, 1, int64]
# position       :: [1, int64]    moved on
@triton.jit  # type: ignore[untyped-decorator]
def largest_part_kernel(  # type: ignore[no-untyped-def] # noqa: D103
    values, places, tokens, position, PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, parts = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(values + row * PARTS + parts, mask=parts < PARTS, other=float("-inf"))
    best = tl.argmax(x, axis=0)
    tl.store(tokens + row, tl.load(places + row * PARTS + best).to(tl.int64))
    if row == 0:
        tl.store(position, tl.load(position) + 1)


def choose(logits: Tensor, tokens: Tensor, position: Tensor) -> None:
    """The first of the largest logits of each row into ``tokens``, and ``position`` moved on.

    torch's argmax has a block of threads for each row and took 35 us (H200).

    logits   :: [b, vocabulary]      copied where rows do not lie one after another
    tokens   :: [b, 1, int64]
    position :: [1, int64]
    """
    b, vocabulary = logits.shape
    logits = logits.contiguous()  # those of Hugging Face may be a slice
    parts = triton.cdiv(vocabulary, PART)
    values = logits.new_empty(b, parts, dtype=torch.float32)
    places = logits.new_empty(b, parts, dtype=torch.int32)
    options = launch_options(logits)
    largest_of_parts_kernel[parts, b](
        logits, values, places, vocabulary, PART=PART, num_warps=4, **options
    )
    largest_part_kernel[(b,)](
        values,
        places,
        tokens,
        position,
        PARTS=parts,
        BLOCK=triton.next_power_of_2(parts),
        num_warps=1,
        **options,
    )
