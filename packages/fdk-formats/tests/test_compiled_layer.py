"""Quantised layers under torch.compile, torch.export and torch.func, and called by two threads."""

import copy
import threading

import pytest
import torch
from torch import nn

from fdk_formats import (
    Format,
    QuantisedEmbedding,
    QuantisedLinear,
    fuse_layers,
    quantise_model,
)
from fdk_formats.testing import random_quantised

FORMATS = ["nf4-g32", "affine3-g32", "int4-row", "kmeans4-g32-hadamard"]
K, HIDDEN = 64, 96


def model(format="nf4-g32", seed=0):
    torch.manual_seed(seed)
    source = nn.Sequential(nn.Linear(K, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, K))
    return quantise_model(source, format, backend="reference", progress=False)


def layer(format="nf4-g32", n=HIDDEN, **settings):
    torch.manual_seed(0)
    settings.setdefault("backend", "reference")
    return QuantisedLinear.from_linear(nn.Linear(K, n), format, **settings)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()


@pytest.fixture
def x():
    return torch.randn(3, K, generator=torch.Generator().manual_seed(1))


# aot_eager traces, where graph breaks show, and needs no C++ compiler.
def compiled(module):
    return torch.compile(module, fullgraph=True, backend="aot_eager")


def assert_same_step(made, plain, x):
    given = [x.clone().requires_grad_() for _ in range(2)]
    outputs = [module(own) for module, own in zip((made, plain), given, strict=True)]
    assert torch.equal(*outputs)
    for y in outputs:
        y.square().sum().backward()
    assert torch.equal(given[0].grad, given[1].grad)


@pytest.mark.parametrize("format", FORMATS)
def test_a_model_never_called(format, x):
    made = model(format)
    assert_same_step(compiled(made), model(format), x)
    assert [made[i].backend_name for i in (0, 2)] == ["reference"] * 2
    names = {name for name, p in made.named_parameters() if p.grad is not None}
    assert names == {"0.bias", "2.bias"}


def test_without_gradients(x):
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(compiled(model())(x), model()(x))


def test_int8_activations(x):
    made = layer("int8-row", activations="int8")
    assert_same_step(compiled(made), copy.deepcopy(made), x)


def test_permuted_inputs(x):
    made = layer()
    made.permute_inputs(torch.randperm(K, generator=torch.Generator().manual_seed(2)))
    assert_same_step(compiled(made), copy.deepcopy(made), x)


def test_casting_a_compiled_model(x):
    made = model()
    call = compiled(made)
    assert torch.equal(call(x), model()(x))
    made.to(torch.bfloat16)
    y = call(x.bfloat16())
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, model().bfloat16()(x.bfloat16()))
    made.to(torch.float32)
    wanted = model().bfloat16().float()  # biases were rounded
    assert torch.equal(call(x), wanted(x))


def test_loading_into_a_compiled_model(x):
    made = model()
    call = compiled(made)
    before = call(x)
    made.load_state_dict(model(seed=5).state_dict())
    wanted = model(seed=5)(x)
    assert not torch.equal(before, wanted)
    assert torch.equal(call(x), wanted)


@pytest.mark.parametrize("field", ["scale", "codebook", "packed"])
def test_replacing_a_parameter_of_a_compiled_layer(field, x):
    made = layer()
    call = compiled(made)
    before = call(x)
    given = getattr(layer().quantised, field)
    changed = 255 - given if field == "packed" else given * 2
    setattr(made, f"weight_{field}", nn.Parameter(changed.clone(), requires_grad=False))
    wanted = QuantisedLinear.from_quantised(
        made.quantised, layer().bias, backend="reference", dtype=torch.float32
    )(x)
    assert not torch.equal(before, wanted)
    assert torch.equal(call(x), wanted)


def test_writing_to_a_parameter_of_a_compiled_layer(x):
    made, other = layer(), layer()
    call = compiled(made)
    call(x)
    for one in (made, other):
        one.weight_scale.data.mul_(2)
    assert torch.equal(call(x), other(x))


