import gc
import logging
import sys
import types
import weakref

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.utils import parametrizations, prune
from transformers import GPT2Config, GPT2LMHeadModel, MixtralConfig, MixtralForCausalLM

from fdk_formats import (
    Format,
    LeftWeight,
    NoBackendError,
    QuantisedEmbedding,
    QuantisedLinear,
    choose_formats,
    convert,
    load_model,
    model_report,
    prepare_qat,
    quantise,
    quantise_model,
    relative_error,
    replace_layers,
    save_model,
)
from fdk_formats.testing import nrmse


class Block(nn.Module):
    """A small llama: an embedding, a head tied to it, and a buffer."""

    inv_freq: Tensor

    def __init__(self, *, tied=False):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(20, 32)
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32, bias=False)
        self.norm = nn.LayerNorm(32)
        self.lm_head = nn.Linear(32, 20, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight
        self.register_buffer("inv_freq", torch.arange(4, dtype=torch.float64))

    def forward(self, ids):
        x = self.embed(ids)
        x = self.norm(x + self.down(torch.relu(self.up(x))))
        y = self.lm_head(x)
        return y


IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])


def quantised(model, format="kmeans4-g32", **kwargs):
    return quantise_model(model, format, backend="reference", progress=False, **kwargs)


def test_quantise_model_replaces_linears_and_nothing_else():
    source = Block().to(torch.bfloat16)
    source.inv_freq = source.inv_freq.double()
    state = {name: tensor.clone() for name, tensor in source.state_dict().items()}
    result = quantised(source)
    assert isinstance(result.up, QuantisedLinear)
    assert isinstance(result.down, QuantisedLinear)
    assert type(result.lm_head) is nn.Linear  # skipped by default
    assert result.inv_freq.dtype == torch.float64
    assert result.inv_freq.data_ptr() != source.inv_freq.data_ptr()
    for name, tensor in source.state_dict().items():
        assert torch.equal(tensor, state[name])
    expected = Block().to(torch.bfloat16)
    for name in ("up", "down"):
        weight = getattr(source, name).weight
        W_hat = quantise(weight, "kmeans4-g32").dequantise(torch.bfloat16)
        getattr(expected, name).weight.data.copy_(W_hat)
    assert torch.equal(result(IDS), expected(IDS))


def test_a_single_linear():
    result = quantised(nn.Linear(32, 8), "nf4-g32")
    assert isinstance(result, QuantisedLinear)


def test_skip_and_overrides():
    result = quantised(
        Block(), skip=["^up$"], overrides={"lm_head": "int8-g16", "head": "nf4-g32", "down": None}
    )
    assert type(result.up) is nn.Linear
    assert type(result.down) is nn.Linear
    assert result.lm_head.format == Format.parse("int8-g16")
    assert type(quantised(Block(), skip=None).lm_head) is QuantisedLinear
    assert quantised(Block(), overrides={"lm_head": "nf4-g32"}).lm_head.format.codebook == "nf"


def test_tied_linears_share_the_quantised_weight():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    model[1].weight = model[0].weight
    result = quantised(model)
    assert result[0].stored is result[1].stored
    assert result[0].weight_packed is result[1].weight_packed
    assert result[0].bias is not result[1].bias
    assert len(model_report(result).layers) == 1
    result.load_state_dict(result.state_dict())
    # different formats would untie them: neither is quantised
    with pytest.warns(UserWarning, match="nothing to quantise"):
        other = quantised(model, overrides={"1": "nf4-g32"})
    assert type(other[0]) is nn.Linear
    assert other[0].weight is other[1].weight


def test_a_module_under_two_names_is_quantised_once():
    shared = nn.Linear(32, 32)
    result = quantised(nn.Sequential(shared, nn.ReLU(), shared))
    assert isinstance(result[0], QuantisedLinear)
    assert result[0] is result[2]


def test_a_head_tied_to_the_embedding_stays_tied():
    result = quantised(Block(tied=True), skip=None)
    assert type(result.lm_head) is nn.Linear
    assert result.lm_head.weight is result.embed.weight
    assert isinstance(result.up, QuantisedLinear)


def test_skipped_layers_are_logged(caplog):
    with (
        caplog.at_level(logging.INFO, logger="fdk_formats"),
        pytest.warns(UserWarning, match="nothing to quantise"),
    ):
        quantised(Block(tied=True), skip="^up$", overrides={"down": None}, default_skip=False)
    messages = [record.message for record in caplog.records]
    assert "left up: skip" in messages
    assert "left down: override" in messages
    assert "left lm_head: tied to embed.weight" in messages


