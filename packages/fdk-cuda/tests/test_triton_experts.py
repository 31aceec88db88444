"""The Triton kernels for stacks of experts: compiled for GPU generations, and run."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from triton_cases import DTYPES
from triton_compile import (
    MAX_STACK,
    TARGETS,
    check_not_serialised,
    check_stack,
    check_warp_reduction,
    compile_expert_gemm,
    compile_expert_gemv,
    compile_kernel,
    layout_of,
    registers_and_stack,
    static_bytes,
)

from fdk_cuda.triton import TritonBackend, launch
from fdk_cuda.triton.configs import GPUS, H200, GemmConfig, GemvConfig
from fdk_cuda.triton.configs.experts import (
    ExpertConfig,
    expert_config,
    fits_swiglu,
    max_gemv_tokens,
)
from fdk_cuda.triton.configs.gpus import STATIC_SMEM_BYTES
from fdk_cuda.triton.expert_layout import TritonExpertLayout
from fdk_cuda.triton.expert_ops import triton_expert_linear_op
from fdk_cuda.triton.kernels.expert_sort import sort_kernel
from fdk_formats import Format, Problem, QuantisedStack, unsupported_reasons
from fdk_formats.testing import (
    ExpertCase,
    check_expert_backend,
    check_expert_numerics,
    expert_cases,
)

EXPERTS, TOP_K = 128, 8  # of Qwen3-30B-A3B
# Tokens of one tile per pair, of sorted tiles of 8 and 16 rows, and of the GEMM.
TOKENS = (1, 32, 128, 1024)


def config_of(
    bits: int, tokens: int, target: int, *, affine: bool, swiglu: bool = False
) -> ExpertConfig:
    n, k = (1536, 2048) if swiglu else (2048, 768)
    gpu = GPUS[divmod(target, 10)]
    sizes = layout_of(bits, n, k), tokens, TOP_K, EXPERTS, gpu
    return expert_config(*sizes, affine=affine, swiglu=swiglu)


def compile_config(
    bits: int, tokens: int, target: int, *, affine: bool, swiglu: bool = False
) -> tuple[object, ExpertConfig]:
    n, k = (1536, 2048) if swiglu else (2048, 768)
    config = config_of(bits, tokens, target, affine=affine, swiglu=swiglu)
    is_gemv = isinstance(config.kernel, GemvConfig)
    compile_one = compile_expert_gemv if is_gemv else compile_expert_gemm
    made = compile_one(layout_of(bits, n, k), config, target, affine=affine, swiglu=swiglu)
    return made, config


@pytest.mark.parametrize("swiglu", [False, True])
@pytest.mark.parametrize(
    ("bits", "affine", "target", "tokens"),
    [
        *((4, False, 90, tokens) for tokens in TOKENS),
        (4, False, 120, 1024),
        (1, False, 90, 32),
        (2, True, 90, 1024),
        (3, False, 90, 128),
        (8, True, 80, 128),
    ],
)
def test_spills_nothing(bits: int, affine: bool, target: int, tokens: int, swiglu: bool) -> None:
    """Sums of warps stay in registers, and wgmmas in flight, as in the kernels of one weight."""
    made, config = compile_config(bits, tokens, target, affine=affine, swiglu=swiglu)
    check_stack(made)
    used = made.metadata.shared + static_bytes(made)
    if isinstance(config.kernel, GemvConfig):
        check_warp_reduction(made)
        assert used <= STATIC_SMEM_BYTES
    else:
        assert used <= TARGETS[target]
        if target == 90:
            assert "wgmma.mma_async" in made.asm["ptx"]
            check_not_serialised(made)


@pytest.mark.parametrize("one_block", [True, False])
@pytest.mark.parametrize("target", [80, 90])
def test_sort_spills_nothing(target: int, one_block: bool) -> None:
    arguments = {
        "BINS": 256,
        "BLOCK": 256,
        "ROWS": 8,
        "ONE_BLOCK": one_block,
        "ZEROS": False,
        "OVERLAP": target >= 90,
        "WARPS": 8,
    }
    made = compile_kernel(sort_kernel, target, layout_of(4), False, arguments)
    assert registers_and_stack(made)[1] <= MAX_STACK


@pytest.mark.parametrize("pairs", [1, 7, 512, 32768])
@pytest.mark.parametrize("experts", [1, 8, 128])
@pytest.mark.parametrize("rows", [8, 16, 128])
def test_tiles_are_bounded(pairs: int, experts: int, rows: int) -> None:
    """No spread of pairs over experts has more tiles, and one has as many, or nearly."""
    bound = ExpertConfig(GemvConfig(1, 4), rows).max_tiles(pairs, experts)
    # The worst: one pair for most experts, and the rest for one.
    singles = min(pairs, experts + 1) - 1
    assert bound >= singles + -(-(pairs - singles) // rows)
    for spread in range(1, min(pairs, experts + 1) + 1):
        counts = [pairs // spread + (i < pairs % spread) for i in range(spread)]
        assert sum(-(-count // rows) for count in counts) <= bound
    assert bound <= pairs


def test_kernels_by_tokens() -> None:
    """A tile per pair, then sorted tiles of 8 and 16 rows, then the GEMM."""
    configs = [config_of(4, tokens, 90, affine=False) for tokens in TOKENS]
    assert [config.is_sorted for config in configs] == [False, True, True, True]
    assert [config.rows for config in configs[:3]] == [8, 8, 16]
    assert [isinstance(config.kernel, GemmConfig) for config in configs] == [False] * 3 + [True]
    # Where offsets or tiles would not fit the GEMV, the GEMM runs.
    layout = layout_of(4, 2048, 768)
    most = max_gemv_tokens(layout, 1)
    for tokens, kind in ((most, GemvConfig), (most + 1, GemmConfig)):
        config = expert_config(layout, tokens, 1, 1 << 20, H200)
        assert isinstance(config.kernel, kind)


@pytest.mark.parametrize(
    ("bits", "n", "fits"), [(4, 1536, True), (4, 48, False), (5, 1536, False), (3, 64, True)]
)
def test_fits_swiglu(bits: int, n: int, fits: bool) -> None:
    assert fits_swiglu(layout_of(bits, n, 64)) == fits


def test_stacks_are_for_triton() -> None:
    """The Marlin backends refuse stacks; Triton's reasons are those for one weight."""
    device = torch.device("cuda")
    problem = Problem(Format.parse("int4-g64"), 64, 64, torch.float64, device, "int8", experts=8)
    reasons = unsupported_reasons(problem)
    for name in ("marlin", "marlin-lut"):
        assert reasons[name] == "has no kernels for stacks of experts"
    assert str(reasons["triton"]).startswith("has no int8 activations; needs activations of torch.")