@pytest.mark.filterwarnings("ignore:.*an assigned weight is quantised again")
def test_assigning_a_weight_to_a_compiled_layer(x):
    made, other = layer(), layer()
    call, weight = compiled(made), torch.randn(HIDDEN, K)
    call(x)
    for one in (made, other):
        one.weight = weight
    assert torch.equal(call(x), other(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast(dtype, x):
    call = compiled(model())
    before = call(x)
    with torch.autocast("cpu", dtype):
        y = call(x)
        wanted = model()(x)
    assert y.dtype == wanted.dtype == dtype
    assert torch.equal(y, wanted)
    assert torch.equal(call(x), before)


class ReadsWeight(nn.Module):
    """Code written for nn.Linear: it asks for the weight's dtype, and multiplies with it."""

    def __init__(self, proj):
        super().__init__()
        self.proj = proj

    def forward(self, x):
        y = self.proj(x.to(self.proj.weight.dtype).to(self.proj.weight.device))
        n, k = self.proj.weight.shape
        return y + (self.proj.weight @ x.t()).t() * (n / k)


@pytest.mark.parametrize("is_permuted", [False, True])
@pytest.mark.parametrize("settings", [{}, {"activations": "int8"}], ids=["float", "int8"])
@pytest.mark.parametrize("is_called", [False, True])
def test_code_that_reads_the_weight(is_called, settings, is_permuted, x):
    made = layer("int8-row", **settings)
    if is_permuted:
        made.permute_inputs(torch.randperm(K, generator=torch.Generator().manual_seed(2)))
    wanted = ReadsWeight(copy.deepcopy(made))(x)
    if is_called:
        made(x)
    # With rounded activations, the weight is computed outside of the graph.
    call = torch.compile(ReadsWeight(made), fullgraph=not settings, backend="aot_eager")
    torch.testing.assert_close(call(x), wanted)


def test_a_dtype_alone_leaves_no_product_in_the_graph(x):
    class ReadsDtype(nn.Module):
        def __init__(self):
            super().__init__()
            self.proj = layer()

        def forward(self, x):
            return self.proj(x.to(self.proj.weight.dtype))

    graph = torch.export.export(ReadsDtype(), (x.double(),)).graph_module.graph
    graph.eliminate_dead_code()
    ops = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    assert sum("reference_linear" in op for op in ops) == 1


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(K, HIDDEN), nn.Linear(K, HIDDEN)
        self.down_proj = nn.Linear(HIDDEN, K)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


def gated():
    torch.manual_seed(0)
    return quantise_model(Gated(), "affine3-g32", backend="reference", progress=False)


def test_fused_layers(x):
    made = gated()
    fuse_layers(made)
    call = compiled(made)
    given = [x.clone().requires_grad_() for _ in range(2)]
    for _ in range(2):
        y, wanted = call(given[0]), gated()(given[1])
        torch.testing.assert_close(y, wanted)
    torch.testing.assert_close(
        *(torch.autograd.grad(y.sum(), own)[0] for y, own in zip((y, wanted), given, strict=True))
    )
    made.to(torch.bfloat16)
    wanted = gated().bfloat16()(x.bfloat16())
    torch.testing.assert_close(call(x.bfloat16()), wanted, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("format", FORMATS)
def test_export_of_a_layer_never_called(format, x):
    made = layer(format)
    wanted = copy.deepcopy(made)(x)
    program = torch.export.export(made, (x,))
    assert "set_grad_enabled" not in str(program.graph)
    assert torch.equal(program.module()(x), wanted)
    assert torch.equal(made(x), wanted)
    for p in made.parameters():  # real tensors again
        assert torch.equal(p, p.clone())


# torch's own: its file format meets its newer tree specifications.
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_export_saves_and_loads(x, tmp_path):
    made = model()
    torch.export.save(torch.export.export(made, (x,)), tmp_path / "model.pt2")
    assert torch.equal(torch.export.load(tmp_path / "model.pt2").module()(x), model()(x))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("is_called", [False, True])
def test_embeddings(is_called, format):
    torch.manual_seed(0)
    made = QuantisedEmbedding.from_embedding(nn.Embedding(10, K), format)
    ids = torch.tensor([[1, 2], [9, 0]])
    wanted = made.dequantise()[ids]
    if is_called:
        made(ids)
    assert torch.equal(compiled(made)(ids), wanted)
    fresh = QuantisedEmbedding.from_embedding(nn.Embedding(10, K), format)
    fresh.load_state_dict(made.state_dict())
    assert torch.equal(torch.export.export(fresh, (ids,)).module()(ids), wanted)


@pytest.mark.parametrize("is_called", [False, True])
def test_functional_call(is_called, x):
    made, other = model(), model(seed=5)
    if is_called:
        made(x)
    before = model()(x)
    own = dict(made.named_parameters())
    assert torch.equal(torch.func.functional_call(made, own, (x,)), before)
    given = {name: p.detach().clone() for name, p in other.named_parameters()}
    for _ in range(2):
        assert torch.equal(torch.func.functional_call(made, given, (x,)), other(x))
        assert torch.equal(made(x), before)


def test_gradients_of_functional_call(x):
    made, plain = model(), model()
    trained = {name: p.detach() for name, p in made.named_parameters() if "bias" in name}

    def loss(biases):
        return torch.func.functional_call(made, biases, (x,)).square().sum()

    found = torch.func.grad(loss)(trained)
    plain(x).square().sum().backward()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, plain.get_parameter(name).grad)


def test_two_threads_call_a_layer_for_the_first_time():
    q = random_quantised(Format.parse("kmeans4-g32"), 256, 256)
    x = torch.randn(4, 256)
    wanted = QuantisedLinear.from_quantised(q, backend="reference", dtype=torch.float32)(x)
    for _ in range(20):
        made = QuantisedLinear.from_quantised(q, backend="reference", dtype=torch.float32)
        start, outputs, layouts = threading.Barrier(4), [], []

        def call(made=made, start=start, outputs=outputs, layouts=layouts):
            start.wait()
            outputs.append(made(x))
            layouts.append(made.layout)

        threads = [threading.Thread(target=call) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(outputs) == 4
        assert all(torch.equal(y, wanted) for y in outputs)
        assert len({id(layout) for layout in layouts}) == 1
