import copy
import pickle

import pytest
import torch
from torch import nn

from fdk_formats import (
    QuantisedLinear,
    fuse_layers,
    load_model,
    quantise,
    quantise_model,
)
from fdk_formats import save_model as save
from fdk_formats.fuse import FusedRows, siblings

K, SIZES = 64, {"q_proj": 48, "k_proj": 16, "v_proj": 16, "gate_proj": 24, "up_proj": 24}


class Block(nn.Module):
    """Attention and MLP projections of a llama; k_proj and up_proj have no bias."""

    def __init__(self, *, bias=True):
        super().__init__()
        torch.manual_seed(0)
        for name, n in SIZES.items():
            setattr(self, name, nn.Linear(K, n, bias=bias and name not in ("k_proj", "up_proj")))

    def forward(self, x):
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        h = x + 1
        gated = nn.functional.silu(self.gate_proj(h)) * self.up_proj(h)
        return torch.cat((q, k * v.sum(-1, keepdim=True), gated), dim=-1)


class Model(nn.Module):
    """Two blocks with the same input."""

    def __init__(self, *, bias=True):
        super().__init__()
        self.blocks = nn.ModuleList([Block(bias=bias), Block(bias=bias)])

    def forward(self, x):
        return sum((block(x) for block in self.blocks), start=torch.zeros(()))


def quantised(model, format="int4-g32", **more):
    return quantise_model(model, format, backend="reference", progress=False, **more)


@pytest.fixture
def x():
    return torch.randn(3, K, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def products(monkeypatch):
    """Records the number of outputs of each product of the reference."""
    from fdk_formats.reference import ReferenceLayout

    seen = []
    forward = ReferenceLayout.forward

    def counted(self, x, bias=None):
        seen.append(self.shape[0])
        return forward(self, x, bias)

    monkeypatch.setattr(ReferenceLayout, "forward", counted)
    return seen


def is_fused(block):
    layers = [getattr(block, name) for name in SIZES]
    return all(isinstance(layer.layout, FusedRows) for layer in layers)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "format", ["int4-g32", "affine3-g16-zint", "nf4-row", "int2-g32-search", "nf4-g32-hadamard"]
)
def test_fusing_changes_neither_bytes_nor_results(format, bias, x):
    source = Model(bias=bias)
    apart, fused = quantised(source, format), quantised(source, format, fuse=True)
    assert all(map(is_fused, fused.blocks))
    assert not any(map(is_fused, apart.blocks))
    stored = apart.state_dict()
    assert fused.state_dict().keys() == stored.keys()
    assert all(torch.equal(tensor, stored[name]) for name, tensor in fused.state_dict().items())
    with torch.inference_mode():
        torch.testing.assert_close(fused(x), apart(x))


def test_kmeans_fits_one_codebook_to_all(x):
    source = Block()
    fused = quantised(source, "kmeans3-g32", fuse=True)
    whole = quantise(
        torch.cat([getattr(source, f"{name}_proj").weight for name in "qkv"]), "kmeans3-g32"
    )
    parts = [getattr(fused, f"{name}_proj").quantised for name in "qkv"]
    assert is_fused(fused)
    for name in ("packed", "scale"):
        rows = torch.cat([getattr(part, name) for part in parts])
        assert torch.equal(rows, getattr(whole, name))
    assert all(torch.equal(part.codebook, whole.codebook) for part in parts)
    weighed = {"k_proj": torch.linspace(0.1, 2, K), "q_proj": torch.ones(SIZES["q_proj"], K)}
    other = quantised(source, "kmeans3-g32", fuse=True, importance=weighed)
    assert not torch.equal(other.q_proj.quantised.codebook, whole.codebook)


def test_one_product_for_one_input(x, products):
    block = quantised(Block(), fuse=True)
    with torch.no_grad():
        block(x)
        assert products == [80, 48]
        products.clear()
        k, q, again = block.k_proj(x), block.q_proj(x), block.q_proj(x)
        assert products == [80, 80]  # q's rows were returned already
        assert torch.equal(q, again)
        assert q.data_ptr() != again.data_ptr()
        assert k.shape == (3, 16)
        block.v_proj(x)
        block.v_proj(x + 0)  # another tensor
        assert products == [80, 80, 80]


def test_a_changed_input_is_noticed(x, products):
    source = Block()
    block = quantised(source, fuse=True)
    block.q_proj(x)
    x += 1
    apart = quantised(source)
    torch.testing.assert_close(block.k_proj(x), apart.k_proj(x))
    with torch.no_grad():
        block.v_proj(x)  # no graph: must not reuse the product that has one
    assert block.q_proj(x).requires_grad
    assert products == [80, 80, 16, 80, 80]


