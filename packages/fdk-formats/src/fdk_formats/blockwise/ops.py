"""Blockwise ops: quantise and dequantise in 8 and 4 bits, with plain or nested absmax."""

from math import isfinite

import torch
from torch import Tensor
from torch.library import Library

from fdk_formats.blockwise.blocks import (
    NestedAbsmax,
    QuantisedBlocks,
    check_block_size,
    check_dtype,
)
from fdk_formats.blockwise.codebooks import CODES_8BIT, KINDS_4BIT, dynamic_map, four_bit_code
from fdk_formats.blockwise.kernels import kernels_for
from fdk_formats.ops import define_op
from fdk_formats.torch_internals import is_batched, is_traced

# bitsandbytes nests the absmax of 4-bit tensors in blocks of this size.
NESTED_BLOCK_SIZE_4BIT = 256


def quantise_blockwise(
    tensor: Tensor, code: Tensor | None = None, block_size: int = 4096, nested: bool = False
) -> QuantisedBlocks:
    """Quantises a tensor, in row-major order, to 8-bit codes of the nearest entries of ``code``.

    The bytes are those of bitsandbytes' torch implementation of its op ``quantize_blockwise``;
    docs/guide/blockwise.md says where its C++ and CUDA kernels differ. Ties go to the lower entry,
    and a block of zeros decodes to zeros.

    Args:
        tensor: float32, float16 or bfloat16, any shape; copied once if not contiguous. Temporaries
            take about 18 MiB (36 bytes per element of a block, for blocks longer than 2^19).
        code: 256 ascending values (an entry may repeat); None is ``dynamic_map()``.
        block_size: elements that share an absmax, any positive number.
        nested: True to store the absmax in 8 bits too, in blocks of ``block_size``.

    Raises:
        ValueError: if the tensor is not finite or on meta, or block size or code are invalid.
        TypeError: if the tensor has another dtype.

    Example:
        >>> q = quantise_blockwise(torch.randn(1000))
        >>> dequantise_blockwise(q).shape
        torch.Size([1000])
    """
    _check_input("quantise_blockwise", tensor, block_size, bits=8)
    if code is not None:
        code = _checked_code("quantise_blockwise", code)
    quantise = _op_8bit if is_traced() else _run_8bit
    tensors = quantise(tensor.detach(), code, block_size, nested)
    return _blocks(tensors, tensor, block_size, "8bit", block_size)


def quantise_4bit(
    tensor: Tensor, block_size: int = 64, kind: str = "nf4", nested: bool = False
) -> QuantisedBlocks:
    """Quantises a tensor, in row-major order, to two NF4 or FP4 codes per byte.

    The bytes are those of bitsandbytes' torch implementation of its op ``quantize_4bit``;
    docs/guide/blockwise.md says where its C++ and CUDA kernels differ.

    Args:
        tensor: float32, float16 or bfloat16, any shape; copied once if not contiguous. Temporaries
            take about 18 MiB.
        block_size: elements that share an absmax, a power of two from 32 to 4096.
        kind: ``nf4`` or ``fp4``.
        nested: True to store the absmax in 8 bits too, in blocks of 256.

    Raises:
        ValueError: if the tensor is not finite or on meta, or block size or kind are invalid.
        TypeError: if the tensor has another dtype.
    """
    caller = "quantise_4bit"
    _check_input(caller, tensor, block_size, bits=4)
    if kind not in KINDS_4BIT:
        raise ValueError(f"{caller}: kind must be one of {', '.join(KINDS_4BIT)}, got {kind!r}")
    quantise = _op_4bit if is_traced() else _run_4bit
    tensors = quantise(tensor.detach(), block_size, kind, nested)
    return _blocks(tensors, tensor, block_size, kind, NESTED_BLOCK_SIZE_4BIT)


def dequantise_blockwise(q: QuantisedBlocks, dtype: torch.dtype | None = None) -> Tensor:
    """Dequantises 8-bit blocks: one float32 product per element, rounded to ``dtype``.

    Args:
        q: blocks of ``quantise_blockwise``, or assembled from a file.
        dtype: float32, float16 or bfloat16; None is the dtype of the original.

    Returns:
        A tensor of shape ``q.shape``.

    Raises:
        ValueError: if ``q`` is 4-bit.
        TypeError: if ``q`` is not a ``QuantisedBlocks`` or ``dtype`` is another.
        NotImplementedError: if the blocks were made under ``torch.func.vmap``.
    """
    dtype = _checked_output("dequantise_blockwise", q, dtype, ("8bit",))
    flat = kernels_for(q.packed.device).dequantise_8bit(
        _flatten(q.packed), _decoded_absmax(q), q.code.contiguous(), q.block_size, dtype
    )
    return flat.view(q.shape)