def test_subclasses_of_linear_are_left():
    attention = nn.MultiheadAttention(32, 2)  # uses out_proj.weight itself
    result = quantised(nn.Sequential(attention, nn.Linear(32, 32)))
    assert isinstance(result[1], QuantisedLinear)
    x = torch.randn(3, 1, 32)
    assert torch.equal(result[0](x, x, x)[0], attention(x, x, x)[0])


def test_mode_and_hooks_of_the_source_are_not_shared():
    source = Block().eval()
    calls = []
    source.register_forward_hook(lambda *_: calls.append(1))
    result = quantised(source)
    assert not result.up.training
    result(IDS)
    result._forward_hooks.clear()
    source(IDS)
    assert len(calls) == 2


def test_errors_come_before_any_work(monkeypatch):
    def never(*_, **__):
        raise AssertionError("quantised before all layers were checked")

    monkeypatch.setattr("fdk_formats.model.quantise", never)
    with pytest.raises(ValueError, match="layer up: kmeans4-g64: k must be a positive multiple"):
        quantised(Block(), "kmeans4-g64")
    with pytest.raises(NoBackendError, match="layer up: backend reference does not support kme"):
        quantised(Block().to(torch.float8_e5m2))
    with pytest.raises(ValueError, match="override 'attention' fits no linear layer of up, down"):
        quantised(Block(), overrides={"attention": None})
    with pytest.raises(ValueError, match=r"importance names left, lm_head, wanted .*: up, d"):
        quantised(Block(), importance={"left": torch.ones(32), "lm_head": torch.ones(32)})
    with pytest.raises(ValueError, match="does not start with"):
        quantised(Block(), "four bits")
    with pytest.raises(ValueError, match="layer up: quantise: custom4-g32 needs codebook=, 16 val"):
        quantised(Block(), "custom4-g32")
    with pytest.raises(ValueError, match=r"codebook of custom4-g32 must be \[16\], got \[4\]"):
        quantised(Block(), "custom4-g32", codebook=torch.arange(4.0))
    with pytest.raises(ValueError, match="int4-g32 takes no codebook, only custom and kmeans do"):
        quantised(Block(), "int4-g32", codebook=torch.arange(16.0), overrides={".": "nf4-g32"})
    with pytest.raises(ValueError, match=r"codebook names left, wanted .*: up, down"):
        quantised(Block(), codebook={"left": torch.arange(16.0)})
    with pytest.raises(ValueError, match="layer down: quantise: int4-g32 takes no codebook"):
        quantised(Block(), overrides={"down": "int4-g32"}, codebook={"down": torch.arange(16.0)})


def test_wrong_arguments():
    with pytest.raises(TypeError, match="model must be a module, got Tensor"):
        quantised(torch.ones(3))
    with pytest.raises(ValueError, match=r"skip must be regular expressions, got '\('"):
        quantised(Block(), skip="(")
    with pytest.raises(ValueError, match="overrides must be regular expressions, got 3"):
        quantised(Block(), overrides={3: None})
    assert isinstance(quantised(Block(), skip=None).lm_head, QuantisedLinear)


def test_errors_name_the_layer():
    model = Block()
    model.down.weight.data[3, 4] = torch.nan
    with pytest.raises(ValueError, match=r"layer down: quantise: weight must be .* at row 3"):
        quantised(model)
    with pytest.raises(ValueError, match="layer up: quantise: importance must be"):
        quantised(Block(), importance={"up": torch.ones(5)})


def test_a_model_with_nothing_to_quantise_warns():
    message = "nothing to quantise: 3 linear layers, all left"
    for call in (quantise_model, choose_formats):
        with pytest.warns(UserWarning, match=message) as caught:
            call(Block(), "nf4-g32", skip=".*")
        assert caught[0].filename == __file__


def test_hooks_of_a_layer_go_with_it_and_shared_biases_stay_shared():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    model[1].bias = model[0].bias
    calls = []
    model[0].register_forward_hook(lambda *_: calls.append("after"))
    model[0].register_forward_pre_hook(lambda *_, **__: calls.append("before"), with_kwargs=True)
    result = quantised(model)
    result(torch.ones(1, 32))
    assert calls == ["before", "after"]
    assert result[0].bias is result[1].bias
    result[0]._forward_hooks.clear()
    assert len(model[0]._forward_hooks) == 1


def test_importances_of_tied_layers_add_up():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    model[1].weight = model[0].weight
    one, two = torch.rand(32), torch.rand(32)
    result = quantised(model, "kmeans2-g32", importance={"0": one, "1": two})
    expected = quantise(model[0].weight, "kmeans2-g32", importance=one + two)
    assert torch.equal(result[0].quantised.codebook, expected.codebook)


