"""fdk's kernels between those of Inductor, which start early with ``triton.enable_pdl``."""

from collections.abc import Callable

import pytest
import torch
from marlin_cases import ON_HOPPER
from torch import Tensor, nn

from fdk_cuda.inductor import start_kernels_early
from fdk_formats import Format, QuantisedLinear
from fdk_formats.testing import random_quantised

pytestmark = ON_HOPPER

HIDDEN, INNER, BLOCKS = 1024, 2048, 6


class Block(nn.Module):
    """A norm, a gated MLP and a residual, as in a llama."""

    def __init__(self, format: str, seed: int) -> None:
        super().__init__()
        shapes = (2 * INNER, HIDDEN), (HIDDEN, INNER)
        weights = [random_quantised(Format.parse(format), *nk, seed=seed) for nk in shapes]
        self.gate_up, self.down = (QuantisedLinear.from_quantised(q.to("cuda")) for q in weights)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(nn.functional.rms_norm(x, (HIDDEN,))).chunk(2, -1)
        return x + self.down(nn.functional.silu(gate) * up)


class SeparateProducts(nn.Module):
    """A norm, three products of its result, two of them small, and a kernel that reads all."""

    def __init__(self, format: str, seed: int) -> None:
        super().__init__()
        shapes = (HIDDEN, HIDDEN), (64, HIDDEN), (64, HIDDEN)
        weights = [random_quantised(Format.parse(format), *nk, seed=seed) for nk in shapes]
        self.layers = nn.ModuleList(QuantisedLinear.from_quantised(q.to("cuda")) for q in weights)

    def forward(self, x: Tensor) -> Tensor:
        h = nn.functional.rms_norm(x, (HIDDEN,))
        q, k, v = (layer(h) for layer in self.layers)
        return x + q * (1 + k.repeat(1, HIDDEN // 64) * v.repeat(1, HIDDEN // 64))


# torch 2.11 raises a deprecation warning when Inductor is first imported.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*")
@pytest.mark.parametrize("block", [Block, SeparateProducts])
@pytest.mark.parametrize("rows", [1, 16, 64])
@pytest.mark.parametrize("format", ["custom4-g64", "int1-g64"])
def test_same_bits(format: str, rows: int, block: Callable[[str, int], nn.Module]) -> None:
    """Captured graphs give the same bits whether or not kernels start early, every time."""
    assert start_kernels_early()
    blocks = nn.Sequential(*(block(format, seed) for seed in range(BLOCKS)))
    x = torch.randn(rows, HIDDEN, device="cuda", dtype=torch.bfloat16)

    def replays(enable_pdl: bool, count: int) -> list[Tensor]:
        torch.compiler.reset()
        options = {"triton.enable_pdl": enable_pdl}
        compiled = torch.compile(blocks, fullgraph=True, options=options)
        for _ in range(3):
            compiled(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = compiled(x)
        found = []
        for _ in range(count):
            y.zero_()
            graph.replay()
            found.append(y.clone())
        torch.cuda.synchronize()
        return found

    with torch.no_grad():
        wanted = replays(False, 1)[0]
        assert wanted.isfinite().all()
        assert all(torch.equal(y, wanted) for y in replays(True, 200))
