"""Triton kernels for the argmax of each row of logits, the next tokens."""

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from fdk_bench.decode.pdl import launch_options

PART = 2048  # logits per program


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


# values, places :: see above
# tokens         :: [b, 1, int64]
# position       :: [1, int64]    incremented
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


def argmax_step(logits: Tensor, tokens: Tensor, position: Tensor) -> None:
    """Write the first argmax of each row to ``tokens``; increment ``position``.

    torch's argmax has one thread block per row and took 35 us on an H200.

    Args:
        logits: ``[b, vocabulary]``; copied where it is not contiguous.
        tokens: ``[b, 1, int64]``, written.
        position: ``[1, int64]``, written.
    """
    b, vocabulary = logits.shape
    logits = logits.contiguous()  # Hugging Face models may return a slice
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