def dequantise_4bit(q: QuantisedBlocks, dtype: torch.dtype | None = None) -> Tensor:
    """Dequantises 4-bit blocks: one float32 product per element, rounded to ``dtype``.

    Args:
        q: blocks of ``quantise_4bit``, or assembled from a file.
        dtype: float32, float16 or bfloat16; None is the dtype of the original.

    Returns:
        A tensor of shape ``q.shape``.

    Raises:
        ValueError: if ``q`` is 8-bit.
        TypeError: if ``q`` is not a ``QuantisedBlocks`` or ``dtype`` is another.
        NotImplementedError: if the blocks were made under ``torch.func.vmap``.
    """
    dtype = _checked_output("dequantise_4bit", q, dtype, KINDS_4BIT)
    flat = kernels_for(q.packed.device).dequantise_4bit(
        _flatten(q.packed), _decoded_absmax(q), q.code.contiguous(), q.block_size, q.numel, dtype
    )
    return flat.view(q.shape)


# packed, absmax and code of a QuantisedBlocks; then absmax, code and offset of ``nested``, if any.
Tensors = list[Tensor]


def _run_8bit(tensor: Tensor, code: Tensor | None, block_size: int, nested: bool) -> Tensors:
    caller = "quantise_blockwise"
    if code is not None:
        _check_values(caller, code)
    code = (dynamic_map() if code is None else code).to(tensor.device, copy=True)
    kernels = kernels_for(tensor.device)
    packed, absmax = kernels.quantise_8bit(_flatten(tensor), code, block_size)
    _check_finite(caller, absmax, block_size)
    return [packed.view(tensor.shape), *_nested(absmax, code, block_size if nested else None)]


def _run_4bit(tensor: Tensor, block_size: int, kind: str, nested: bool) -> Tensors:
    kernels = kernels_for(tensor.device)
    packed, absmax = kernels.quantise_4bit(_flatten(tensor), kind, block_size)
    _check_finite("quantise_4bit", absmax, block_size)
    code = four_bit_code(kind).to(tensor.device, copy=True)
    nested_size = NESTED_BLOCK_SIZE_4BIT if nested else None
    return [packed.view(-1, 1), *_nested(absmax, code, nested_size)]


def _nested(absmax: Tensor, code: Tensor, block_size: int | None) -> Tensors:
    """Returns absmax and code, or the absmax less its mean in 8 bits, with the nested tensors."""
    if block_size is None:
        return [absmax, code]
    # The mean of no blocks would be NaN.
    offset = absmax.mean() if len(absmax) else absmax.new_zeros(())
    nested_code = dynamic_map().to(absmax.device, copy=True)
    kernels = kernels_for(absmax.device)
    stored, largest = kernels.quantise_8bit(absmax - offset, nested_code, block_size)
    return [stored, code, largest, nested_code, offset]


def _fake_8bit(tensor: Tensor, code: Tensor | None, block_size: int, nested: bool) -> Tensors:
    packed = tensor.new_empty(tensor.shape, dtype=torch.uint8)
    sizes = block_size, block_size if nested else None
    return [packed, *_fake_absmax(tensor, CODES_8BIT, *sizes)]


