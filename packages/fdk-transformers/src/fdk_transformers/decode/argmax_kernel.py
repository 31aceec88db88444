"""Triton kernels of ``next_token.choose``."""

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from fdk_transformers.decode.next_token import Sequences
from fdk_transformers.decode.pdl import launch_options

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


# values, places                           :: see above
# tokens, ids, positions, columns, unfinished, ends, pad :: see Sequences
@triton.jit  # type: ignore[untyped-decorator]
def append_kernel(  # type: ignore[no-untyped-def] # noqa: D103
    values,
    places,
    tokens,
    positions,
    ids,
    columns,
    unfinished,
    ends,
    pad,
    length,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    ENDS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, parts = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    x = tl.load(values + row * PARTS + parts, mask=parts < PARTS, other=float("-inf"))
    best = tl.argmax(x, axis=0)
    going_on = tl.load(unfinished + row)
    best_token = tl.load(places + row * PARTS + best).to(tl.int64)
    token = tl.where(going_on == 1, best_token, tl.load(pad))
    is_end = tl.max((tl.load(ends + tl.arange(0, ENDS)) == token).to(tl.int32), axis=0)
    column = tl.load(columns + row)
    tl.store(tokens + row, token)
    tl.store(ids + row * length + column, token)
    tl.store(columns + row, column + 1)
    tl.store(positions + row, tl.load(positions + row) + 1)
    tl.store(unfinished + row, tl.where(is_end == 1, 0, going_on))


def choose_by_kernel(logits: Tensor, to: Sequences) -> None:
    """Compute ``next_token.choose``.

    torch's argmax has one thread block per row and took 35 us on an H200.
    """
    b, vocabulary = logits.shape
    logits = logits.contiguous()  # models may return a slice
    parts = triton.cdiv(vocabulary, PART)
    values = logits.new_empty(b, parts, dtype=torch.float32)
    places = logits.new_empty(b, parts, dtype=torch.int32)
    options = launch_options(logits)
    largest_of_parts_kernel[parts, b](
        logits, values, places, vocabulary, PART=PART, num_warps=4, **options
    )
    append_kernel[(b,)](
        values,
        places,
        to.tokens,
        to.positions,
        to.ids,
        to.columns,
        to.unfinished,
        to.ends,
        to.pad,
        to.ids.shape[1],
        PARTS=parts,
        BLOCK=triton.next_power_of_2(parts),
        ENDS=to.ends.numel(),
        num_warps=1,
        **options,
    )