def test_a_transformer_encoder_leaves_its_fused_path():
    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(32, 2, dim_feedforward=64, batch_first=True).eval()
    result = quantised(encoder, "int8-g32")
    x = torch.randn(2, 5, 32)
    with torch.no_grad():  # where torch would pass the weights to a fused kernel
        y, expected = result(x), encoder(x)
    assert isinstance(result.linear1, QuantisedLinear)
    assert nrmse(y, expected.double()) < 0.02


def test_importance_reaches_its_layer():
    importance = torch.zeros(32)
    importance[:16] = 1
    plain, weighed = (
        quantised(Block(), "kmeans2-g32", importance=given) for given in (None, {"up": importance})
    )
    assert not torch.equal(plain.up.quantised.codebook, weighed.up.quantised.codebook)
    assert torch.equal(plain.down.quantised.packed, weighed.down.quantised.packed)


def test_one_codebook_for_the_layers_of_its_kind():
    codebook = torch.linspace(-1, 1, 16)
    overrides = {"down": "custom4-g16-fp16", "head": "kmeans3-g32"}
    result = quantised(Block(), "custom4-g32", codebook=codebook, overrides=overrides)
    source = Block()
    for name, format in {"up": "custom4-g32", "down": "custom4-g16-fp16"}.items():
        q = quantise(getattr(source, name).weight, format, codebook=codebook)
        assert torch.equal(getattr(result, name).quantised.dequantise(), q.dequantise())
    fitted = quantise(source.lm_head.weight, "kmeans3-g32")
    assert torch.equal(result.lm_head.quantised.codebook, fitted.codebook)


def test_a_codebook_for_a_layer():
    codebook = torch.linspace(-1, 1, 16)
    result = quantised(Block(), codebook={"down": codebook})
    assert torch.equal(result.down.quantised.codebook, codebook)
    fitted = quantise(Block().up.weight, "kmeans4-g32").codebook
    assert torch.equal(result.up.quantised.codebook, fitted)


def test_codebooks_of_tied_layers_are_one():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    model[1].weight = model[0].weight
    codebook = torch.linspace(-1, 1, 16)
    result = quantised(model, codebook={"0": codebook, "1": codebook.clone()})
    assert torch.equal(result[1].quantised.codebook, codebook)
    with pytest.raises(ValueError, match=r"layer 1: shares its weight, .* got \[-2\.0"):
        quantised(model, codebook={"0": codebook, "1": 2 * codebook})


def test_report():
    model = Block().to(torch.bfloat16)
    report = model_report(quantised(model, overrides={"down": "int8-g16"}))
    up, down = report.layers
    assert (up.name, down.name) == ("up", "down")
    assert (up.shape, up.backend) == ((64, 32), "reference")
    assert up.bits_per_weight == 4.5  # 4 + 16/32
    assert up.bytes_before == 64 * 32 * 2
    assert up.bytes_after == 64 * 16 + 64 * 2 + 16 * 4  # codes, scales, codebook
    assert down.bits_per_weight == 9  # 8 + 16/16
    assert report.bits_per_weight == 6.75
    assert [(left.name, left.kind) for left in report.left] == [
        ("embed.weight", "Embedding"),
        ("lm_head.weight", "Linear"),
    ]
    # embedding and head 20 x 32 each, bias of up 64, norm 2 x 32, all bf16
    assert report.other_bytes == 2 * (20 * 32 * 2 + 64 + 64)
    assert up.relative_error == relative_error(
        model.up.weight, quantise(model.up.weight, "kmeans4-g32")
    )
    assert 0.05 < up.relative_error < 0.12
    text = str(report)
    assert "lm_head" in text
    total = up.bytes_after + down.bytes_after
    assert f"2 layers, 6.750 bits per weight, 8192 -> {total} bytes" in text


def test_relative_error():
    weight = torch.tensor([[3.0] * 16 + [4.0] * 16])
    q = quantise(weight, "binary1-g16-absmax")  # each group is one magnitude: exact
    assert relative_error(weight, q) == 0
    other = torch.tensor([[3.0] * 16 + [5.0] * 16])  # off by 1 in half of the weights
    assert relative_error(other, q) == pytest.approx((16 / (16 * 9 + 16 * 25)) ** 0.5)
    assert relative_error(torch.zeros(1, 32), quantise(torch.zeros(1, 32), "nf4-g16")) == 0
    with pytest.raises(ValueError, match=r"weight must be \(1, 32\), got \[2, 16\]"):
        relative_error(weight.view(2, 16), q)


