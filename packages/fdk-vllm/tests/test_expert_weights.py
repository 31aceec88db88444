"""Experts on their way from a checkpoint to a product, cut for tensor and expert parallelism."""

import pytest
import torch

from fdk_formats import Format, QuantisedStack, quantise, quantise_stack
from fdk_vllm.cut import ExpertPart
from fdk_vllm.expert_weights import ExpertPlan, ExpertSource, ExpertWeights
from fdk_vllm.gates import gate_of

EXPERTS, HIDDEN, INNER = 6, 64, 128
FORMATS = ("kmeans4-g32", "nf4-g32", "affine3-g32-zint", "int4-row")
SILU = gate_of("silu", None, None, None)
# Processes: (rank, ranks) along the inner size, and the experts of each.
EVERY = tuple(range(EXPERTS))
PARTS = {
    "one": [((0, 1), EVERY)],
    "tensor": [((0, 2), EVERY), ((1, 2), EVERY)],
    "expert": [((0, 1), (0, 1, 2)), ((0, 1), (3, 4, 5))],
    "round robin": [((0, 1), (0, 2, 4)), ((0, 1), (1, 3, 5))],
}


def stacks(format, gate=SILU):
    rows = INNER if gate.order == "none" else 2 * INNER
    first = quantise_stack(torch.randn(EXPERTS, rows, HIDDEN) / 8, format)
    return first, quantise_stack(torch.randn(EXPERTS, HIDDEN, INNER) / 11, format)


def source(q, shape):
    return ExpertSource(q.format, {name: t.dtype for name, t in q.tensors().items()}, shape)


def weights_of(plan, rank=0, ranks=1, experts=EVERY, gate=SILU, inner=INNER):
    part = ExpertPart(experts, rank, ranks, gate.order)
    sizes = HIDDEN, inner // ranks, torch.float32, torch.device("cpu")
    return ExpertWeights("layer", plan, part, gate, *sizes)


def load_stacks(weights, first, down):
    for projection, stack in (("w13", first), ("w2", down)):
        for name, tensor in stack.tensors().items():
            assert weights.add(projection, name, tensor) == 0


def call(weights, x, ids, routing, *biases):
    """Computes the part of a process of the sum, with ids as vLLM's map gives them."""
    local = {expert: i for i, expert in enumerate(weights.part.experts)}
    ids = torch.tensor([[local.get(int(i), -1) for i in row] for row in ids], dtype=torch.int32)
    return weights.product(x, ids, routing, *biases)


def inputs(tokens=5, top_k=3):
    ids = torch.rand(tokens, EXPERTS).topk(top_k).indices
    return torch.randn(tokens, HIDDEN), ids, torch.rand(tokens, top_k)


def exact(first, down, x, ids, routing, gate=SILU):
    """The weighted sum in float64, from dequantised ``[experts, n, k]``."""
    hidden = torch.einsum("tk,tjnk->tjn", x.double(), first.double()[ids])
    y = torch.einsum("tjk,tjnk->tjn", gate(hidden), down.double()[ids])
    return (y * routing[..., None]).sum(1)


