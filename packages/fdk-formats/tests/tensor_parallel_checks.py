"""Quantised layers under tensor parallelism against unsharded ones, on CPUs and on GPUs.

Each function runs in all processes of a mesh, with the same seeds.
"""

import copy
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fdk_formats import QuantisedLinear, quantise_model

K, HIDDEN = 64, 256


def has_integer_fsdp():
    """Returns whether FSDP2 shards parameters of integers: torch 2.13 does, 2.11 does not."""
    return tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)


class MLP(nn.Module):
    """The MLP of a llama, with biases."""

    def __init__(self, k: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(k, hidden), nn.Linear(k, hidden)
        self.down = nn.Linear(hidden, k)

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


PLAN = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}


@dataclass(frozen=True)
class Case:
    """A format on a backend, with the sizes of layers and the rounding to allow for."""

    format: str
    backend: str = "reference"
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    k: int = K
    hidden: int = HIDDEN
    tolerance: float = 1e-5

    @cached_property
    def x(self) -> torch.Tensor:
        return self.random(3, self.k)

    def random(self, *shape: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1)
        return torch.randn(shape, generator=generator).to(self.device, self.dtype)

    def layer(self, k: int, n: int, bias: bool = True) -> QuantisedLinear:
        return copy.deepcopy(_layer(self, k, n, bias))

    def blocks(self, seed: int = 0) -> nn.Module:
        return copy.deepcopy(_blocks(self, seed))

    def close(self, found: torch.Tensor, wanted: torch.Tensor) -> None:
        """Compares with a bound relative to the largest value: sums are split differently."""
        error, bound = (found - wanted).abs().max(), self.tolerance * wanted.abs().max()
        assert error <= bound, (error.item(), bound.item())


@cache
def _layer(case: Case, k: int, n: int, bias: bool) -> QuantisedLinear:
    torch.manual_seed(0)
    source = nn.Linear(k, n, bias=bias).to(case.device, case.dtype)
    return QuantisedLinear.from_linear(source, case.format, backend=case.backend)


@cache
def _blocks(case: Case, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    source = nn.Sequential(MLP(case.k, case.hidden), MLP(case.k, case.hidden))
    return quantise_model(
        source.to(case.device, case.dtype), case.format, backend=case.backend, progress=False
    )


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def parallel_blocks(mesh: DeviceMesh, made: nn.Module) -> nn.Module:
    for block in made:
        parallelize_module(block, mesh, PLAN)
    return made


def assert_same_step(case, made, plain, x, steps=2):
    """Compares outputs and gradients of two modules, at the first and at later calls."""
    for _ in range(steps):
        given = [x.clone().requires_grad_() for _ in range(2)]
        found, wanted = (module(own) for module, own in zip((made, plain), given, strict=True))
        case.close(full(found), wanted)
        for y in (full(found), wanted):
            y.square().sum().backward()
        case.close(given[0].grad, given[1].grad)
        own, others = (
            {name: full(p.grad) for name, p in module.named_parameters() if p.grad is not None}
            for module in (made, plain)
        )
        assert own.keys() == others.keys()
        assert all("bias" in name for name in own)
        for name, gradient in own.items():
            case.close(gradient, others[name])


def assert_same_weight(made: QuantisedLinear, plain: QuantisedLinear) -> None:
    wanted = plain.quantised.tensors()
    for name, tensor in made.quantised.tensors().items():
        assert torch.equal(tensor, wanted[name]), name
    assert torch.equal(made.dequantise(), plain.dequantise())


def check_columns(case, mesh, n=None):
    """ColwiseParallel, with and without a bias."""
    n = case.hidden if n is None else n
    for bias in (True, False):
        made, plain = case.layer(case.k, n, bias), case.layer(case.k, n, bias)
        parallelize_module(made, mesh, ColwiseParallel(output_layouts=Replicate()))
        assert_same_step(case, made, plain, case.x)
        assert_same_weight(made, plain)


def check_rows(case, mesh):
    """RowwiseParallel, with and without a bias."""
    x = case.random(3, case.hidden)
    for bias in (True, False):
        made, plain = (case.layer(case.hidden, case.k, bias) for _ in range(2))
        parallelize_module(made, mesh, RowwiseParallel(input_layouts=Replicate()))
        assert_same_step(case, made, plain, x)
        assert_same_weight(made, plain)


def check_blocks(case, mesh):
    """Whole MLPs, twice, each with one sum over the processes."""
    made, plain = parallel_blocks(mesh, case.blocks()), case.blocks()
    assert_same_step(case, made, plain, case.x)
    for block, other in zip(made, plain, strict=True):
        for name in PLAN:
            assert_same_weight(getattr(block, name), getattr(other, name))


def check_memory(case, mesh):
    """Each process holds its part of codes, scales and biases, and the codebook."""
    made, plain = parallel_blocks(mesh, case.blocks()), case.blocks()
    for is_called in (False, True):
        if is_called:
            made(case.x)
        local = whole = replicated = 0
        for (name, p), (_, q) in zip(
            made.named_parameters(), plain.named_parameters(), strict=True
        ):
            assert isinstance(p, DTensor)
            local, whole = local + p.to_local().nbytes, whole + q.nbytes
            if p.placements[0].is_replicate():
                is_row_scale = q.ndim == 2 and q.shape[1] == 1 and "down" in name
                assert name.endswith("codebook") or name.endswith("down.bias") or is_row_scale
                replicated += q.nbytes
        assert local == (whole - replicated) // mesh.size() + replicated
        assert local < 1.2 * whole / mesh.size() + replicated