@pytest.mark.parametrize("with_tqdm", [True, False])
def test_progress(with_tqdm, monkeypatch, capsys):
    is_a_terminal = lambda: True  # noqa: E731
    monkeypatch.setattr(sys.stderr, "isatty", is_a_terminal, raising=False)
    if with_tqdm:
        pytest.importorskip("tqdm")
    else:
        monkeypatch.setitem(sys.modules, "tqdm", None)
    quantise_model(Block(), "nf4-g32", backend="reference")
    assert "2/2" in capsys.readouterr().err
    quantise_model(Block(), "nf4-g32", backend="reference", progress=False)
    assert capsys.readouterr().err == ""


class Shared(nn.Module):
    """One layer under two names."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(32, 32)
        self.lm_head = self.proj


def test_every_name_of_a_shared_layer_counts():
    with pytest.warns(UserWarning, match="nothing to quantise"):
        model = quantise_model(Shared(), "int4-g32", backend="reference")
    assert type(model.lm_head) is nn.Linear
    model = quantise_model(
        Shared(), "int4-g32", overrides={"lm_head": "int8-g32"}, backend="reference"
    )
    assert isinstance(model.proj, QuantisedLinear)
    assert model.proj is model.lm_head
    assert str(model.proj.format) == "int8-g32"


@pytest.mark.parametrize("part", ["weight", "bias"])
def test_a_computed_weight_is_refused(part):
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    prune.l1_unstructured(model[1], part, 0.5)
    wanted = f"layer 1: its {part} must be a parameter, and is computed from others"
    with pytest.raises(ValueError, match=wanted):
        quantise_model(model, "int4-g32", backend="reference")
    prune.remove(model[1], part)
    assert isinstance(quantise_model(model, "int4-g32", backend="reference")[1], QuantisedLinear)


# In place


def pair(*, bias=True):
    return nn.Sequential(nn.Linear(32, 32, bias=bias), nn.Linear(32, 32, bias=bias))


def test_inplace_changes_the_model_as_a_copy_would_be():
    model, copied = Block(), quantised(Block())
    bias = model.up.bias
    assert quantised(model, inplace=True) is model
    assert model.up.bias is bias
    for name, tensor in copied.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)
    assert torch.equal(model(IDS), copied(IDS))
    assert model_report(model) == model_report(copied)


def test_inplace_keeps_ties_and_shared_biases():
    model = pair()
    model[1].weight, model[1].bias = model[0].weight, model[0].bias
    quantised(model, inplace=True)
    assert model[0].stored is model[1].stored
    assert model[0].bias is model[1].bias


def test_inplace_replaces_a_layer_under_all_its_names():
    model = Shared()
    quantised(model, default_skip=False, inplace=True)
    assert isinstance(model.proj, QuantisedLinear)
    assert model.proj is model.lm_head


def test_inplace_returns_the_layer_of_a_model_that_is_one():
    linear = nn.Linear(32, 8)
    result = quantised(linear, inplace=True)
    assert isinstance(result, QuantisedLinear)
    assert type(linear) is nn.Linear
    assert result.bias is linear.bias


def test_inplace_fuses():
    model = nn.ModuleDict({name: nn.Linear(32, 32) for name in ("q_proj", "k_proj", "v_proj")})
    x = torch.randn(2, 32)
    expected = quantised(model, "kmeans3-g32", fuse=True)
    quantised(model, "kmeans3-g32", fuse=True, inplace=True)
    assert model["q_proj"].group is model["v_proj"].group is not None
    for name, layer in model.items():
        assert torch.equal(layer(x), expected[name](x))


def test_an_error_in_place_leaves_the_layers_before_quantised():
    model = pair()
    model[1].weight.data[0, 0] = torch.inf
    with pytest.raises(ValueError, match="layer 1: quantise: weight"):
        quantised(model, inplace=True)
    assert isinstance(model[0], QuantisedLinear)
    assert type(model[1]) is nn.Linear


def test_inplace_frees_each_weight_before_the_next(monkeypatch):
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(6)))
    sources = [weakref.ref(layer.weight) for layer in model]
    alive = []

    def counting(*args, **kwargs):
        gc.collect()
        alive.append(sum(source() is not None for source in sources))
        return quantise(*args, **kwargs)

    monkeypatch.setattr("fdk_formats.model.quantise", counting)
    quantised(model, "int4-g32", inplace=True)
    assert alive == [6, 5, 4, 3, 2, 1]
    assert not any(source() is not None for source in sources)


# What layers carry


def test_own_attributes_go_with_a_layer_and_are_copied():
    model = pair()
    model[0].notes = ["a"]
    result = quantised(model)
    assert result[0].notes == ["a"]
    assert result[0].notes is not model[0].notes
    notes = model[0].notes
    assert quantised(model, inplace=True)[0].notes is notes


@pytest.mark.parametrize("inplace", [False, True])
def test_every_kind_of_hook_is_kept(inplace):
    model, calls = pair(), []
    layer = model[0]
    layer.register_full_backward_hook(lambda *_: calls.append("backward"))
    layer.register_full_backward_pre_hook(lambda *_: calls.append("before backward"))
    layer.register_state_dict_pre_hook(lambda *_: calls.append("before state_dict"))
    layer.register_state_dict_post_hook(lambda *_: calls.append("state_dict"))
    layer.register_load_state_dict_pre_hook(lambda module, *_: calls.append(module))
    layer.register_load_state_dict_post_hook(lambda *_: calls.append("loaded"))
    result = quantised(model, inplace=inplace)
    del layer, model
    result(torch.ones(1, 32, requires_grad=True)).sum().backward()
    result.load_state_dict(result.state_dict())
    expected = ["before backward", "backward", "before state_dict", "state_dict", result[0]]
    assert calls == [*expected, "loaded"]


def test_handles_remove_the_hooks_of_a_model_in_place():
    model, calls = pair(), []
    handle = model[0].register_forward_hook(lambda *_: calls.append(1))
    quantised(model, inplace=True)(torch.ones(1, 32))
    handle.remove()
    model(torch.ones(1, 32))
    assert calls == [1]


class Counting(nn.Module):
    """Counts calls of its layer, by a hook that is a method."""

    def __init__(self):
        super().__init__()
        self.layer, self.count = nn.Linear(32, 32), 0
        self.layer.register_forward_hook(self.add)

    def add(self, *_):
        self.count += 1

    def forward(self, x):
        return self.layer(x)


def test_hooks_that_are_methods_belong_to_the_copy():
    source = Counting()
    result = quantised(source)
    result(torch.ones(1, 32))
    assert (source.count, result.count) == (0, 1)


# Patched forwards and closures (A5, A6)

x32 = torch.ones(1, 32)


def forwards(model):
    """Ways to patch the forward of a module so that it calls the old one, by name."""
    old = model.forward
    olds, reference = [old], weakref.ref(model)
    return {
        "closure": lambda x: old(x),
        "default": lambda x, call=old: call(x),
        "method": types.MethodType(lambda self, x: old(x), model),
        "container": lambda x: olds[0](x),
        "nested": lambda x: (lambda: old(x))(),
        "module": lambda x: model.layer(x),
        "weak": lambda x: reference().layer(x),
    }


WAYS = ("closure", "default", "method", "container", "nested", "module", "weak")


@pytest.mark.parametrize("way", WAYS)
def test_a_forward_that_calls_the_source_is_refused_in_a_copy(way):
    model = Counting()
    y = model(x32)
    model.forward = forwards(model)[way]
    with pytest.raises(ValueError, match=r"forward is patched .* calls .*: pass inplace=True"):
        quantised(model)
    assert type(model.layer) is nn.Linear
    assert torch.equal(model(x32), y)
    quantised(model, "int1-g32", inplace=True)
    assert torch.equal(model(x32), model.layer(x32))
    assert not torch.equal(model(x32), y)


in_globals = Counting()
old_in_globals = in_globals.forward


def test_a_forward_that_calls_the_source_through_a_global_is_refused(monkeypatch):
    monkeypatch.setattr(in_globals, "forward", lambda x: old_in_globals(x))
    with pytest.raises(ValueError, match="calls the whole model of the source"):
        quantised(in_globals)


def test_a_forward_that_holds_a_layer_is_refused_in_place_too():
    model = Counting()
    layer = model.layer
    model.forward = lambda x: layer(x)
    with pytest.raises(
        ValueError, match=r"calls module 'layer' of the source.* set it on the resu"
    ):
        quantised(model, inplace=True)
    assert model.layer is layer


def packed(model):
    """Returns the tensors of a model with a quantised ``layer``, as a file holds them."""
    layer = model.layer
    return {"layer.weight": quantise(layer.weight, "int4-g32"), "layer.bias": layer.bias.detach()}


COPIES = {
    "prepare_qat": lambda model: prepare_qat(model, "int4-g32"),
    "convert": lambda model: convert(model, backend="reference"),
    "load_model": lambda model: load_model(packed(model), model, backend="reference"),
}


@pytest.mark.parametrize("name", COPIES)
def test_every_copy_refuses_a_forward_that_calls_the_source(name):
    model = prepare_qat(Counting(), "int4-g32") if name == "convert" else Counting()
    old = model.forward
    model.forward = lambda x: old(x)
    with pytest.raises(ValueError, match=f"{name}: the whole model: its forward is patched .* ca"):
        COPIES[name](model)


def test_replaced_layers_that_a_forward_holds_are_refused_before_any_work():
    model = pair()
    first = model[0]
    model.forward = lambda x: first(x)
    q = quantise(model[0].weight, "int4-g32")
    with pytest.raises(ValueError, match="replace_layers: the whole model: its forward is patched"):
        replace_layers(model, {"1": q, "0": q}, backend="reference")
    assert [type(layer) for layer in model] == [nn.Linear, nn.Linear]


def test_loaded_layers_keep_hooks_and_attributes():
    source = Counting()
    source.layer.tag = "mine"
    result = load_model(packed(source), source, backend="reference")
    result(torch.ones(1, 32))
    assert (source.count, result.count, result.layer.tag) == (0, 1, "mine")


def test_a_forward_bound_to_that_of_the_class_is_no_patch():
    """Removed hooks of accelerate leave one."""
    model = Counting()
    model.layer.forward = model.layer.forward
    y = quantised(model, "int4-g32")(x32)
    loaded = load_model(packed(model), model, backend="reference")
    layer = QuantisedLinear.from_linear(model.layer, "int4-g32", backend="reference")
    assert torch.equal(loaded(x32), y)
    assert torch.equal(layer(x32), y)
    quantised(model, "int4-g32", inplace=True)
    assert torch.equal(model(x32), y)


def test_modules_with_two_names_are_loaded_as_one(tmp_path):
    def make():
        first, experts = nn.Linear(64, 64), mixtral().model.layers[0].mlp
        return nn.ModuleList([nn.Sequential(first, first), experts, experts])

    model = quantised(make(), "int4-g32")
    save_model(tmp_path / "m", model)
    loaded = load_model(tmp_path / "m", make(), backend="reference")
    assert loaded[0][0] is loaded[0][1]
    assert loaded[1] is loaded[2]
    x = torch.ones(1, 3, 64)
    assert torch.equal(loaded[0](x), model[0](x))
    assert torch.equal(loaded[2](x), model[2](x))


def test_loaded_experts_keep_hooks(tmp_path):
    source = mixtral()
    save_model(tmp_path / "m", quantised(source, "int4-g32"))
    calls = []
    source.model.layers[0].mlp.experts.register_forward_hook(lambda *_: calls.append(1))
    load_model(tmp_path / "m", source, backend="reference")(torch.tensor([[1, 2]]))
    assert calls == [1]


def test_load_model_refuses_layers_that_do_more():
    model = Counting()
    model.layer.forward = lambda x: x + 100
    with pytest.raises(ValueError, match="load_model: layer layer: its forward is patched"):
        load_model(packed(model), model)
    model = Counting()
    model.layer.register_buffer("offset", torch.ones(3))
    with pytest.raises(ValueError, match="load_model: layer layer: holds offset besides weight"):
        load_model(packed(model), model)


@pytest.mark.parametrize("inplace", [False, True])
def test_a_patched_layer_is_refused_or_skipped(inplace):
    model = pair()
    old = model[1].forward
    model[1].forward = lambda x: old(x) + 100
    with pytest.raises(ValueError, match="layer 1: its forward is patched"):
        quantised(model, inplace=inplace)
    y = quantised(model, skip="1", inplace=True)(torch.zeros(1, 32))
    assert y.mean() > 90


def test_a_patch_that_calls_nothing_of_the_model_is_kept():
    model = Counting()
    model.forward = lambda x: x + 1
    assert torch.equal(quantised(model)(x32), x32 + 1)


@pytest.mark.parametrize("attribute", ["helper", "layers"])
def test_other_attributes_that_hold_the_source_are_named(attribute, caplog):
    model = Counting()
    held = {"helper": lambda x: model.layer(x), "layers": [model.layer]}[attribute]
    setattr(model, attribute, held)
    result = quantised(model)
    if attribute == "layers":  # a copy copies it
        assert result.layers[0] is result.layer
        assert not caplog.records
        quantised(model, inplace=True)
    assert f"{attribute} of the whole model holds" in caplog.text


def test_compiled_models_and_layers():
    model = Counting()
    model.layer.compile(backend="eager")  # would go on to compute with the source's weight
    compiled = torch.compile(model, backend="eager")
    y = compiled(x32)
    result = quantised(compiled, "int1-g32")
    assert torch.equal(result(x32), result.layer(x32))
    assert not torch.equal(result(x32), y)
    quantised(compiled, "int1-g32", inplace=True)
    assert torch.equal(compiled(x32), result(x32))


def test_layers_with_more_than_a_weight_and_a_bias_are_refused():
    for name, value in {
        "gain": nn.Parameter(torch.ones(1)),
        "lora": nn.Linear(2, 2),
    }.items():
        model = pair()
        setattr(model[0], name, value)
        with pytest.raises(ValueError, match=f"layer 0: holds {name} besides weight and bias"):
            quantised(model)
    model = pair()
    model[0].register_buffer("mask", torch.ones(32))
    with pytest.raises(ValueError, match="layer 0: holds mask besides"):
        quantised(model)


# What is left (A7)


def mixtral():
    return MixtralForCausalLM(
        MixtralConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=256,
            num_local_experts=8,
            num_experts_per_tok=2,
        )
    )


def warnings_of(caplog):
    return [r.message for r in caplog.records if r.levelno == logging.WARNING]


class Bank(nn.Module):
    """Experts of a class that describes nothing of how it computes with them."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(8, 128, 64))
        self.down_proj = nn.Parameter(torch.randn(8, 64, 64))