class TritonStacks(TritonBackend):
    """Packs stacks in the Triton layout on Hopper too."""

    def pack_stack(
        self, stack: QuantisedStack, *, dtype: torch.dtype, activations: str = "float"
    ) -> TritonExpertLayout:
        return TritonExpertLayout(stack)


GPU_CASES = list(expert_cases(dtypes=DTYPES, device="cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_conformance(case: ExpertCase) -> None:
    check_expert_backend(TritonStacks(), case)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 16, 64])
def test_batch_invariant(tokens: int) -> None:
    case = mlp_case("custom4-g64", 64, 192, 256)
    layout = TritonBackend(batch_invariant=True).pack_stack(case.stack(), dtype=case.dtype)
    x, ids = case.random(64, 256), case.expert_ids()
    whole = layout(x, ids)
    assert torch.equal(layout(x[:tokens], ids[:tokens]), whole[:tokens])
    assert torch.equal(layout(x[-tokens:], ids[-tokens:]), whole[-tokens:])


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 4, 16, 64, 512, 2048])
@pytest.mark.parametrize("top_k", [1, 2, 8])
@pytest.mark.parametrize("format", ["custom4-g64", "custom1-g64", "custom3-g32", "affine4-g128"])
def test_every_number_of_tokens(format: str, top_k: int, tokens: int) -> None:
    """Every kernel, with experts of few tiles of outputs and inputs."""
    sizes = 16, tokens, top_k, 320, 384, torch.bfloat16
    for routing in ("random", "one", "elsewhere"):
        case = ExpertCase(Format.parse(format), *sizes, routing, device="cuda")
        check_expert_numerics(TritonStacks(), case)


