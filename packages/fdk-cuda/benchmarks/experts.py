"""Time the MLP of mixture-of-experts layers on packed bytes, against bf16.

    python packages/fdk-cuda/benchmarks/experts.py --bits 4 --tokens 1,16,64 [--out rows.jsonl]
    python packages/fdk-cuda/benchmarks/experts.py --models qwen3-30b-a3b --affine

Microseconds per call of gate and up, SwiGLU, down and the weighted sum; router not included. `fdk`
is what a layer runs. On Hopper that is the Marlin layout: `triton_layout` is the same from stacks
in the Triton layout, and `few` and `many` force one of its kernels, where the mean rows of an
expert make it worth timing. Median of graph replays in turns with the same MLP in bf16:
torch's grouped product, fdk's own grouped Triton kernel with a plain configuration, and, where vLLM
is installed, its fused_experts in bf16 and its Marlin kernel at 4 bits (random codes, whose answers
are not checked). Every call has other random experts, and stacks are copied until they exceed the
L2. `floor` is the larger of reading the experts hit once and of the arithmetic at the rate of
cuBLAS (H200). Each case is first checked against float64, on some of its tokens.
"""

import copy
import importlib.util
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import mean

import torch
from _timing import (
    COLD_BYTES,
    FLOPS_PER_MICROSECOND,
    Row,
    argument_parser,
    check,
    graph_times,
    has_gpu,
    integers,
    read_floor,
    write_rows,
)
from torch import Tensor
from torch.nn.functional import grouped_mm, silu

from fdk_cuda.marlin import expert_ops
from fdk_cuda.marlin.heuristics_experts import TILE_ROWS
from fdk_cuda.triton import TritonBackend
from fdk_cuda.triton.configs import GemmConfig
from fdk_cuda.triton.configs.experts import ExpertConfig
from fdk_cuda.triton.expert_launch import (
    MATMUL_ROWS,
    expert_reduce,
    grouped_matmul,
    route,
)
from fdk_cuda.triton.expert_layout import TritonExpertLayout
from fdk_formats import ExpertLayout, Format, QuantisedStack

GROUP_SIZE = 64
LIMIT = 1e-2
# Mean rows of an expert for which a kernel of the Marlin layout is timed.
FORCED = {"few": (0.2, 16), "many": (1.5, 1 << 30)}
CHECKED_TOKENS = 8
CALLS = 20  # of a graph
Run = Callable[[int], Tensor]


@dataclass(frozen=True)
class Model:
    """The experts of a model's layer."""

    name: str
    experts: int
    top_k: int
    hidden: int
    inner: int


MODELS = {
    model.name: model
    for model in (
        Model("mixtral-8x7b", 8, 2, 4096, 14336),
        Model("qwen3-30b-a3b", 128, 8, 2048, 768),
        Model("deepseek-v2-lite", 64, 6, 2048, 1408),
    )
}