def test_experts_of_unknown_classes_are_left_with_a_warning(caplog):
    model = nn.ModuleDict(
        {"up": nn.Linear(64, 64), "experts": Bank(), "embed": nn.Embedding(9, 64)}
    )
    result = quantised(model, "nf4-g64")
    (message,) = warnings_of(caplog)
    report = model_report(result)
    left = {weight.name: weight for weight in report.left}
    name, size = "experts.gate_up_proj", 8 * 128 * 64
    assert left[name] == LeftWeight(name, "3-D parameter of Bank", size, size * 4)
    unasked = sum(weight.weights for weight in report.left)
    total = report.weights + unasked
    assert f"{100 * unasked / total:.0f} % of the weights are left as they are: 3-D" in message
    assert f"3-D parameter of Bank ({name} and 1 more, " in message
    assert "Embedding (embed.weight, " in message


def test_experts_of_transformers_are_quantised():
    report = model_report(quantised(mixtral(), "nf4-g64"))
    shapes = {layer.name.rpartition(".")[2]: layer.shape for layer in report.layers}
    assert shapes["gate_up_proj"] == (8, 256, 64)
    assert shapes["down_proj"] == (8, 64, 128)


def test_weights_that_a_skip_names_are_no_surprise(caplog):
    quantised(mixtral(), "nf4-g64", skip=["experts", "embed"])
    assert not [m for m in warnings_of(caplog) if "of the weights are left" in m]


