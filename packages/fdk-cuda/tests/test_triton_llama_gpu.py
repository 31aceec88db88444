"""A small llama of Triton layers: compiled as a whole, exported, trained."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

pytest.importorskip("triton", reason="Triton is not installed")

from fdk_formats import quantise_model
from fdk_formats.testing import nrmse

pytestmark = [
    pytest.mark.gpu,
    # torch 2.11 raises a deprecation warning when Inductor is first imported.
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*"),
    pytest.mark.filterwarnings("ignore:.*TensorFloat32:UserWarning"),
    # torch 2.11 warns for every softmax over a dynamic number of columns; 2.13 does not.
    pytest.mark.filterwarnings(r"ignore:\s*Online softmax is disabled:UserWarning"),
]

HEAD = 32


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    """Resets the compiler, which otherwise remembers that m was dynamic in another test."""
    torch.compiler.reset()


class Block(nn.Module):
    """Attention and a gated feed-forward layer, each after a norm."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``x :: [tokens, width]``."""
        h = self.norms[0](x)
        q, k, v = (
            part(h).unflatten(-1, (-1, HEAD)).transpose(0, 1) for part in (self.q, self.k, self.v)
        )
        attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(attended.transpose(0, 1).flatten(1))
        h = self.norms[1](x)
        return x + self.down(silu(self.gate(h)) * self.up(h))


class SmallLlama(nn.Module):
    """Two blocks between an embedding and a head."""

    def __init__(self, width: int = 128, vocabulary: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*(Block(width, 2 * width) for _ in range(2)))
        self.norm = nn.RMSNorm(width)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """``tokens :: [m, int64]`` to logits ``[m, vocabulary]``."""
        return self.lm_head(self.norm(self.blocks(self.embed(tokens))))


def small_llama(device: str, dtype: torch.dtype) -> SmallLlama:
    """Makes a llama with weights of seed 0."""
    torch.manual_seed(0)
    return SmallLlama().to(device, dtype)


def quantised(format: str) -> nn.Module:
    model = small_llama("cuda", torch.bfloat16)
    return quantise_model(model, format, backend="triton", progress=False)


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@pytest.mark.parametrize("format", ["nf4-g64", "affine3-g32"])
def test_compiles_without_recompiling_over_m(format: str, compiler: str) -> None:
    model = quantised(format)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=compiler)
    tokens = torch.randint(64, (200,), device="cuda")
    errors = {}
    with torch.no_grad():
        compiled(tokens[:3])
        with torch.compiler.set_stance("fail_on_recompile"):
            for m in (2, 5, 16, 17, 64, 200):
                y, expected = compiled(tokens[:m]), model(tokens[:m])
                # Inductor keeps float32 between fused operations where eager rounds to bf16.
                errors[m] = nrmse(y, expected.double())
    assert max(errors.values()) < 0.02, errors


def test_exports() -> None:
    model = quantised("nf4-g64")
    tokens = torch.randint(64, (5,), device="cuda")
    m = torch.export.Dim("m", min=2, max=512)
    program = torch.export.export(model, (tokens,), dynamic_shapes=({0: m},))
    targets = [str(node.target) for node in program.graph.nodes]
    assert targets.count("fdk_cuda.triton_linear.default") == 14
    with torch.no_grad():
        for rows in (2, 40):
            tokens = torch.randint(64, (rows,), device="cuda")
            assert torch.equal(program.module()(tokens), model(tokens))


class Adapted(nn.Module):
    """A frozen quantised layer plus a low-rank product."""

    def __init__(self, base: nn.Module, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(inputs, 4, bias=False, device="cuda", dtype=torch.bfloat16)
        self.up = nn.Linear(4, outputs, bias=False, device="cuda", dtype=torch.bfloat16)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x :: [..., inputs]``."""
        return self.base(x) + self.up(self.down(x))


@pytest.mark.parametrize("compiler", [None, "aot_eager", "inductor"])
def test_low_rank_adapters_train(compiler: str | None) -> None:
    model = quantised("nf4-g64").requires_grad_(False)
    for block in model.blocks:
        for name in ("q", "v", "down"):
            base = getattr(block, name)
            setattr(block, name, Adapted(base, base.in_features, base.out_features))
    adapters = [p for p in model.parameters() if p.requires_grad]
    assert len(adapters) == 12
    run = torch.compile(model, fullgraph=True, backend=compiler) if compiler else model
    text = torch.arange(49, device="cuda") % 7  # predictable once learnt
    optimiser = torch.optim.Adam(adapters, lr=1e-2)
    losses = []
    for _ in range(40):
        loss = nn.functional.cross_entropy(run(text[:-1]).float(), text[1:])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0], losses
