import logging
import sys

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from fdk_formats import (
    Format,
    NoBackendError,
    QuantisedLinear,
    model_report,
    quantise,
    quantise_model,
    relative_error,
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
    with pytest.warns(UserWarning, match="nothing to quantise: 3 linear layers, all left"):
        quantised(Block(), skip=".*")


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