def test_parametrised_layers_and_subclasses_are_left_with_a_warning(caplog):
    normed = parametrizations.weight_norm(nn.Linear(32, 32))
    quantised(nn.Sequential(nn.Linear(32, 32), normed, nn.MultiheadAttention(32, 2)))
    (message,) = warnings_of(caplog)
    assert "2-D parameter of ParametrizationList" in message
    assert "2-D parameter of MultiheadAttention (2.in_proj_weight" in message
    assert "NonDynamicallyQuantizableLinear (2.out_proj.weight" in message


def test_little_that_is_left_is_no_warning(caplog):
    with caplog.at_level(logging.INFO, logger="fdk_formats"):
        quantised(nn.Sequential(nn.Linear(256, 256), nn.Embedding(2, 256)))
    assert not warnings_of(caplog)
    assert "left 1.weight: Embedding" in caplog.text


# Choosing


def test_a_skip_that_matches_nothing_is_named(caplog):
    quantised(Block(), skip=["^upp$", "down"])
    assert "quantise_model: skip '^upp$' matches no linear layer" in warnings_of(caplog)
    assert "'down'" not in caplog.text


def test_skip_adds_to_the_default_unless_told():
    assert type(quantised(Block(), skip="down").lm_head) is nn.Linear
    assert isinstance(quantised(Block(), skip="down", default_skip=False).lm_head, QuantisedLinear)
    assert isinstance(quantised(Block(), default_skip=False).lm_head, QuantisedLinear)


