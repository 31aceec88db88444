"""gemlite's Triton kernels, and the configurations that it runs them with."""

import math
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from fdk_bench.cases import KernelCase
from fdk_bench.peers.base import Prepared, copied, copies_of
from fdk_bench.peers.integers import needs, random_integers
from fdk_bench.peers.packages import missing

# gemlite 0.6.0 adds the parts of one row, of 16 weights each in its configurations for an H100, to
# the 16-bit result itself, in any order. Each addition rounds by up to ROUNDING of the sum so far,
# by half of that in the middle; the errors are independent. Of the error so allowed, two runs had a
# third and six tenths (1.4e-2 and 2.7e-2: H200, 4 bits, 8192 x 8192, bf16). Torch's is 2e-3.
PART = 16
ROUNDING = {"bf16": 2.0**-8, "fp16": 2.0**-11}
# Its keys of configurations: rows, n, k, group size, weights a word, 100 and bits.
Key = tuple[int, int, int, int, int, int]
WORD_BITS, TYPE_OF_16_BITS, STORED_BITS = 32, 100, 4
Stored = dict[str, dict[str, dict[str, Any]]]


class GemLite:
    """gemlite's Triton kernels, as its authors tuned them for an H100."""

    name = "gemlite"
    note = (
        "integer grid with zero points; decodes with a rounded multiply-add; on a GPU it has no "
        "configurations for, its own for an H100 at 4 bits and the nearest shape"
    )

    def missing(self) -> str | None:
        """See ``Peer``."""
        return missing("gemlite", gpu=True)

    def unsupported(self, case: KernelCase) -> str | None:
        """See ``Peer``."""
        if reason := needs(case, device="cuda", bits=(1, 2, 4, 8), dtypes=("bf16", "fp16")):
            return reason
        if case.group_size % 32 or case.n % 32 or case.k % 32:
            return f"needs n, k and groups in steps of 32, got {case}"
        return None

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
        error = error_of_parts(case)
        return Prepared(layers, weight.dequantise, nbytes, self.name, extra_error=error)


def error_of_parts(case: KernelCase) -> float:
    """The relative error of a sum over k that is rounded to 16 bits after each of its parts."""
    return ROUNDING[case.dtype] / 2 * math.sqrt(case.k / PART)


def add_nearest(stored: Stored, case: KernelCase) -> None:
    """Gives a case the configurations that are stored for the nearest shape, where it has none.

    Without one gemlite tunes for each m, 17 of them for one row: a run had no row in 30 s (H200).

    Args:
        stored: by kernel and key; added to.
        case: of any m.
    """
    a_word = WORD_BITS // case.bits
    for configs in stored.values():
        keys = [key for key in map(parse_key, configs) if fits(key, case)]
        if not keys:
            continue
        nearest = min(keys, key=lambda key: distance(key, case))
        for key in keys:
            if key[1:3] != nearest[1:3]:
                continue
            config = dict(configs[str(key)])
            config["BLOCK_SIZE_K"] = max(config["BLOCK_SIZE_K"], a_word)
            mine = key[0], case.n, case.k, case.group_size, a_word, TYPE_OF_16_BITS + case.bits
            configs.setdefault(str(mine), config)


def parse_key(text: str) -> Key:
    """``"(1, 4096, 4096, 64, 8, 104)"``."""
    rows, n, k, group_size, a_word, kind = map(int, text.strip("()").split(","))
    return rows, n, k, group_size, a_word, kind


def fits(key: Key, case: KernelCase) -> bool:
    """Whether a configuration was tuned for 4 bits in such groups, and 16-bit activations."""
    wanted = case.group_size, WORD_BITS // STORED_BITS, TYPE_OF_16_BITS + STORED_BITS
    return key[3:] == wanted


def distance(key: Key, case: KernelCase) -> float:
    """How far apart two shapes are: the logarithms of their ratios."""
    return abs(math.log(key[1] / case.n)) + abs(math.log(key[2] / case.k))