@pytest.mark.parametrize(
    ("format", "parts"),
    [(format, parts) for format in FORMATS for parts in PARTS]
    + [("int4-g32-hadamard", parts) for parts in PARTS if parts != "tensor"],  # a block is cut
)
def test_parts_of_stacks_add_up(format, parts):
    first, down = stacks(format)
    plan = ExpertPlan({"w13": source(first, first.shape), "w2": source(down, down.shape)})
    arguments, total = inputs(), 0
    for (rank, ranks), experts in PARTS[parts]:
        weights = weights_of(plan, rank, ranks, experts)
        load_stacks(weights, first, down)
        total = total + call(weights, *arguments)
    wanted = exact(first.dequantise(), down.dequantise(), *arguments)
    torch.testing.assert_close(total.double(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("activation", ["swigluoai", "silu_no_mul"])
def test_parts_of_other_gates_add_up(activation):
    gate = gate_of(activation, None, None, None)
    first, down = stacks("kmeans4-g32", gate)
    plan = ExpertPlan({"w13": source(first, first.shape), "w2": source(down, down.shape)})
    arguments, total = inputs(), 0
    for rank in range(2):
        weights = weights_of(plan, rank, 2, gate=gate)
        load_stacks(weights, first, down)
        total = total + call(weights, *arguments)
    wanted = exact(first.dequantise(), down.dequantise(), *arguments, gate)
    torch.testing.assert_close(total.double(), wanted, rtol=1e-4, atol=1e-4)


def singles(format, up_format=None):
    """Returns gate, down and up of each expert, quantised one by one."""
    shapes = {"w1": (INNER, HIDDEN), "w2": (HIDDEN, INNER), "w3": (INNER, HIDDEN)}
    formats = {"w1": format, "w2": format, "w3": up_format or format}
    return {
        shard: [quantise(torch.randn(shape) / 8, formats[shard]) for _ in EVERY]
        for shard, shape in shapes.items()
    }


def load_singles(weights, made, experts=EVERY):
    for shard in ("w2", "w1", "w3"):  # an order of files
        for expert in experts:
            for name, tensor in made[shard][expert].tensors().items():
                projection = "w2" if shard == "w2" else "w13"
                index = weights.add(projection, name, tensor, shard, expert)
                assert (index is None) == (expert not in weights.part.experts)


@pytest.mark.parametrize(
    ("formats", "products"),
    [
        (("int4-g32",), 2),  # gate and up are one stack
        (("kmeans4-g32",), 3),  # a codebook each
        (("kmeans4-g32", "int8-g32"), 3),
    ],
)
@pytest.mark.parametrize("parts", PARTS)
def test_experts_that_are_stored_one_by_one(formats, products, parts):
    made = singles(*formats)
    plan = ExpertPlan({shard: source(qs[0], qs[0].shape) for shard, qs in made.items()})
    arguments, total = inputs(), 0
    for (rank, ranks), experts in PARTS[parts]:
        weights = weights_of(plan, rank, ranks, experts)
        load_singles(weights, made)
        assert len(weights.product.backends) == products
        total = total + call(weights, *arguments)
    dense = {shard: torch.stack([q.dequantise() for q in qs]) for shard, qs in made.items()}
    wanted = exact(torch.cat([dense["w1"], dense["w3"]], 1), dense["w2"], *arguments)
    torch.testing.assert_close(total.double(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("parts", PARTS)
def test_16_bit_experts_are_quantised_as_stacks_are(parts):
    gates, downs, ups = torch.randn(3, EXPERTS, INNER, HIDDEN).bfloat16().unbind()
    downs = downs.mT.contiguous()
    wanted_first = quantise_stack(torch.cat([gates, ups], 1), "kmeans3-g32")
    wanted_down = quantise_stack(downs, "kmeans3-g32")
    tensors = {"weight": torch.bfloat16}
    format = Format.parse("kmeans3-g32")
    plan = ExpertPlan({shard: ExpertSource(format, tensors) for shard in ("w1", "w3", "w2")})
    for (rank, ranks), experts in PARTS[parts]:
        weights = weights_of(plan, rank, ranks, experts)
        for expert in EVERY:
            weights.add("w13", "weight", gates[expert], "w1", expert)
            weights.add("w2", "weight", downs[expert], "w2", expert)
            assert weights.product is None
            weights.add("w13", "weight", ups[expert], "w3", expert)
            if weights.product is not None:
                break
        part = weights.part
        for layout, stack in zip(
            weights.product.layouts,
            (part.of_first(part.chosen(wanted_first)), part.of_down(part.chosen(wanted_down))),
            strict=True,
        ):
            for name, tensor in stack.tensors().items():
                assert torch.equal(layout.unpack().tensors()[name], tensor), name


def test_biases():
    first, down = stacks("int4-g32")
    plan = ExpertPlan({"w13": source(first, first.shape), "w2": source(down, down.shape)})
    weights = weights_of(plan)
    load_stacks(weights, first, down)
    x, ids, routing = inputs()
    bias, down_bias = torch.randn(EXPERTS, 2 * INNER), torch.randn(EXPERTS, HIDDEN)
    hidden = torch.einsum("tk,tjnk->tjn", x, first.dequantise()[ids]) + bias[ids]
    y = torch.einsum("tjk,tjnk->tjn", SILU(hidden), down.dequantise()[ids]) + down_bias[ids]
    wanted = (y * routing[..., None]).sum(1)
    found = call(weights, x, ids, routing, bias, down_bias)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_made_up_experts_have_the_shapes_and_codebooks_of_real_ones():
    format = Format.parse("kmeans4-g32")
    plan = ExpertPlan({shard: ExpertSource(format, {}) for shard in ("w1", "w3", "w2")})
    weights = weights_of(plan, 0, 2, (1, 4))
    weights.finish(is_dummy=True)
    first, down = (layout.unpack() for layout in weights.product.layouts)
    assert (first.shape, down.shape) == ((2, INNER, HIDDEN), (2, HIDDEN, INNER // 2))
    assert first.codebook.shape == (2, 16)


def test_new_values_come_to_the_same_addresses():
    first, down = stacks("int4-g32")
    plan = ExpertPlan({"w13": source(first, first.shape), "w2": source(down, down.shape)})
    weights = weights_of(plan)
    load_stacks(weights, first, down)
    addresses = [buffer.data_ptr() for buffer in weights.product.buffers().values()]
    again = stacks("int4-g32")
    load_stacks(weights, *again)
    assert [buffer.data_ptr() for buffer in weights.product.buffers().values()] == addresses
    wanted = exact(*(stack.dequantise() for stack in again), *(arguments := inputs()))
    torch.testing.assert_close(call(weights, *arguments).double(), wanted, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="reloaded weights need other kernels"):
        weights.hold([stacks("int8-g32")[0]], down)


def test_what_is_missing_is_named():
    first, down = stacks("int4-g32")
    plan = ExpertPlan({"w13": source(first, first.shape), "w2": source(down, down.shape)})
    weights = weights_of(plan)
    weights.add("w13", "packed", first.packed)
    with pytest.raises(ValueError, match="layer: the checkpoint has no w13 scale, w13 codebook"):
        weights.finish(is_dummy=False)
    made = singles("int4-g32")
    plan = ExpertPlan({shard: source(qs[0], qs[0].shape) for shard, qs in made.items()})
    weights = weights_of(plan)
    load_singles(weights, made, EVERY[:-1])
    with pytest.raises(ValueError, match=r"no w1 packed of expert 5, .* and 4 more"):
        weights.finish(is_dummy=False)


@pytest.mark.parametrize(
    ("inner", "ranks", "message"),
    [
        (INNER * 2, 1, r"w13: wanted experts \[512, 64\], got \[256, 64\]"),
        (INNER, 8, "int4-g32 of k=128 cannot be cut into 8 along k.* int4-g16 fits"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(inner, ranks, message):
    first, down = stacks("int4-g32")
    plan = ExpertPlan({"w13": source(first, first.shape), "w2": source(down, down.shape)})
    with pytest.raises(ValueError, match=rf"layer: .*{message}"):
        load_stacks(weights_of(plan, 0, ranks, inner=inner), first, down)


def test_damaged_values_are_refused():
    first, down = stacks("int4-g32")
    scale = first.scale.clone()
    scale[3, 0, 0] = torch.nan
    plan = ExpertPlan({"w13": source(first, first.shape), "w2": source(down, down.shape)})
    damaged = QuantisedStack(first.format, first.shape, first.packed, scale, first.codebook)
    with pytest.raises(ValueError, match="layer: experts: scale must be finite"):
        load_stacks(weights_of(plan), damaged, down)