def test_a_k_that_does_not_fit_names_a_format_that_does():
    with pytest.raises(ValueError, match=r"layer 0: int4-g64: k must .* got k=96; int4-g32 fits"):
        quantised(nn.Sequential(nn.Linear(96, 8)), "int4-g64")
    with pytest.raises(ValueError, match="got k=100; nf4-row fits; skip or override it"):
        quantised(nn.Sequential(nn.Linear(100, 8)), "nf4-g64")
    assert quantised(nn.Sequential(nn.Linear(96, 8)), "int4-g32")[0].in_features == 96


@pytest.mark.parametrize("include", ["embedding", ["embeddings"], ["linear"]])
def test_include_is_checked(include):
    with pytest.raises(ValueError, match="include: wanted a list of embedding or conv1d, got"):
        quantised(Block(), include=include)


@pytest.mark.parametrize("inplace", [False, True])
def test_gpt2_with_its_conv1d_and_embeddings(inplace, tmp_path):
    torch.manual_seed(0)
    config = GPT2Config(n_embd=64, n_layer=1, n_head=2, vocab_size=96, n_positions=32)
    source = GPT2LMHeadModel(config).eval()
    ids = torch.tensor([[1, 2, 3]])
    y = source(ids).logits.detach()
    weight = source.transformer.h[0].mlp.c_fc.weight.detach().clone()
    kinds = {"include": ["embedding", "conv1d"], "default_skip": False}
    result = quantised(source, "int8-g32", inplace=inplace, **kinds)
    fc = result.transformer.h[0].mlp.c_fc
    assert type(fc) is QuantisedLinear
    assert torch.equal(fc.weight, quantise(weight.t(), "int8-g32").dequantise(torch.float32))
    assert isinstance(result.transformer.wte, QuantisedEmbedding)
    assert isinstance(result.lm_head, QuantisedLinear)  # tied to wte
    assert not model_report(result).left
    assert 0 < nrmse(result(ids).logits.detach(), y.double()) < 0.05
    save_model(tmp_path / "m", result)
    with torch.device("meta"):
        skeleton = GPT2LMHeadModel(config).eval()
    for model in (GPT2LMHeadModel(config).eval(), skeleton):
        loaded = load_model(tmp_path / "m", model, backend="reference")
        assert torch.equal(loaded(ids).logits, result(ids).logits)