def _fake_4bit(tensor: Tensor, block_size: int, kind: str, nested: bool) -> Tensors:
    packed = tensor.new_empty(((tensor.numel() + 1) // 2, 1), dtype=torch.uint8)
    sizes = block_size, NESTED_BLOCK_SIZE_4BIT if nested else None
    return [packed, *_fake_absmax(tensor, 1 << 4, *sizes)]


def _fake_absmax(tensor: Tensor, codes: int, block_size: int, nested_size: int | None) -> Tensors:
    def empty(*shape: int) -> Tensor:
        return tensor.new_empty(shape, dtype=torch.float32)

    blocks = -(-tensor.numel() // block_size)
    if nested_size is None:
        return [empty(blocks), empty(codes)]
    stored = tensor.new_empty(blocks, dtype=torch.uint8)
    return [stored, empty(codes), empty(-(-blocks // nested_size)), empty(CODES_8BIT), empty()]


def _blocks(
    tensors: Tensors, original: Tensor, block_size: int, kind: str, nested_size: int
) -> QuantisedBlocks:
    packed, absmax, code, *state = tensors
    nested = None
    if state:
        largest, nested_code, offset = state
        nested = NestedAbsmax(
            absmax=largest, code=nested_code, offset=offset, block_size=nested_size
        )
    return QuantisedBlocks(
        packed=packed,
        absmax=absmax,
        code=code,
        shape=original.shape,
        dtype=original.dtype,
        block_size=block_size,
        kind=kind,
        nested=nested,
    )


def _decoded_absmax(q: QuantisedBlocks) -> Tensor:
    """Returns the absmax of each block, ``[ceil(n / block_size), float32]``."""
    if q.nested is None:
        return q.absmax.contiguous()
    absmax = kernels_for(q.absmax.device).dequantise_8bit(
        q.absmax.contiguous(),
        q.nested.absmax.contiguous(),
        q.nested.code.contiguous(),
        q.nested.block_size,
        torch.float32,
    )
    return absmax + q.nested.offset


def _flatten(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_neg().reshape(-1)


def _check_input(caller: str, tensor: Tensor, block_size: int, bits: int) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{caller}: wanted a tensor, got {type(tensor).__name__}")
    if tensor.is_meta:
        raise ValueError(f"{caller}: needs values, got a tensor on meta")
    check_dtype(caller, tensor.dtype)
    check_block_size(caller, block_size, bits)


def _checked_code(caller: str, code: Tensor) -> Tensor:
    """Returns the code as float32, detached; ``_check_values`` checks its values."""
    if not isinstance(code, Tensor) or not code.is_floating_point():
        got = code.dtype if isinstance(code, Tensor) else type(code).__name__
        raise TypeError(f"{caller}: code must be a tensor of floats, got {got}")
    if code.shape != (CODES_8BIT,):
        raise ValueError(f"{caller}: code must be [{CODES_8BIT}], got {list(code.shape)}")
    return code.detach().to(torch.float32)


def _check_values(caller: str, code: Tensor) -> None:
    if not torch.all(torch.isfinite(code)):
        raise ValueError(f"{caller}: code must be finite, got a NaN or an infinity")
    falls = torch.nonzero(code[1:] < code[:-1])
    if len(falls):
        at = int(falls[0])
        raise ValueError(
            f"{caller}: code must be ascending, got {code[at]} before {code[at + 1]} at {at}"
        )


def _check_finite(caller: str, absmax: Tensor, block_size: int) -> None:
    """Raises ValueError if an absmax is not finite, which is cheaper than checking the tensor."""
    if len(absmax) and not isfinite(absmax.amax().item()):
        block = int(torch.nonzero(~torch.isfinite(absmax))[0])
        raise ValueError(
            f"{caller}: values must be finite, got a NaN or an infinity in elements "
            f"{block * block_size} to {(block + 1) * block_size - 1}"
        )


def _checked_output(
    caller: str, q: QuantisedBlocks, dtype: torch.dtype | None, kinds: tuple[str, ...]
) -> torch.dtype:
    if not isinstance(q, QuantisedBlocks):
        raise TypeError(f"{caller}: wanted a QuantisedBlocks, got {type(q).__name__}")
    if q.kind not in kinds:
        raise ValueError(f"{caller}: kind must be {' or '.join(kinds)}, got {q.kind}")
    if not torch.compiler.is_compiling() and is_batched(q.packed):
        raise NotImplementedError(
            f"{caller}: needs blocks from outside torch.func.vmap, got a batch of them; "
            "call it for each"
        )
    dtype = q.dtype if dtype is None else dtype
    check_dtype(caller, dtype)
    return dtype


# Tracing sees one op each. Eager calls skip torch's dispatcher, which would only cost time.
_library = Library("fdk_formats", "FRAGMENT")
_op_8bit = define_op(
    _library,
    "quantise_blockwise(Tensor tensor, Tensor? code, int block_size, bool nested) -> Tensor[]",
    run=_run_8bit,
    fake=_fake_8bit,
)
_op_4bit = define_op(
    _library,
    "quantise_4bit(Tensor tensor, int block_size, str kind, bool nested) -> Tensor[]",
    run=_run_4bit,
    fake=_fake_4bit,
)
