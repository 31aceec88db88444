"""Quantised layers whose parameters are DTensors: tensor parallelism, and FSDP2 between calls.

``torch.distributed.tensor.parallel.parallelize_module`` shards a quantised layer as it shards
``nn.Linear``. Column-wise, codes, scales, zero points and bias are cut along n. Row-wise, codes,
scales and zero points are cut along k, at whole groups, whole bytes and whole blocks of a rotation;
a scale for whole rows is replicated. The codebook is replicated. Each process rotates its part of x
alone: a part of whole blocks has blocks of the same size.
"""

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from fdk_formats.format import Format
from fdk_formats.stored_weight import StoredTensor, weight_of
from fdk_formats.tensor import CanonicalWeight
from fdk_formats.torch_internals import local_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from fdk_formats.linear import QuantisedLinear
    from fdk_formats.quantised_module import QuantisedModule

# The remedy where a cut along k does not fit.
COLUMN_WISE = "cut it along n (ColwiseParallel)"


def is_dtensor(tensor: object) -> bool:
    """Returns whether a tensor is a DTensor, without importing torch.distributed."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_sharded(layer: "QuantisedModule") -> bool:
    """Returns whether the weight of a layer is a DTensor."""
    return is_dtensor(layer._parameters["weight_packed"])


def local(tensor: Any) -> Tensor:
    """Returns this process's shard of a DTensor, and other tensors as they are."""
    return local_tensor(tensor) if is_dtensor(tensor) else tensor


def local_weight(layer: "QuantisedModule", tensors: "Mapping[str, Tensor]") -> CanonicalWeight:
    """Makes the weight of this process from the tensors that a layer's parameters hold.

    Mixed precision of FSDP2 casts scales and codebooks; they get back the dtypes of the format.
    """
    format, (first, *others, k) = layer.format, layer.weight_shape
    if is_sharded(layer):
        first = len(tensors["packed"])
        k //= _ranks_along_k(layer)
    dtypes = {
        "packed": torch.uint8,
        "scale": format.stored_scale_dtype,
        "codebook": torch.float32,
        "zero_point": format.stored_zero_point_dtype,
    }
    # Where one parameter was replaced, the others are still those of the weight before.
    plain = {
        name: tensor.plain() if isinstance(tensor, StoredTensor) else tensor
        for name, tensor in tensors.items()
    }
    own = {name: tensor.detach().to(dtypes[name]) for name, tensor in plain.items()}
    return weight_of(format, (first, *others, k), own)


def like(sharded: Any, shard: Tensor) -> nn.Parameter:
    """Makes a parameter sharded as another one, from this process's shard."""
    from torch.distributed.tensor import DTensor

    placed = DTensor.from_local(
        shard,
        sharded.device_mesh,
        sharded.placements,
        run_check=False,
        shape=sharded.shape,
        stride=sharded.stride(),
    )
    return nn.Parameter(placed, requires_grad=False)


def gathered(layer: "QuantisedModule") -> CanonicalWeight:
    """Gathers the weight of a sharded layer from all processes."""
    tensors: dict[str, Any] = {}
    parameters: Any = layer.weight_parameters
    for name, parameter in zip(layer.format.tensor_names, parameters, strict=True):
        tensors[name] = parameter.full_tensor() if is_dtensor(parameter) else parameter
    return weight_of(layer.format, layer.weight_shape, tensors)


def shard_weight(layer: "QuantisedModule", weight: Any) -> None:
    """Shards the parameters of a layer as a DTensor of its weight ``[n, k]`` is sharded.

    Raises:
        ValueError: if a cut along k does not fit the format.
        NotImplementedError: for more than one mesh dimension or another placement.
    """
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh, placements = weight.device_mesh, tuple(weight.placements)
    _check_placements(placements)
    by_k, by_n = placements[0].is_shard(1), placements[0].is_shard(0)
    if by_k:
        if getattr(layer, "input_permutation", None) is not None:
            raise ValueError(
                "QuantisedLinear: a weight with permuted inputs cannot be cut along k, whose order "
                "is not that of x: cut it along n (ColwiseParallel)"
            )
        check_cut(layer.format, layer.weight_shape[-1], mesh.size(), COLUMN_WISE)
    q = layer.stored.quantised()
    for own, (name, tensor) in zip(layer.weight_names, q.tensors().items(), strict=True):
        is_replicated = name == "codebook" or (by_k and name != "packed" and tensor.shape[1] == 1)
        placement = Replicate() if is_replicated or not (by_k or by_n) else Shard(1 if by_k else 0)
        cut = distribute_tensor(tensor, mesh, [placement])
        layer._parameters[own] = nn.Parameter(cut, requires_grad=False)


def replicated(tensor: Any) -> Any:
    """Returns a DTensor on all processes in full."""
    from torch.distributed.tensor import Replicate

    return tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)