def test_a_head_tied_to_an_embedding_is_quantised_with_it():
    source = Block(tied=True)
    result = quantised(source, include=["embedding"], default_skip=False)
    assert isinstance(result.embed, QuantisedEmbedding)
    assert isinstance(result.lm_head, QuantisedLinear)
    assert torch.equal(result.embed.weight, result.lm_head.weight)
    # The head is skipped by default, and the embedding with it.
    other = quantised(source, include=["embedding"])
    assert other.embed.weight is other.lm_head.weight


# Meta and sharded models (A11)


def test_a_model_on_meta_becomes_a_plan(tmp_path):
    real = quantised(Block(), include=["embedding"])
    with torch.device("meta"):
        source = Block()
    plan = quantised(source, include=["embedding"])
    assert all(parameter.device.type == "meta" for parameter in plan.parameters())
    for planned, made in zip(model_report(plan).layers, model_report(real).layers, strict=True):
        assert planned.relative_error is None
        sizes = [
            (r.name, r.format, r.shape, r.bytes_before, r.bytes_after) for r in (planned, made)
        ]
        assert sizes[0] == sizes[1]
    plan.load_state_dict(real.state_dict(), assign=True)
    assert torch.equal(plan.embed(IDS), real.embed(IDS))
    assert torch.equal(plan.up.weight, real.up.weight)
    save_model(tmp_path / "m", real)
    source.inv_freq = torch.arange(4, dtype=torch.float64)
    loaded = load_model(tmp_path / "m", source, backend="reference")
    assert torch.equal(loaded(IDS), real(IDS))


def test_a_plan_in_place():
    with torch.device("meta"):
        source = Block()
    assert quantised(source, inplace=True) is source
    assert source.up.device.type == "meta"
    assert source.up.backend_name == "reference"


def test_a_plan_of_fused_layers():
    with torch.device("meta"):
        source = Block()
        source.up2 = nn.Linear(32, 64)
    plan = quantised(source, fuse=[["up", "up2"]])
    assert plan.up2.format == Format.parse("kmeans4-g32")
    with pytest.raises(ValueError, match=r"layer up: calibration needs its values, .* meta"):
        quantised(source, calibration=[IDS])


def test_sharded_weights_are_refused():
    distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.HashStore())
    try:
        model = pair()
        mesh = init_device_mesh("cpu", (1,))
        weight = distribute_tensor(model[1].weight.data, mesh, [Replicate()])
        model[1].weight = nn.Parameter(weight)
        with pytest.raises(ValueError, match="layer 1: its weight is a DTensor: quantise the mod"):
            quantised(model)
    finally:
        distributed.destroy_process_group()