def random_stack(format: Format, experts: int, n: int, k: int, seed: int) -> QuantisedStack:
    """Make random codes, scales and codebooks or zero points on the GPU."""
    generator = torch.Generator("cuda").manual_seed(seed)
    groups = experts, n, k // GROUP_SIZE
    codebook = zero_point = None
    if format.is_affine:
        zero_point = torch.randint(1 << format.bits, groups, device="cuda", generator=generator)
        zero_point = zero_point.to(torch.uint8)
    else:
        values = torch.randn(experts, 1 << format.bits, device="cuda", generator=generator)
        codebook = values.sort().values
    packed = torch.randint(
        256,
        (experts, n, k * format.bits // 8),
        dtype=torch.uint8,
        device="cuda",
        generator=generator,
    )
    # Values of about k ** -0.5, so that results of both products are of the size of x.
    spread = (0.5 + torch.rand(groups, device="cuda", generator=generator)) / k**0.5
    if format.is_affine:
        spread /= 1 << (format.bits - 1)
    return QuantisedStack(format, (experts, n, k), packed, spread.bfloat16(), codebook, zero_point)


class Layer:
    """The two stacks of a layer, packed, and dequantised to bf16.

    Attributes:
        copies: packed gate-up and down stacks that together exceed the L2.
        triton: the same in the Triton layout where ``copies`` are in the Marlin layout, else empty.
        nbytes: bytes of an expert, as stored in a file.
        dense: both stacks in bf16, ``[experts, n, k]``.
    """

    def __init__(self, model: Model, format: Format) -> None:
        shapes = (2 * model.inner, model.hidden), (model.hidden, model.inner)
        stacks = [
            random_stack(format, model.experts, *shape, seed) for seed, shape in enumerate(shapes)
        ]
        total = sum(tensor.nbytes for stack in stacks for tensor in stack.tensors().values())
        self.nbytes = total / model.experts

        def copies_of(packed: list[ExpertLayout]) -> list[list[ExpertLayout]]:
            more = int(COLD_BYTES // total)
            return [packed, *(copy.deepcopy(packed) for _ in range(more))]

        backend = TritonBackend()
        packed = [backend.pack_stack(stack, dtype=torch.bfloat16) for stack in stacks]
        self.copies, self.triton = copies_of(packed), []
        if not isinstance(packed[0], TritonExpertLayout):
            self.triton = copies_of([TritonExpertLayout(stack) for stack in stacks])
        self.dense = [stack.dequantise(torch.bfloat16) for stack in stacks]


@dataclass(frozen=True)
class Inputs:
    """Inputs of one call."""

    x: Tensor
    ids: Tensor
    weights: Tensor

    @classmethod
    def random(cls, model: Model, tokens: int, seed: int) -> "Inputs":
        """Draw inputs; experts of a token are distinct."""
        generator = torch.Generator("cuda").manual_seed(seed)
        shape = tokens, model.experts
        scores = torch.randn(shape, device="cuda", generator=generator)
        weights, ids = scores.softmax(1).topk(model.top_k)
        x = torch.randn(tokens, model.hidden, device="cuda", generator=generator)
        return cls(x.bfloat16(), ids.int(), weights / weights.sum(1, keepdim=True))


def exact(layer: Layer, given: Inputs) -> Tensor:
    """Compute the first tokens' results in float64."""
    rows = []
    gate_up, down = layer.dense
    few = slice(CHECKED_TOKENS)
    for x, ids, weights in zip(given.x[few], given.ids[few], given.weights[few], strict=True):
        total = torch.zeros(down.shape[1], dtype=torch.float64, device="cuda")
        for expert, weight in zip(ids.tolist(), weights.double(), strict=True):
            gate, up = (gate_up[expert].double() @ x.double()).chunk(2)
            total += weight * (down[expert].double() @ (silu(gate) * up))
        rows.append(total)
    return torch.stack(rows)


def torch_grouped(layer: Layer, given: Inputs) -> Tensor:
    """Compute the MLP by torch's grouped product, without synchronising."""
    gate_up, down = layer.dense
    tokens, top_k = given.ids.shape
    flat = given.ids.flatten()
    experts = torch.arange(len(gate_up), device=flat.device, dtype=flat.dtype)
    ends = (flat[:, None] == experts).sum(0).cumsum(0).int()
    order = flat.argsort(stable=True)
    gate, up = grouped_mm(given.x[order // top_k], gate_up.mT, offs=ends).chunk(2, -1)
    y = grouped_mm(silu(gate) * up, down.mT, offs=ends)
    pairs = torch.empty_like(y).index_copy_(0, order, y).view(tokens, top_k, -1)
    return (pairs * given.weights[..., None]).sum(1).bfloat16()


def triton_grouped(layer: Layer, given: Inputs) -> Tensor:
    """Compute the MLP by fdk's grouped product of 16-bit stacks."""
    gate_up, down = layer.dense
    pairs = given.ids.numel()
    config = ExpertConfig(GemmConfig(1, 4, MATMUL_ROWS), MATMUL_ROWS)
    routing = route(given.ids, len(gate_up), config, zeros=False)
    both = given.x.new_empty(pairs, gate_up.shape[1])
    grouped_matmul(given.x, gate_up.mT, routing, both)
    gate, up = both.chunk(2, -1)
    y = given.x.new_empty(pairs, down.shape[1])
    grouped_matmul(silu(gate) * up, down.mT, routing, y)
    return expert_reduce(y.float() * given.weights.view(-1, 1), routing, torch.bfloat16)


def vllm_marlin(model: Model) -> Callable[[Layer, Inputs], Tensor]:
    """Make the MLP of vLLM's Marlin kernel, on random codes of 4 bits."""
    from vllm import _custom_ops
    from vllm.model_executor.layers.fused_moe.experts.marlin_moe import fused_marlin_moe
    from vllm.model_executor.layers.quantization.utils.marlin_utils import marlin_make_workspace_new
    from vllm.scalar_type import scalar_types

    generator = torch.Generator("cuda").manual_seed(0)

    def stack(n: int, k: int) -> tuple[Tensor, Tensor]:
        most = torch.iinfo(torch.int32).max
        shape = model.experts, k // 16, 2 * n
        codes = torch.randint(most, shape, dtype=torch.int32, device="cuda", generator=generator)
        scale = torch.rand(model.experts, k // GROUP_SIZE, n, device="cuda", generator=generator)
        return codes, (scale / (8 * k**0.5)).bfloat16()

    gate_up, gate_up_scale = stack(2 * model.inner, model.hidden)
    down, down_scale = stack(model.hidden, model.inner)
    workspace = marlin_make_workspace_new(torch.device("cuda", torch.cuda.current_device()), 4)

    def marlin_experts(layer: Layer, given: Inputs) -> Tensor:
        y = torch.empty_like(given.x)
        fused_marlin_moe(
            given.x,
            *(gate_up, down, None, None, gate_up_scale, down_scale),
            *(given.weights, given.ids, scalar_types.uint4b8.id),
            global_num_experts=model.experts,
            moe_sum=_custom_ops.moe_sum,
            workspace=workspace,
            output=y,
        )
        return y

    return marlin_experts


def peers() -> dict[str, Callable[[Layer, Inputs], Tensor]]:
    """List the bf16 MLPs to compare with."""
    found = {"torch": torch_grouped, "triton": triton_grouped}
    try:
        from vllm.model_executor.layers.fused_moe import fused_experts
    except ImportError:
        print("vLLM is not installed: its kernel is left out")
        return found

    def vllm_experts(layer: Layer, given: Inputs) -> Tensor:
        y: Tensor = fused_experts(given.x, *layer.dense, given.weights, given.ids)
        return y

    return found | {"vllm": vllm_experts}


@contextmanager
def tile_rows_of(rows: int | None) -> Iterator[None]:
    """Set the rows of a tile of the Marlin layout's kernel; None for the kernel for many rows."""
    before = expert_ops.tile_rows
    expert_ops.tile_rows = lambda tokens, top_k, experts: rows
    expert_ops._config.cache_clear()
    try:
        yield
    finally:
        expert_ops.tile_rows = before
        expert_ops._config.cache_clear()


def forced_ways(ours: Run, model: Model, tokens: int) -> dict[str, Run]:
    """List the kernels of the Marlin layout worth timing, each forced."""

    def way(name: str) -> Run:
        def run(i: int) -> Tensor:
            with tile_rows_of(TILE_ROWS if name == "few" else None):
                return ours(i)

        return run

    mean_rows = tokens * model.top_k / model.experts
    return {
        name: way(name)
        for name, (least, most) in FORCED.items()
        if tokens > 1 and least <= mean_rows <= most
    }


def time_case(
    model: Model,
    layer: Layer,
    tokens: int,
    marlin: Callable[[Layer, Inputs], Tensor] | None,
) -> Iterator[Row]:
    """Yield the row of one number of tokens."""
    inputs = [Inputs.random(model, tokens, seed) for seed in range(CALLS)]

    def mlp_of(copies: list[list[ExpertLayout]]) -> Run:
        def run(i: int) -> Tensor:
            gate_up, down = copies[i % len(copies)]
            given = inputs[i]
            return gate_up.mlp(down, given.x, given.ids, given.weights)

        return run

    ours = mlp_of(layer.copies)
    runs = {"fdk": ours}
    if layer.triton:
        runs |= {"triton_layout": mlp_of(layer.triton), **forced_ways(ours, model, tokens)}
    for name, peer in peers().items():
        runs[name] = lambda i, peer=peer: peer(layer, inputs[i])
    oracle = exact(layer, inputs[0])
    for name, run in runs.items():
        check(run(0)[:CHECKED_TOKENS], oracle, f"{name} {model} {tokens}", limit=LIMIT)
    if marlin is not None:
        runs["marlin"] = lambda i, peer=marlin: peer(layer, inputs[i])
    times = graph_times(list(runs.values()), CALLS)
    hit = mean(len(given.ids.unique()) for given in inputs)
    flops = 6 * tokens * model.top_k * model.hidden * model.inner
    moved = hit * layer.nbytes + 2 * inputs[0].x.nbytes
    floor = max(read_floor(int(moved)), flops / FLOPS_PER_MICROSECOND)
    row = asdict(model) | {"format": str(layer.copies[0][0].format), "tokens": tokens, "hit": hit}
    yield row | {"floor": floor} | dict(zip(runs, times, strict=True))


def line_of(row: Row) -> str:
    """Format a row."""
    us, floor = row["fdk"], row["floor"]
    case = f"{row['name']:16} {row['format']:14} t{row['tokens']:<5} hit {row['hit']:5.1f}"
    names = [name for name in ("torch", "triton", "vllm", "marlin") if name in row]
    others = ", ".join(f"{name} {row[name]:.1f} ({us / row[name]:.2f})" for name in names)
    own = (name for name in ("triton_layout", *FORCED) if name in row)
    ways = ", ".join(f"{name} {row[name]:.1f}" for name in own)
    return f"{case} {us:8.1f} us, floor {floor:.1f} ({us / floor:.2f}), {ways}, peers: {others}"


def main() -> None:
    """Read the command line, then check and time every case."""
    parser = argument_parser(__doc__)
    parser.add_argument("--models", default=",".join(MODELS), help="names, with commas")
    parser.add_argument("--tokens", type=integers, default="1,4,16,64,512,4096")
    parser.add_argument("--bits", type=integers, default="4")
    parser.add_argument("--affine", action="store_true", help="zero points, no codebook")
    args = parser.parse_args()
    if not has_gpu():
        return

    def rows() -> Iterator[Row]:
        for name, bits in itertools.product(args.models.split(","), args.bits):
            kind = "affine" if args.affine else "custom"
            zeros = {"zero_point": "int"} if args.affine else {}
            layer = Layer(MODELS[name], Format(kind, bits, GROUP_SIZE, **zeros))
            has_marlin = bits == 4 and importlib.util.find_spec("vllm") is not None
            marlin = vllm_marlin(MODELS[name]) if has_marlin else None
            for tokens in args.tokens:
                with torch.no_grad():
                    yield from time_case(MODELS[name], layer, tokens, marlin)

    write_rows(args.out, rows(), line_of)


if __name__ == "__main__":
    main()