def test_gradient_and_adapters(x):
    class Adapted(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base_layer = base
            self.down = nn.Parameter(torch.full((2, K), 0.01))

        def forward(self, x):
            y = self.base_layer(x)
            return y + (x @ self.down.T).sum(-1, keepdim=True)

    source, grads = Block(), []
    for fuse in (False, True):
        block = quantised(source, fuse=fuse)
        block.k_proj = Adapted(block.k_proj)
        leaf = x.clone().requires_grad_()
        block(leaf).square().sum().backward()
        found = {"x": leaf.grad} | {
            name: p.grad for name, p in block.named_parameters() if p.requires_grad
        }
        assert all(grad is not None for grad in found.values())
        grads.append(found)
    assert grads[0].keys() == grads[1].keys()
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize("format", ["int4-g32", "kmeans3-g32"])
@pytest.mark.parametrize("fuse", [False, True])
def test_files_load_into_fused_and_separate_layers(fuse, format, x, tmp_path):
    source = Model()
    made = quantised(source, format, fuse=fuse)
    save(tmp_path / "model", made)
    with torch.inference_mode():
        y = made(x)
        for wanted in (False, True):
            read = load_model(tmp_path / "model", Model(), backend="reference", fuse=wanted)
            torch.testing.assert_close(read(x), y)
            # Layers with different codebooks cannot be one product.
            assert all(map(is_fused, read.blocks)) == (wanted and (fuse or format == "int4-g32"))
            other = quantised(Model().double().float(), format, fuse=wanted)
            other.load_state_dict(made.state_dict())
            torch.testing.assert_close(other(x), y)
            assert all(map(is_fused, other.blocks)) == (wanted and (fuse or format == "int4-g32"))


def test_loading_codebooks_separates_and_joins(x):
    source = Block()
    block, apart = quantised(source, "kmeans3-g32", fuse=True), quantised(source, "kmeans3-g32")
    together = block.state_dict()
    with torch.inference_mode():
        y = block(x)
        one = {n: t for n, t in apart.state_dict().items() if n.startswith("q_proj")}
        block.load_state_dict(one, strict=False)
        assert not isinstance(block.q_proj.layout, FusedRows)
        torch.testing.assert_close(block.q_proj(x), apart.q_proj(x))
        torch.testing.assert_close(block.k_proj(x), y[:, 48:64] / block.v_proj(x).sum(-1)[:, None])
        block.load_state_dict(together)
        assert is_fused(block)
        torch.testing.assert_close(block(x), y)


def test_moves_and_copies(x):
    block = quantised(Block(), fuse=True)
    block.q_proj(x)  # keeps a product with a graph, which copies must not share
    state = block.state_dict()
    for other in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        assert is_fused(other)
        assert torch.equal(other(x), block(x))
        rows = other.q_proj.layout
        assert rows.product is other.k_proj.layout.product
        assert rows.product is not block.q_proj.layout.product
    other = copy.deepcopy(block).to(torch.bfloat16)
    assert is_fused(other)
    assert all(torch.equal(t, state[n]) for n, t in other.state_dict().items() if "weight" in n)
    assert other(x.to(torch.bfloat16)).dtype == torch.bfloat16
    assert other.to("meta").q_proj.weight.device.type == "meta"


@pytest.mark.filterwarnings("ignore:.*cannot be used in torch.float64")
def test_a_move_that_cannot_pack_moves_the_whole_model(x, monkeypatch):
    from fdk_formats.reference import ReferenceBackend

    pack = ReferenceBackend.pack

    def refuses_float64(*given, dtype, **more):
        if dtype == torch.float64:
            raise ValueError("needs less, got float64")
        layout = pack(*given, dtype=dtype, **more)
        layout.dtypes = (dtype,)
        return layout

    monkeypatch.setattr(ReferenceBackend, "pack", refuses_float64)
    model = quantised(Model(), fuse=True)
    y = model(x)
    model.double()
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float64}
    with pytest.raises(ValueError, match="needs less, got float64"):
        model(x.double())
    assert torch.equal(model.float()(x), y)
    assert is_fused(model.blocks[1])


def test_autocast_is_one_product(x, products):
    block = quantised(Block(bias=False).to(torch.bfloat16), fuse=True)
    expected = block(x.to(torch.bfloat16))
    products.clear()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        q, k, v = block.q_proj(x), block.k_proj(x), block.v_proj(x)
    assert products == [80]
    assert torch.equal(q, expected[:, :48])
    assert (k.dtype, v.shape) == (torch.bfloat16, (3, 16))


def test_compiled_graph_has_one_product(x):
    block = quantised(Block(), fuse=True)
    with torch.inference_mode():
        expected = block(x)
    counted = []

    def backend(graph, _):
        ops = [node for node in graph.graph.nodes if "reference_linear" in str(node.target)]
        counted.append(len(ops))
        return graph

    torch.compiler.reset()
    with torch.no_grad():
        y = torch.compile(block, fullgraph=True, backend=backend)(x)
    assert counted == [2]
    assert torch.equal(y, expected)