def apply(layer: "QuantisedModule", fn: "Callable[[Tensor], Tensor]") -> None:
    """Applies a function of ``nn.Module.to`` to a sharded weight, whose dtypes stay."""
    for name in layer.weight_names:
        parameter: Any = layer._parameters[name]
        moved = fn(parameter)
        if moved.dtype != parameter.dtype:
            moved = parameter.to(moved.device)
        if moved is not parameter:
            layer._parameters[name] = nn.Parameter(moved, requires_grad=False)
    layer.dtype = fn(torch.empty(0, dtype=layer.dtype, device=layer.device)).dtype


def call(layer: "QuantisedLinear", x: Any, dtype: torch.dtype) -> Tensor:
    """Computes ``x @ W_hat.T + bias`` of a sharded layer: each process the product of its shard.

    Args:
        layer: the layer.
        x: DTensor ``[..., k]`` on the mesh of the layer.
        dtype: dtype to compute in.

    Returns:
        DTensor ``[..., n]``: sharded along n for a weight sharded along n, a partial sum for one
        sharded along k.

    Raises:
        TypeError: if x or the weight is no DTensor.
    """
    if not (is_dtensor(x) and is_sharded(layer)):
        kinds = {True: "a DTensor", False: "a tensor"}
        raise TypeError(
            f"QuantisedLinear: x and the weight must both be DTensors, got {kinds[is_dtensor(x)]} "
            f"and {kinds[is_sharded(layer)]}: call the module that parallelize_module or "
            f"fully_shard returned, whose hooks convert x or gather the weight"
        )
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    packed: Any = layer._parameters["weight_packed"]
    mesh, (placement,) = packed.device_mesh, _check_placements(packed.placements)
    last, bias = x.ndim - 1, cast("Any", layer.bias)
    placed_x: list[Any]
    placed_y: list[Any]
    if placement.is_shard(0):
        x, placed_x, placed_y = x.redistribute(placements=[Replicate()]), [Partial()], [Shard(last)]
        bias = None if bias is None else bias.to_local()
    elif placement.is_shard(1):
        x = x.redistribute(placements=[Shard(last)])
        placed_x, placed_y = [Shard(last)], [Partial()]
        if bias is not None:  # counted once in the sum
            is_first = mesh.get_local_rank() == 0
            bias = bias.to_local(grad_placements=[Partial()]) * is_first
    else:
        placed_x = placed_y = list(x.placements)
        bias = None if bias is None else bias.to_local(grad_placements=[Partial()])
    local_x = x.to_local(grad_placements=placed_x).to(dtype)
    if layer.input_permutation is not None:
        permutation: Any = layer.input_permutation
        local_x = local_x.index_select(-1, local(permutation))
    bias = None if bias is None else bias.to(dtype)
    y = layer._pack(dtype)(local_x, bias)
    shape = torch.Size((*x.shape[:-1], layer.out_features))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(y, mesh, placed_y, run_check=False, shape=shape, stride=stride)


def _check_placements(placements: Any) -> Any:
    if len(placements) != 1 or not (placements[0].is_shard() or placements[0].is_replicate()):
        raise NotImplementedError(
            f"QuantisedLinear: can be sharded along one mesh dimension, by Shard(0), Shard(1) or "
            f"Replicate(), got {list(placements)}"
        )
    return placements


def _ranks_along_k(layer: "QuantisedModule") -> int:
    packed: Any = layer._parameters["weight_packed"]
    (placement,) = _check_placements(packed.placements)
    ranks: int = packed.device_mesh.size() if placement.is_shard(1) else 1
    return ranks


def check_cut(format: Format, k: int, ranks: int, remedy: str) -> None:
    """Checks that a weight can be cut along k: at whole groups, bytes of codes, rotated blocks.

    Args:
        format: format of the weight.
        k: inputs of the whole weight.
        ranks: number of parts.
        remedy: what the caller can do other than to change the group size.

    Raises:
        ValueError: if it cannot, with the format that can.
    """
    group_size, block = format.group_size_for(k), format.rotation_block(k)
    group = 1 if group_size == k else group_size
    is_whole = k % (ranks * group) == 0 and (k // ranks * format.bits) % 8 == 0
    usual = [size for size in (256, 128, 64, 32, 16) if k % (ranks * size) == 0]
    fitting = [replace(format, group_size=size) for size in usual if size < group_size]
    if block is not None and k % (ranks * block):
        others = [format.unrotated] if is_whole else [each.unrotated for each in fitting]
        instead = f", or quantise without rotation ({others[0]})" if others else ""
        raise ValueError(
            f"QuantisedLinear: {format} of k={k} cannot be cut into {ranks} along k: each part "
            f"needs whole blocks of {block} rotated inputs, and k/{ranks} is {k / ranks:g}; "
            f"{remedy}{instead}"
        )
    if is_whole:
        return
    fits = f"{fitting[0]} fits" if fitting else "no group size fits"
    raise ValueError(
        f"QuantisedLinear: {format} of k={k} cannot be cut into {ranks} along k: each part needs "
        f"whole groups of {group} and whole bytes of {format.bits}-bit codes, and k/{ranks} is "
        f"{k / ranks:g}; {remedy}, or use groups of a size that divides k/{ranks}: {fits}"
    )
