"""The ops ``torch.ops.fdk_cpu.lut_linear`` and ``lut_linear_int8`` over the packed layout."""

from collections.abc import Mapping
from weakref import ref

import torch
from torch import Tensor
from torch.library import Library

from fdk_cpu import _native
from fdk_cpu.native_args import FLOAT_NAMES, Bytes, bytes_of, check_contiguous_cpu
from fdk_cpu.runtime import num_threads
from fdk_formats.ops import define_linear_op

# A tensor that a cached weight was built from: its name, reference, address, bytes and dtype.
Origin = tuple[str, ref[Tensor], int, int, torch.dtype]


def lut_linear(
    x: Tensor,  # [m, k, bf16 | fp16 | fp32]
    codes: Tensor,  # see native/common/layout.h
    scale: Tensor,
    codebook: Tensor | None,  # [2^bits, fp32]; None for affine formats
    zero_point: Tensor | None,
    group_size: int,
    bits: int,
    batch_invariant: bool,
    bias: Tensor | None,  # [n, dtype of x]
    n: int,
    k: int,
) -> Tensor:
    """Compute ``x @ W_hat.T + bias``, ``[m, n]``."""
    weight = native_weight(codes, scale, codebook, zero_point, group_size, bits, n, k)
    activation = _activation("x", x)
    y = x.new_empty((len(x), n))
    added, out = bytes_of(bias), bytes_of(y)
    weight.linear(activation, bytes_of(x), len(x), added, out, num_threads(), batch_invariant)
    return y


def lut_linear_int8(
    x: Tensor,  # [m, k, bf16 | fp16 | fp32]
    codes: Tensor,
    scale: Tensor,
    codebook: Tensor | None,
    zero_point: Tensor | None,
    group_size: int,
    bits: int,
    batch_invariant: bool,
    levels: Tensor | None,  # [2^bits, int8], of ``int8_table``; None for affine formats
    step: float,
    offset: float,
    bias: Tensor | None,  # [n, dtype of x]
    n: int,
    k: int,
) -> Tensor:
    """Compute ``fdk_formats.int8.int8_linear``, with x rounded to 8 bits, ``[m, n]``."""
    weight = native_weight(codes, scale, codebook, zero_point, group_size, bits, n, k)
    _check_levels(levels)
    activation = _activation("x", x)
    y = x.new_empty((len(x), n))
    weight.linear_int8(
        activation,
        bytes_of(levels),
        step,
        offset,
        bytes_of(x),
        len(x),
        bytes_of(bias),
        bytes_of(y),
        num_threads(),
        batch_invariant,
    )
    return y


def lut_linear_grad_x(
    grad_y: Tensor,  # [m, n, bf16 | fp16 | fp32]
    codes: Tensor,
    scale: Tensor,
    codebook: Tensor | None,
    zero_point: Tensor | None,
    group_size: int,
    bits: int,
    batch_invariant: bool,  # ignored: the order of sums in the gradient depends on m
    n: int,
    k: int,
) -> Tensor:
    """Compute ``grad_y @ W_hat``, ``[m, k]``."""
    weight = native_weight(codes, scale, codebook, zero_point, group_size, bits, n, k)
    grad_x = grad_y.new_empty((len(grad_y), k))
    activation = _activation("grad_y", grad_y)
    weight.grad_x(activation, bytes_of(grad_y), len(grad_y), bytes_of(grad_x), num_threads())
    return grad_x


def _activation(name: str, x: Tensor) -> str:
    if x.dtype not in FLOAT_NAMES:
        wanted = ", ".join(map(str, FLOAT_NAMES))
        raise TypeError(f"lut_linear: {name} must be one of {wanted}, got {x.dtype}")
    return FLOAT_NAMES[x.dtype]


def check_weight_tensors(
    caller: str,
    codes: Tensor,
    scale: Tensor,
    codebook: Tensor | None,
    zero_point: Tensor | None,
) -> None:
    """Raise ValueError or TypeError for tensors that no packed weight has."""
    for name, tensor in (
        ("codes", codes),
        ("scale", scale),
        ("codebook", codebook),
        ("zero_point", zero_point),
    ):
        if tensor is not None:
            check_contiguous_cpu(caller, name, tensor)
    if (codebook is None) == (zero_point is None):
        got = "neither" if codebook is None else "both"
        raise ValueError(f"{caller}: needs a codebook or zero points, got {got}")
    for name, tensor, wanted in (
        ("codes", codes, (torch.uint8,)),
        ("codebook", codebook, (torch.float32,)),
        # uint8 is e8m0 for a scale and an integer for a zero point.
        ("scale", scale, (*FLOAT_NAMES, torch.uint8)),
        ("zero_point", zero_point, (*FLOAT_NAMES, torch.uint8)),
    ):
        if tensor is not None and tensor.dtype not in wanted:
            names = " or ".join(map(str, wanted))
            raise TypeError(f"{caller}: {name} must be {names}, got {tensor.dtype}")


def native_tensors(
    caller: str, codes: Tensor, scale: Tensor, codebook: Tensor | None, zero_point: Tensor | None
) -> tuple[Bytes, Bytes, str, Bytes, str, Bytes]:
    """Check the tensors of a layout and return their addresses, sizes and types for C++."""
    check_weight_tensors(caller, codes, scale, codebook, zero_point)
    scale_type = FLOAT_NAMES.get(scale.dtype, "e8m0")
    zero_type = "none" if zero_point is None else FLOAT_NAMES.get(zero_point.dtype, "u8")
    scales, zeros = bytes_of(scale), bytes_of(zero_point)
    return bytes_of(codes), scales, scale_type, zeros, zero_type, bytes_of(codebook)


