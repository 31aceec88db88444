"""Conformance of blockwise kernels: their bytes are those of the torch kernels."""

import torch
from torch import Tensor

from fdk_formats.blockwise.blocks import BLOCK_SIZES_4BIT, DTYPES
from fdk_formats.blockwise.codebooks import KINDS_4BIT, dynamic_map, four_bit_code
from fdk_formats.blockwise.kernels import Kernels
from fdk_formats.blockwise.torch_kernels import TORCH_KERNELS

# 8 bits also allow single elements, odd and long blocks.
BLOCK_SIZES = (*BLOCK_SIZES_4BIT, 1, 7, 48, 8192)
# Empty, shorter than a block, odd, whole blocks, and blocks with a tail.
SIZES = (0, 1, 2, 31, 63, 64, 65, 4096, 4097, 9999)


def check_kernels(kernels: Kernels, device: torch.device | str = "cpu", seed: int = 0) -> None:
    """Compares the four functions of ``kernels`` with the torch ones, bit for bit.

    Covers block sizes and dtypes, sizes with and without a tail, blocks of zeros, values at and
    next to every midpoint, absmax below the smallest normal float, NaN and infinity.

    Args:
        kernels: the implementation to test.
        device: where to run it.
        seed: seed of the values.

    Raises:
        AssertionError: if bytes differ, naming function, case and difference.
    """
    generator = torch.Generator().manual_seed(seed)
    codes = {"dynamic": dynamic_map(), "unsigned": dynamic_map(signed=False)}
    for block_size in BLOCK_SIZES:
        for dtype in DTYPES:
            for size in SIZES:
                values = _values(size, generator).to(dtype)
                case = f"n{size}-b{block_size}-{dtype}".replace("torch.", "")
                for name, code in codes.items():
                    _check_8bit(kernels, f"{case}-{name}", values, code, block_size, device)
                for kind in KINDS_4BIT if block_size in BLOCK_SIZES_4BIT else ():
                    _check_4bit(kernels, case, values, kind, block_size, device)
    for name, code in codes.items():
        values = beside_midpoints(code)
        _check_8bit(kernels, f"midpoints-{name}", values, code, 4096, device)
    for kind in KINDS_4BIT:
        values = beside_midpoints(four_bit_code(kind).sort().values)
        _check_4bit(kernels, "midpoints", values, kind, 4096, device)
    _check_not_finite(kernels, device)


def beside_midpoints(code: Tensor) -> Tensor:
    """Returns the entries and midpoints of an ascending table, their neighbours, and 1."""
    middles = torch.cat((code, (code[:-1] + code[1:]) / 2))
    above = torch.nextafter(middles, torch.tensor(torch.inf))
    below = torch.nextafter(middles, torch.tensor(-torch.inf))
    return torch.cat((middles, above, below, torch.ones(1))).clamp(-1, 1)


def _values(size: int, generator: torch.Generator) -> Tensor:
    values = torch.randn(size, generator=generator)
    values[128:384] = 0  # blocks of zeros up to 128 elements, and parts of larger ones
    values[512:576] *= 1e-40  # an absmax that has no reciprocal
    values[600:610] = -0.0
    values[-20:] *= 1e-4
    return values


def _check_8bit(
    kernels: Kernels,
    case: str,
    values: Tensor,
    code: Tensor,
    block_size: int,
    device: torch.device | str,
) -> None:
    wanted = TORCH_KERNELS.quantise_8bit(values, code, block_size)
    on_device = code.to(device)
    got = kernels.quantise_8bit(values.to(device), on_device, block_size)
    _compare(f"quantise_8bit {case}", wanted, got)
    for dtype in DTYPES:
        back = TORCH_KERNELS.dequantise_8bit(*wanted, code, block_size, dtype)
        packed, absmax = (tensor.to(device) for tensor in wanted)
        got_back = kernels.dequantise_8bit(packed, absmax, on_device, block_size, dtype)
        _compare(f"dequantise_8bit {case} to {dtype}", (back,), (got_back,))


def _check_4bit(
    kernels: Kernels,
    case: str,
    values: Tensor,
    kind: str,
    block_size: int,
    device: torch.device | str,
) -> None:
    wanted = TORCH_KERNELS.quantise_4bit(values, kind, block_size)
    got = kernels.quantise_4bit(values.to(device), kind, block_size)
    _compare(f"quantise_4bit {case}-{kind}", wanted, got)
    code, size = four_bit_code(kind), len(values)
    for dtype in DTYPES:
        back = TORCH_KERNELS.dequantise_4bit(*wanted, code, block_size, size, dtype)
        packed, absmax = (tensor.to(device) for tensor in wanted)
        got_back = kernels.dequantise_4bit(packed, absmax, code.to(device), block_size, size, dtype)
        _compare(f"dequantise_4bit {case}-{kind} to {dtype}", (back,), (got_back,))


def _check_not_finite(kernels: Kernels, device: torch.device | str) -> None:
    for value in (torch.nan, torch.inf, -torch.inf):
        for at in (5, 199):  # in a whole block and in the tail
            values = torch.ones(200)
            values[at] = value
            code = dynamic_map().to(device)
            for absmax in (
                kernels.quantise_8bit(values.to(device), code, 64)[1],
                kernels.quantise_4bit(values.to(device), "nf4", 64)[1],
            ):
                finite = torch.isfinite(absmax).tolist()
                if finite != [block != at // 64 for block in range(4)]:
                    raise AssertionError(f"a {value} at {at} must show in the absmax, got {absmax}")


def _compare(case: str, wanted: tuple[Tensor, ...], got: tuple[Tensor, ...]) -> None:
    for want, have in zip(wanted, got, strict=True):
        have = have.cpu()
        if have.dtype != want.dtype or have.shape != want.shape:
            raise AssertionError(
                f"{case}: wanted {want.dtype} {list(want.shape)}, "
                f"got {have.dtype} {list(have.shape)}"
            )
        differ = torch.nonzero(_bits(have) != _bits(want)).flatten()
        if len(differ):
            at = int(differ[0])
            raise AssertionError(
                f"{case}: {len(differ)} of {len(want)} differ, the first at {at}: "
                f"wanted {want[at].item()}, got {have[at].item()}"
            )


def _bits(tensor: Tensor) -> Tensor:
    """Returns the bits of floats, in which -0.0 and 0.0 differ."""
    views = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}
    return tensor.view(views.get(tensor.dtype, tensor.dtype))