def mlp_case(format: str, tokens: int, n: int, k: int) -> ExpertCase:
    return ExpertCase(Format.parse(format), 32, tokens, 4, n, k, torch.bfloat16, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 4, 16, 64, 512])
@pytest.mark.parametrize("format", ["custom4-g64", "custom2-g64", "affine3-g64", "affine8-g64"])
def test_mlp(format: str, tokens: int) -> None:
    """Close to the two products, the same bits twice, in a graph, and without synchronising."""
    first, second = mlp_case(format, tokens, 512, 384), mlp_case(format, tokens, 384, 256)
    up = TritonExpertLayout(first.stack())
    down = TritonExpertLayout(second.stack())
    x, ids = first.random(tokens, 384), first.expert_ids()
    weights = first.random(*ids.shape, dtype=torch.float32).softmax(1)
    composed = up.mlp(down, x.clone().requires_grad_(), ids, weights).detach()
    with torch.no_grad():
        y = up.mlp(down, x, ids, weights)
        error = (y.double() - composed.double()).norm() / composed.double().norm()
        assert error < 2e-2  # bf16 roundings of the values between the products
        assert torch.equal(up.mlp(down, x, ids, weights), y)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed = up.mlp(down, x, ids, weights)
        for _ in range(2):  # with other experts than were captured
            ids.copy_(ids.roll(1, 0))
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(replayed, up.mlp(down, x, ids, weights))


@pytest.mark.gpu
def test_opcheck() -> None:
    case = mlp_case("custom4-g64", 5, 64, 128)
    layout = TritonExpertLayout(case.stack())
    x, ids = case.random(5, 128).requires_grad_(), case.expert_ids()
    weights = case.random(*ids.shape).requires_grad_()
    w = layout._weight()
    tensors = w.words, w.scale, w.zero_point, w.values, w.lanes
    arguments = (x, ids, *tensors, 4, 64, False, None, weights, 32, 64, 128)
    torch.library.opcheck(triton_expert_linear_op.op, arguments)


# torch 2.11 raises a deprecation warning when Inductor is first imported.
@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*")
def test_compiles_whole() -> None:
    first, second = mlp_case("custom4-g64", 5, 512, 384), mlp_case("custom4-g64", 5, 384, 256)
    up = TritonExpertLayout(first.stack())
    down = TritonExpertLayout(second.stack())
    x, ids = first.random(5, 384), first.expert_ids()
    weights = first.random(*ids.shape, dtype=torch.float32).softmax(1)
    with torch.no_grad():
        compiled = torch.compile(up.mlp, fullgraph=True, dynamic=True)
        for tokens in (5, 2, 3):
            given = x[:tokens], ids[:tokens], weights[:tokens]
            assert torch.equal(compiled(down, *given), up.mlp(down, *given))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 64, 512])
def test_dependent_launches_overlap(tokens: int) -> None:
    """Kernels that start before the previous one ends read what it wrote."""
    if not launch.can_overlap(torch.cuda.current_device()):
        pytest.skip("needs a GPU of compute capability 9.0 or later")
    first, second = (
        mlp_case("custom4-g64", tokens, 768, 512),
        mlp_case("custom4-g64", tokens, 512, 384),
    )
    up = TritonExpertLayout(first.stack())
    down = TritonExpertLayout(second.stack())
    x, ids = first.random(tokens, 512) / 8, first.expert_ids()
    weights = first.random(*ids.shape, dtype=torch.float32).softmax(1)
    with torch.no_grad():
        wanted = []
        y = x
        for _ in range(6):
            y = torch.nn.functional.layer_norm(up.mlp(down, y, ids, weights), (512,))
            torch.cuda.synchronize()
            wanted.append(y)
        for _ in range(30):
            torch.cuda._sleep(2_000_000)  # so that launches queue up and kernels overlap
            y, got = x, []
            for _ in range(6):
                y = torch.nn.functional.layer_norm(up.mlp(down, y, ids, weights), (512,))
                got.append(y)
            assert all(map(torch.equal, got, wanted))
