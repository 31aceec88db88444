"""GPU and CPU kernels of torch and of other packages, measured where they are installed."""

import copy
import math
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fdk_bench.cases import KernelCase
from fdk_bench.peers.base import (
    Peer,
    Prepared,
    copied,
    copies_of,
    random_dense,
    random_integers,
)

# tinygemm: of 2, 4 and 8 tiles of 16 columns the most that k allows is fastest, and what torchao
# chooses.
INNER_TILES = (8, 4, 2)
# bitsandbytes 0.50.2 rounds more than its dequantised weight: one row of bf16 had an error of
# 3.6e-3, torch's was 1.6e-3 (H200, 4096 x 4096).
BITSANDBYTES_ERROR = 2e-3
# humming-kernels 0.1.19 had 3.8e-3 to 4.1e-3 for one row at every width, torch 1.6e-3 to 2.1e-3
# (H200, 4096 x 14336).
HUMMING_ERROR = 1e-3
# gemlite 0.6.0 adds the parts of a row, 16 weights each in its configurations for an H100, to the
# 16-bit result itself, so each addition rounds; the errors are independent. Two runs had a third
# and six tenths of the error that is allowed for it (H200, 4 bits, 8192 x 8192, bf16).
GEMLITE_PART = 16
ROUNDING = {"bf16": 2.0**-8, "fp16": 2.0**-11}
# Keys of its configurations: rows, n, k, group size, weights per word, 100 + bits.
GemliteKey = tuple[int, int, int, int, int, int]
WORD_BITS, TYPE_OF_16_BITS, STORED_BITS = 32, 100, 4


class TinyGemm(Peer):
    """``aten::_weight_int4pack_mm``: integer codes with bf16 scales and zero points."""

    name = "tinygemm"
    note = "integer grid with zero points"
    needs_gpu = True
    bits = (4,)
    dtypes = ("bf16",)
    group_sizes = (32, 64, 128, 256)
    steps = (8, 16 * INNER_TILES[-1])

    def prepare(self, case: KernelCase, copies: int | None = None) -> Prepared:
        """See ``Peer``."""
        weight = random_integers(case)
        pairs = weight.codes[:, ::2] << 4 | weight.codes[:, 1::2]
        tiles = next(tiles for tiles in INNER_TILES if case.k % (16 * tiles) == 0)
        packed = torch.ops.aten._convert_weight_to_int4pack(pairs, tiles)
        op = torch.ops.aten._weight_int4pack_mm
        return _int4pack_prepared(case, packed, weight.scale, weight.dequantise, op, self, copies)


class Int4PackCpu(Peer):
    """``aten::_weight_int4pack_mm_for_cpu``."""

    name = "int4pack"
    note = "integer grid with zero points"
    bits = (4,)
    group_sizes = TinyGemm.group_sizes
    steps = (16, 2)

    def unsupported(self, case: KernelCase) -> str | None:
        """See ``Peer``."""
        if case.device != "cpu":
            return f"needs cpu, got {case.device}"
        return super().unsupported(case)

    def prepare(self, case: KernelCase, copies: int | None = None) -> Prepared:
        """See ``Peer``."""
        weight = random_integers(case)
        codes = weight.codes.to(torch.int32)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 2)
        op = torch.ops.aten._weight_int4pack_mm_for_cpu
        return _int4pack_prepared(case, packed, weight.scale, weight.dequantise, op, self, copies)


def _int4pack_prepared(  # type: ignore[no-untyped-def]
    case: KernelCase, packed: Tensor, scale: Tensor, weight, op, peer: Peer, copies: int | None
) -> Prepared:
    zeros = torch.zeros_like(scale)
    pairs = torch.stack((scale, zeros), dim=-1).transpose(0, 1).contiguous()  # [k/G, n, 2]
    nbytes = packed.nbytes + pairs.nbytes
    calls = [
        partial(_int4pack, packed.clone(), pairs.clone(), case.group_size, op)
        for _ in range(copies_of(case, nbytes, copies))
    ]
    return Prepared(calls, weight, nbytes, peer.name)


