"""llama.cpp's CPU kernels, called through the C interface of its library ggml."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fdk_bench.cases import KernelCase
from fdk_bench.peers.base import Prepared, copies_of
from fdk_bench.peers.ggml import AMX, FOLDER_VARIABLE, Engine, Product, library_folder, load
from fdk_bench.timing import here

# Rows that are quantised: a search per block takes seconds for a whole layer. They repeat.
ROWS = 64
# x is rounded to 8 bits in blocks of 32 or 256: about 0.6 % of y.
ACTIVATION_ERROR = 2e-2


@dataclass(frozen=True)
class GgmlType:
    """A type of weight: its name, its number in ggml, and the weights that share a block."""

    name: str
    number: int
    block: int


# For each width the type that was fastest at m = 1 (4096 x 4096, Zen 4).
TYPES = {
    8: GgmlType("Q8_0", 8, 32),
    6: GgmlType("Q6_K", 14, 256),
    5: GgmlType("Q5_K", 13, 256),
    4: GgmlType("IQ4_NL", 20, 32),
    3: GgmlType("Q3_K", 11, 256),
    2: GgmlType("TQ2_0", 35, 256),
}
# What a row says of ggml's layout of the weight.
LAYOUTS = {"CPU": "", AMX: " for AMX"}
# Beside those: 4 bits without a codebook, and 2 bits that are not ternary.
Q4_0 = {4: GgmlType("Q4_0", 2, 32)}
Q2_K = {2: GgmlType("Q2_K", 10, 256)}


class LlamaCpp:
    """One product of ggml, weights in the type that has the bits of the case.

    Args:
        name: how it is asked for.
        types: the type of weight for each width that is taken.
    """

    note = "activations rounded to 8 bits; blocks of 32 or 256"

    def __init__(self, name: str, types: Mapping[int, GgmlType]) -> None:
        self.name, self.types = name, types

    def missing(self) -> str | None:
        """See ``Peer``."""
        if library_folder() is not None:
            return None
        return f"pip install llama-cpp-python, or {FOLDER_VARIABLE}=<folder of libggml>"

    def unsupported(self, case: KernelCase) -> str | None:
        """See ``Peer``."""
        if case.device != "cpu":
            return f"is measured on a cpu, got {case.device}"
        if case.quantised is None or case.bits not in self.types:
            return f"needs {', '.join(map(str, self.types))} bits, got {case.format}"
        block = self.types[case.bits].block
        if case.k % block:
            return f"needs k % {block} == 0, got k={case.k}"
        return None

    def prepare(self, case: KernelCase, copies: int | None = None) -> Prepared:
        """See ``Peer``."""
        folder = library_folder()
        assert folder is not None
        type, ggml = self.types[case.bits], load(folder)
        rows = min(ROWS, case.n)
        W = torch.randn(rows, case.k, generator=torch.Generator().manual_seed(0)) / case.k**0.5
        some = ggml.quantise(type.number, W)
        repeats = -(-case.n // rows)
        data = some.repeat(repeats, 1)[: case.n].contiguous()
        engine = Engine(ggml, torch.get_num_threads())
        calls = [
            Product(engine, type.number, data, case.k)
            for _ in range(copies_of(case, data.nbytes, copies))
        ]

        def weight(dtype: torch.dtype) -> Tensor:
            decoded = ggml.dequantise(type.number, some, case.k).to(dtype)
            return decoded.repeat(repeats, 1)[: case.n]

        # Types of one width differ in their scales: 2.0625 bits (TQ2_0) or 2.625 (Q2_K).
        backend = f"llama.cpp {type.name} ({8 * some.nbytes / some.shape[0] / case.k:g} bits)"
        layout = calls[0].layout
        backend += LAYOUTS.get(layout, " repacked")
        return Prepared(
            calls,
            weight,
            data.nbytes,
            backend,
            extra_error=ACTIVATION_ERROR,
            rest=engine.rest,
            place=engine.own_thread if layout == AMX else here,
        )


# A width has one row of each of them that takes it.
LLAMA_CPP = (
    LlamaCpp("llama.cpp", TYPES),
    LlamaCpp("llama.cpp-Q4_0", Q4_0),
    LlamaCpp("llama.cpp-Q2_K", Q2_K),
)