def test_export(x):
    block = quantised(Block(), fuse=True).eval().requires_grad_(False)
    program = torch.export.export(block, (x,))
    assert torch.equal(program.module()(x), block(x))
    assert str(program.graph).count("target=torch.ops.fdk_formats.reference_linear") == 2


def test_groups_that_stay_separate(caplog):
    caplog.set_level("INFO")
    assert siblings(
        ["a.q_proj", "q_proj", "b.v_proj", "k_proj", "v_proj"], (("q_proj", "v_proj"),)
    ) == [("q_proj", "v_proj")]
    block = quantised(Block(), overrides={"k_proj": "int3-g32", "up_proj": None}, fuse=True)
    assert "left q_proj, k_proj, v_proj apart: formats" in caplog.text
    assert not any(
        isinstance(layer.layout, FusedRows)
        for layer in block.children()
        if isinstance(layer, QuantisedLinear)
    )
    source = Block()
    source.k_proj.weight = source.v_proj.weight
    quantised(source, fuse=True)
    assert "left q_proj, k_proj, v_proj apart: a weight is shared" in caplog.text
    block = quantised(Block())
    assert fuse_layers(block, [("k_proj", "v_proj")]) == [("k_proj", "v_proj")]
    assert fuse_layers(block) == [("gate_proj", "up_proj")]
    assert "a layer is in a group already" in caplog.text


@pytest.mark.parametrize("where", [torch.float64, torch.bfloat16, "meta"])
def test_moving_one_layer(where, x):
    """The others give the same results, without its bias."""
    block, apart = quantised(Block(), fuse=True), quantised(Block())
    block.q_proj.to(where)
    assert not isinstance(block.q_proj.layout, FusedRows)
    for name in ("k_proj", "v_proj"):
        torch.testing.assert_close(getattr(block, name)(x), getattr(apart, name)(x))


def test_a_weight_that_another_layer_calls(x):
    block, apart = quantised(Block(), fuse=True), quantised(Block())
    for bias in (None, torch.arange(48.0)):
        q, dtype = apart.q_proj.quantised, torch.float32
        other = QuantisedLinear.from_quantised(q, bias, backend="reference", dtype=dtype)
        wanted = other(x)
        block.k_proj(x)  # keeps a product with q_proj's own bias
        other.tie_weight(block.q_proj)
        torch.testing.assert_close(other(x), wanted)
        assert isinstance(other.layout, FusedRows)
    torch.testing.assert_close(block(x), apart(x))


@pytest.mark.parametrize("groups", ["q_proj", ["q_proj", "k_proj"], [()], [("q_proj",)]])
def test_groups_are_checked(groups, tmp_path):
    block = quantised(Block())
    save(tmp_path / "model", block)
    for wrong in (groups, [("q_proj", "q_proj")], [("a.q_proj", "a.k_proj")]):
        for call in (
            lambda wrong=wrong: fuse_layers(block, wrong),
            lambda wrong=wrong: quantised(Block(), fuse=wrong),
            lambda wrong=wrong: load_model(tmp_path / "model", Block(), fuse=wrong),
        ):
            with pytest.raises(ValueError, match=r"two or more different names .* such as \('q_p"):
                call()


def test_model_must_be_a_module():
    with pytest.raises(TypeError, match="fuse_layers: model must be a module, got NoneType"):
        fuse_layers(None)


def test_a_codebook_that_is_given(x):
    codebook = torch.linspace(-2, 2, 16)
    fused = quantised(Block(), "kmeans4-g32", fuse=True, codebook=codebook)
    assert is_fused(fused)
    apart = quantised(Block(), "kmeans4-g32", codebook=codebook)
    torch.testing.assert_close(fused(x), apart(x))
    assert torch.equal(fused.k_proj.quantised.codebook, codebook)
    some = quantised(Block(), "kmeans4-g32", fuse=True, codebook={"q_proj": codebook})
    assert not is_fused(some)
    assert torch.equal(some.q_proj.quantised.codebook, codebook)
    assert not torch.equal(some.k_proj.quantised.codebook, codebook)


def test_bad_importance_names_the_layer():
    for importance in (torch.ones(5), torch.ones(1), torch.zeros(K)):
        with pytest.raises(ValueError, match="layer k_proj: quantise: importance"):
            quantised(Block(), "kmeans3-g32", fuse=True, importance={"k_proj": importance})


def test_kmeans_in_the_first_group_of_a_layer():
    """The order of the layers does not matter: k_proj comes before q_proj here."""
    model = nn.ModuleDict({f"{name}_proj": nn.Linear(K, 16) for name in "kvq"})
    groups = [("q_proj", "k_proj", "v_proj"), ("k_proj", "v_proj")]
    made = quantised(model, "kmeans3-g32", fuse=groups)
    assert all(isinstance(layer.layout, FusedRows) for layer in made.values())