def _int4pack(packed: Tensor, pairs: Tensor, group_size: int, op, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
    y: Tensor = op(x, packed, group_size, pairs)
    return y


class BitsAndBytes(Peer):
    """bitsandbytes' NF4 layer: a codebook as in fdk, with float32 absmax."""

    name = "bitsandbytes"
    note = "NF4 with float32 scales"
    module = "bitsandbytes"
    bits = (4,)
    group_sizes = (64, 128, 256, 512, 1024, 2048, 4096)

    def prepare(self, case: KernelCase, copies: int | None = None) -> Prepared:
        """See ``Peer``."""
        functional, bnb = import_module("bitsandbytes.functional"), import_module("bitsandbytes.nn")
        layer = bnb.Linear4bit(
            case.k, case.n, bias=False, compute_dtype=case.torch_dtype, quant_type="nf4"
        )
        layer.weight = bnb.Params4bit(
            random_dense(case).to("cpu", case.torch_dtype),
            requires_grad=False,
            quant_type="nf4",
            blocksize=case.group_size,
            module=layer,
        )
        layer = layer.to(case.device).eval()
        # Before the first call, which repacks the weight on a CPU. Not rounded to the dtype of x.
        state = copy.copy(layer.weight.quant_state)
        state.dtype = torch.float32
        dequantised = functional.dequantize_4bit(layer.weight.data, state)
        nbytes = case.n * case.k // 2 + case.n * case.k // case.group_size * 4
        layers = copied(layer, copies_of(case, nbytes, copies))
        error = BITSANDBYTES_ERROR if case.torch_dtype.itemsize == 2 else 0.0
        return Prepared(layers, dequantised.to, nbytes, self.name, extra_error=error)


class TorchAO(Peer):
    """torchao's int4 weight-only layer in the packing that it recommends for the device."""

    name = "torchao"
    note = "integer grid with zero points"
    module = "torchao"
    bits = (4,)
    dtypes = ("bf16",)
    group_sizes = (32, 64, 128, 256)

    def prepare(self, case: KernelCase, copies: int | None = None) -> Prepared:
        """See ``Peer``."""
        torchao = import_module("torchao.quantization")
        layer = nn.Linear(case.k, case.n, bias=False, device=case.device, dtype=case.torch_dtype)
        torchao.quantize_(layer, torchao_config(case))
        nbytes = case.n * case.k // 2 + case.n * case.k // case.group_size * 4
        layers = copied(layer, copies_of(case, nbytes, copies))
        return Prepared(layers, partial(decoded, layer, case), nbytes, self.name)


def torchao_config(case: KernelCase) -> object:
    """Return torchao's int4 configuration for a device, from the module that has it."""
    options = {"group_size": case.group_size, "set_inductor_config": False}
    stable = import_module("torchao.quantization").Int4WeightOnlyConfig
    if torch.device(case.device).type == "cuda":
        tiled = {"int4_packing_format": "tile_packed_to_4d", "int4_choose_qparams_algorithm": "hqq"}
        return stable(**options, **tiled)
    try:  # since 0.18 there is a separate configuration for a CPU
        own = import_module("torchao.prototype.quantization.int4").PrototypeInt4WeightOnlyConfig
    except ImportError:
        return stable(**options, int4_packing_format="opaque")
    return own(**options)


def decoded(layer: nn.Module, case: KernelCase, dtype: torch.dtype) -> Tensor:
    """Return the weight of a layer without a dequantise function: its answers to one-hot x."""
    rows = []
    for start in range(0, case.k, 256):
        x = torch.zeros(
            min(256, case.k - start), case.k, dtype=case.torch_dtype, device=case.device
        )
        x[range(len(x)), range(start, start + len(x))] = 1
        with torch.inference_mode():
            rows.append(layer(x).to(dtype))
    return torch.cat(rows).T.contiguous()


class Humming(Peer):
    """Humming's kernels, compiled at first use, with the settings it chooses for each m."""

    name = "humming"
    note = "integer grid"
    module = "humming"
    package = "humming-kernels"
    needs_gpu = True
    dtypes = ("bf16", "fp16")

    def prepare(self, case: KernelCase, copies: int | None = None) -> Prepared:
        """See ``Peer``."""
        humming = import_module("humming.layer")
        config = {"dtype": f"int{case.bits}", "group_size": case.group_size}
        nbytes = case.n * case.k * case.bits // 8 + case.n * case.k // case.group_size * 2
        layer = humming.HummingLayer(
            shape_n=case.n, shape_k=case.k, weight_config=config, torch_dtype=case.torch_dtype
        ).to(case.device)
        schema = layer.weight_schema
        W = random_dense(case).to(case.torch_dtype)
        tensors = schema.quant_tensor(W, schema, case.torch_dtype)
        dequantised = schema.dequant_tensors(tensors)
        layer.load_from_tensors(tensors)
        layer.transform()
        layers = copied(layer, copies_of(case, nbytes, copies))
        return Prepared(layers, dequantised.to, nbytes, self.name, extra_error=HUMMING_ERROR)


class GemLite(Peer):
    """gemlite's Triton kernels with the configurations that its authors tuned for an H100."""

    name = "gemlite"
    note = (
        "integer grid with zero points; decodes with a rounded multiply-add; on a GPU it has no "
        "configurations for, its own for an H100 at 4 bits and the nearest shape"
    )
    module = "gemlite"
    needs_gpu = True
    bits = (1, 2, 4, 8)
    dtypes = ("bf16", "fp16")
    steps = (32, 32)

    def unsupported(self, case: KernelCase) -> str | None:
        """See ``Peer``."""
        reason = super().unsupported(case)
        if reason is None and case.group_size % 32:
            return f"needs groups in steps of 32, got {case.group_size}"
        return reason

    def prepare(self, case: KernelCase, copies: int | None = None) -> Prepared:
        """See ``Peer``."""
        helper, core = import_module("gemlite.helper"), import_module("gemlite.core")
        if core.get_default_cache_config() is None:
            stored = Path(str(core.__file__)).parent / "configs" / "h100.json"
            core.GemLiteLinear.load_config(str(stored))
            add_nearest(core.GEMLITE_TRITON_CONFIG_CACHE, case)
        weight = random_integers(case)
        scale = weight.scale.reshape(-1, 1)
        zero = torch.full_like(scale, 1 << case.bits - 1)
        nbytes = case.n * case.k * case.bits // 8 + 2 * scale.nbytes
        build = helper.A16Wn_HQQ_INT(device=case.device, dtype=case.torch_dtype, W_nbits=case.bits)
        layer = build.from_weights(weight.codes.clone(), scale, zero)
        layers = copied(layer, copies_of(case, nbytes, copies))
        error = gemlite_error(case)
        return Prepared(layers, weight.dequantise, nbytes, self.name, extra_error=error)


def gemlite_error(case: KernelCase) -> float:
    """Return the relative error of a sum over k that is rounded to 16 bits after each part."""
    return ROUNDING[case.dtype] / 2 * math.sqrt(case.k / GEMLITE_PART)


def add_nearest(stored: dict[str, dict[str, dict[str, Any]]], case: KernelCase) -> None:
    """Copy gemlite's configurations for the nearest stored shape to a case that has none.

    Without one it tunes for each m: a run had no row after 30 s on an H200.

    Args:
        stored: configurations by kernel and key; added to.
        case: a case, of any m.
    """
    wanted = case.group_size, WORD_BITS // STORED_BITS, TYPE_OF_16_BITS + STORED_BITS
    per_word = WORD_BITS // case.bits
    for configs in stored.values():
        keys = [key for key in map(_gemlite_key, configs) if key[3:] == wanted]
        if not keys:
            continue
        nearest = min(keys, key=lambda key: _distance(key, case))
        for key in keys:
            if key[1:3] != nearest[1:3]:
                continue
            config = dict(configs[str(key)])
            config["BLOCK_SIZE_K"] = max(config["BLOCK_SIZE_K"], per_word)
            mine = key[0], case.n, case.k, case.group_size, per_word, TYPE_OF_16_BITS + case.bits
            configs.setdefault(str(mine), config)


def _gemlite_key(text: str) -> GemliteKey:
    """Parse ``"(1, 4096, 4096, 64, 8, 104)"``."""
    rows, n, k, group_size, per_word, kind = map(int, text.strip("()").split(","))
    return rows, n, k, group_size, per_word, kind


def _distance(key: GemliteKey, case: KernelCase) -> float:
    """Return how far apart two shapes are: the sum of the logarithms of their ratios."""
    return abs(math.log(key[1] / case.n)) + abs(math.log(key[2] / case.k))