def native_weight(
    codes: Tensor,
    scale: Tensor,
    codebook: Tensor | None,
    zero_point: Tensor | None,
    group_size: int,
    bits: int,
    n: int,
    k: int,
) -> _native.Weight:
    """Check the tensors of a layout and return a native weight that points to them."""
    tensors = native_tensors("lut_linear", codes, scale, codebook, zero_point)
    return _native.Weight(n, k, group_size, bits, *tensors)


def _check_levels(levels: Tensor | None) -> None:
    if levels is None:
        return
    check_contiguous_cpu("lut_linear_int8", "levels", levels)
    if levels.dtype != torch.int8:
        raise TypeError(f"lut_linear_int8: levels must be torch.int8, got {levels.dtype}")


def supports_direct_call(x: Tensor, bias: Tensor | None, n: int, k: int) -> bool:
    """Return whether ``NativeWeightCache.linear`` may run a call; the op raises for bad ones."""
    return (
        x.is_cpu
        and x.shape[-1:] == (k,)
        and x.is_contiguous()
        and x.dtype in FLOAT_NAMES
        and x.numel() > 0
        and n > 0
        and (bias is None or (bias.is_cpu and bias.shape == (n,) and bias.dtype == x.dtype))
    )


class NativeWeightCache:
    """The checked native weight of a layout, cached: building it took 7 of 16 us of a small call.

    It is rebuilt when a tensor of the layout is replaced or changes its address, size or dtype. It
    keeps no tensor alive. Copies and pickles are empty.
    """

    def __init__(self) -> None:
        # One tuple, replaced at once for other threads: the weight, the tensors that it was built
        # from, and the name of the one that was None.
        self._made: tuple[_native.Weight | None, list[Origin], str]
        self._made = None, [], ""

    def __reduce__(self) -> tuple[type["NativeWeightCache"], tuple[()]]:
        return NativeWeightCache, ()

    def linear(
        self,
        x: Tensor,  # [..., k], see supports_direct_call
        bias: Tensor | None,
        tensors: Mapping[str, Tensor | None],  # arguments of lut_linear or lut_linear_int8, by name
        group_size: int,
        bits: int,
        n: int,
        batch_invariant: bool,
        int8: tuple[float, float] | None = None,
    ) -> Tensor:
        """Compute ``x @ W_hat.T + bias``, ``[..., n]``.

        With ``int8``, the step and offset of the codebook's levels, x is rounded to 8 bits. Threads
        may call this at once, also while one of them replaces tensors of the layout.
        """
        *batch, k = x.shape
        tensors = {**tensors}  # keeps them alive for this call if the layout drops them
        weight, origins, absent = self._made
        for name, original, address, size, dtype in origins:
            tensor = tensors[name]
            if (
                tensor is None
                or original() is not tensor
                or tensor.data_ptr() != address
                or tensor.nbytes != size
                or tensor.dtype != dtype
            ):
                weight = None
        if weight is None or tensors[absent] is not None:
            codes, scale = tensors["codes"], tensors["scale"]
            codebook, zero_point = tensors["codebook"], tensors["zero_point"]
            assert codes is not None
            assert scale is not None
            weight = native_weight(codes, scale, codebook, zero_point, group_size, bits, n, k)
            _check_levels(tensors.get("levels"))
            present = [(name, tensor) for name, tensor in tensors.items() if tensor is not None]
            origins = [(name, ref(t), t.data_ptr(), t.nbytes, t.dtype) for name, t in present]
            self._made = weight, origins, "codebook" if codebook is None else "zero_point"
        y = x.new_empty((*batch, n))
        m = x.numel() // k
        bias = None if bias is None else bias.contiguous()
        kind = FLOAT_NAMES[x.dtype]
        # Cheaper than nbytes of x and y, which are contiguous.
        size = m * x.itemsize
        given, wanted, added = (x.data_ptr(), size * k), (y.data_ptr(), size * n), bytes_of(bias)
        threads = num_threads()
        if int8 is None:
            weight.linear(kind, given, m, added, wanted, threads, batch_invariant)
        else:
            levels, (step, offset) = bytes_of(tensors["levels"]), int8
            sizes = m, added, wanted, threads, batch_invariant
            weight.linear_int8(kind, levels, step, offset, given, *sizes)
        return y


_library = Library("fdk_cpu", "FRAGMENT")
_SCHEMA = (
    "Tensor codes, Tensor scale, Tensor? codebook, Tensor? zero_point, int group_size, int bits, "
    "bool batch_invariant"
)
lut_linear_op = define_linear_op(
    _library,
    "lut_linear",
    layout=_SCHEMA,
    forward=lut_linear,
    grad_x=lut_linear_grad_x,
    dispatch_keys=("CPU",),
)
lut_linear_int8_op = define_linear_op(
    _library,
    "lut_linear_int8",
    layout=f"{_SCHEMA}, Tensor? levels, float step, float offset",
    forward=lut_linear_int8,
    grad_x=lut_linear_op,
    dispatch_keys=("CPU",),
)
