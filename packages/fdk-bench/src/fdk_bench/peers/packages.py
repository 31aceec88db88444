"""Kernels of packages that are measured where they are installed."""

import copy
from functools import partial
from importlib import import_module, util

import torch
from torch import Tensor, nn

from fdk_bench.cases import KernelCase
from fdk_bench.peers.base import Prepared, copied, copies_of
from fdk_bench.peers.integers import needs

# bitsandbytes 0.50.2 rounds more than its dequantised weight: one row of bf16 had an error
# of 3.6e-3, torch's 1.6e-3 (H200, 4096 x 4096).
BITSANDBYTES_ERROR = 2e-3
# humming-kernels 0.1.19 had an error of 3.8e-3 to 4.1e-3 for one row at every width, where torch's
# was 1.6e-3 to 2.1e-3 (H200, 4096 x 14336); at 8192 x 8192 twice torch's was enough.
HUMMING_ERROR = 1e-3


class BitsAndBytes:
    """bitsandbytes' NF4 layer: a codebook as ours, float32 absmax."""

    name = "bitsandbytes"
    note = "NF4 with float32 scales"

    def missing(self) -> str | None:
        """See ``Peer``."""
        return missing("bitsandbytes")

    def unsupported(self, case: KernelCase) -> str | None:
        """See ``Peer``."""
        device = torch.device(case.device).type
        if reason := needs(case, device=device, bits=(4,), dtypes=("bf16", "fp16", "fp32")):
            return reason
        sizes = (64, 128, 256, 512, 1024, 2048, 4096)
        if case.group_size not in sizes:
            return f"needs groups of {', '.join(map(str, sizes))}, got {case.group_size}"
        return None

    def prepare(self, case: KernelCase, copies: int | None = None) -> Prepared:
        """See ``Peer``."""
        functional, bnb = import_module("bitsandbytes.functional"), import_module("bitsandbytes.nn")
        generator = torch.Generator(case.device).manual_seed(0)
        W = torch.randn(case.n, case.k, device=case.device, generator=generator) / case.k**0.5
        layer = bnb.Linear4bit(
            case.k, case.n, bias=False, compute_dtype=case.torch_dtype, quant_type="nf4"
        )
        layer.weight = bnb.Params4bit(
            W.to("cpu", case.torch_dtype),
            requires_grad=False,
            quant_type="nf4",
            blocksize=case.group_size,
            module=layer,
        )
        layer = layer.to(case.device).eval()
        # Before the first call: on a CPU that lays the weight out anew. Not rounded to x's dtype.
        state = copy.copy(layer.weight.quant_state)
        state.dtype = torch.float32
        dequantised = functional.dequantize_4bit(layer.weight.data, state)
        nbytes = case.n * case.k // 2 + case.n * case.k // case.group_size * 4
        layers = copied(layer, copies_of(case, nbytes, copies))
        error = BITSANDBYTES_ERROR if case.torch_dtype.itemsize == 2 else 0.0
        return Prepared(layers, dequantised.to, nbytes, self.name, extra_error=error)


class TorchAO:
    """torchao's int4 weight-only layer in the packing that it recommends for the device."""

    name = "torchao"
    note = "integer grid with zero points"

    def missing(self) -> str | None:
        """See ``Peer``."""
        return missing("torchao")

    def unsupported(self, case: KernelCase) -> str | None:
        """See ``Peer``."""
        device = torch.device(case.device).type
        if reason := needs(case, device=device, bits=(4,), dtypes=("bf16",)):
            return reason
        if case.group_size not in (32, 64, 128, 256):
            return f"needs groups of 32, 64, 128 or 256, got {case.group_size}"
        return None

    def prepare(self, case: KernelCase, copies: int | None = None) -> Prepared:
        """See ``Peer``."""
        torchao = import_module("torchao.quantization")
        layer = nn.Linear(case.k, case.n, bias=False, device=case.device, dtype=case.torch_dtype)
        torchao.quantize_(layer, torchao_config(case))
        nbytes = case.n * case.k // 2 + case.n * case.k // case.group_size * 4
        layers = copied(layer, copies_of(case, nbytes, copies))
        return Prepared(layers, partial(decoded, layer, case), nbytes, self.name)


def torchao_config(case: KernelCase) -> object:
    """Its int4 configuration for a device, whichever module it is in."""
    options = {"group_size": case.group_size, "set_inductor_config": False}
    stable = import_module("torchao.quantization").Int4WeightOnlyConfig
    if torch.device(case.device).type == "cuda":
        tiled = {"int4_packing_format": "tile_packed_to_4d", "int4_choose_qparams_algorithm": "hqq"}
        return stable(**options, **tiled)
    try:  # since 0.18 the packing for a CPU has a configuration of its own
        own = import_module("torchao.prototype.quantization.int4").PrototypeInt4WeightOnlyConfig
    except ImportError:
        return stable(**options, int4_packing_format="opaque")
    return own(**options)


class Humming:
    """Humming's kernels, compiled at first use, with the settings it chooses for each m."""

    name = "humming"
    note = "integer grid"

    def missing(self) -> str | None:
        """See ``Peer``."""
        return missing("humming", gpu=True, package="humming-kernels")

    def unsupported(self, case: KernelCase) -> str | None:
        """See ``Peer``."""
        bits = tuple(range(1, 9))
        return needs(case, device="cuda", bits=bits, dtypes=("bf16", "fp16"))

    def prepare(self, case: KernelCase, copies: int | None = None) -> Prepared:
        """See ``Peer``."""
        humming = import_module("humming.layer")
        config = {"dtype": f"int{case.bits}", "group_size": case.group_size}
        nbytes = case.n * case.k * case.bits // 8 + case.n * case.k // case.group_size * 2
        generator = torch.Generator(case.device).manual_seed(0)
        W = torch.randn(case.n, case.k, device=case.device, generator=generator) / case.k**0.5
        layer = humming.HummingLayer(
            shape_n=case.n, shape_k=case.k, weight_config=config, torch_dtype=case.torch_dtype
        ).to(case.device)
        schema = layer.weight_schema
        tensors = schema.quant_tensor(W.to(case.torch_dtype), schema, case.torch_dtype)
        dequantised = schema.dequant_tensors(tensors)
        layer.load_from_tensors(tensors)
        layer.transform()
        layers = copied(layer, copies_of(case, nbytes, copies))
        return Prepared(layers, dequantised.to, nbytes, self.name, extra_error=HUMMING_ERROR)


def decoded(layer: nn.Module, case: KernelCase, dtype: torch.dtype) -> Tensor:
    """The weight of a layer that cannot tell it: its answers to one-hot x."""
    rows = []
    for start in range(0, case.k, 256):
        x = torch.zeros(
            min(256, case.k - start), case.k, dtype=case.torch_dtype, device=case.device
        )
        x[range(len(x)), range(start, start + len(x))] = 1
        with torch.inference_mode():
            rows.append(layer(x).to(dtype))
    return torch.cat(rows).T.contiguous()


def missing(module: str, *, gpu: bool = False, package: str | None = None) -> str | None:
    """What has to be installed for a peer, or None."""
    if gpu and not torch.cuda.is_available():
        return "needs an NVIDIA GPU: torch finds none"
    # Found, not imported: importing some takes seconds and prints.
    return None if util.find_spec(module) else f"pip install {package or module}"
