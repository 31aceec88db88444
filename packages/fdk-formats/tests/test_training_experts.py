"""Experts that train with quantised weights."""

import copy
import io

import pytest
import torch
from mixtures import Experts, Mixture
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from fdk_formats import (
    QATExperts,
    QATLinear,
    QuantisedExperts,
    convert,
    fake_quantise,
    prepare_qat,
    quantise_model,
    quantise_stack,
    refit,
)

FORMATS = ["kmeans2-g16", "kmeans4-g16-search", "int3-g16", "affine4-g16-zint", "nf4-row"]
FORMATS += ["kmeans2-g16-hadamard"]
LEARN = [(), ("codebook", "scale")]


class Recomputed(nn.Module):
    """Runs a module again in the backward pass."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return checkpoint(self.module, x, use_reentrant=False)


def mixture(seed=0, *, transposed=False):
    torch.manual_seed(seed)
    return Mixture(transposed=transposed)


def batch(step):
    x = torch.randn(24, 32, generator=torch.Generator().manual_seed(step))
    return x, x.roll(1, dims=1)


def loss_of(model, step):
    x, wanted = batch(step)
    return nn.functional.mse_loss(model(x), wanted)


def train(model, steps=6, start=0, optimiser=None):
    optimiser = optimiser or torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(start, start + steps):
        optimiser.zero_grad()
        loss_of(model, step).backward()
        optimiser.step()
    return optimiser


def learnable(format, learn):
    return [each for each in learn if each == "scale" or format.startswith("kmeans")]


@torch.no_grad()
def assert_converts_exactly(model):
    converted = convert(model, backend="reference")
    x, _ = batch(99)
    if "hadamard" in str(converted):
        torch.testing.assert_close(converted(x), model(x))  # x is rotated, not the weight
    else:
        assert torch.equal(converted(x), model(x))
    return converted


def assert_same(model, other):
    assert model.state_dict().keys() == other.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name


@pytest.mark.parametrize("learn", LEARN, ids=["rules", "learned"])
@pytest.mark.parametrize("transposed", [False, True], ids=["mixtral", "gpt-oss"])
@pytest.mark.parametrize("format", FORMATS)
def test_the_converted_mixture_is_what_was_trained(format, transposed, learn):
    plain = mixture(transposed=transposed)
    model = prepare_qat(plain, format, learn=learnable(format, learn), refit_every=4)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    train(model)
    for name, parameter in model.named_parameters():
        assert not torch.equal(parameter, before[name]), name
    converted = assert_converts_exactly(model)
    assert type(converted.experts) is QuantisedExperts
    for name in ("gate_up_proj", "down_proj"):
        projection = converted.experts.get_submodule(name)
        assert str(projection.format) == format
        seen = model.experts.fake_quantised(name, torch.float32)
        assert torch.equal(projection.dequantise(), seen)


@pytest.mark.parametrize("transposed", [False, True], ids=["mixtral", "gpt-oss"])
def test_names_and_parameters_stay_those_of_the_plain_mixture(transposed):
    plain = mixture(transposed=transposed)
    names = dict(plain.named_parameters())
    model = prepare_qat(plain, "kmeans2-g16", inplace=True)
    assert model is plain
    assert dict(model.named_parameters()) == names  # the same objects
    assert type(model.experts) is QATExperts
    assert type(model.out_proj) is QATLinear
    projections = [f"experts.{name}_" for name in ("gate_up_proj", "down_proj")]
    owners = ["out_proj.", *projections]
    more = {owner + name for owner in owners for name in ("codebook", "refit_step")}
    assert set(model.state_dict()) == set(names) | more
    assert "gate_up_proj=kmeans2-g16, down_proj=kmeans2-g16" in str(model.experts)
    x, _ = batch(0)
    wanted = model(x)
    converted = convert(model, backend="reference", inplace=True)
    assert converted is model
    assert type(model.experts) is QuantisedExperts
    assert torch.equal(model(x), wanted)


@pytest.mark.parametrize("format", ["kmeans3-g16", "int2-g16"])
def test_an_untrained_mixture_converts_as_quantise_model_does(format):
    aware = convert(prepare_qat(mixture(), format), backend="reference")
    assert_same(aware, quantise_model(mixture(), format, backend="reference"))


@pytest.mark.parametrize("transposed", [False, True], ids=["mixtral", "gpt-oss"])
def test_gradients_are_those_of_the_dequantised_mixture(transposed):
    """Compared with the module's own forward, on weights that are quantised already."""
    model = prepare_qat(mixture(transposed=transposed), "int4-g16", skip="out_proj")
    plain = mixture(transposed=transposed)
    for name in ("gate_up_proj", "down_proj"):
        stack = model.experts.fake_quantised(name, torch.float32).detach()
        plain.experts._parameters[name].data = stack.mT.clone() if transposed else stack
    loss_of(model, 0).backward()
    loss_of(plain, 0).backward()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, parameter.grad)


@pytest.mark.parametrize("learn", LEARN, ids=["rules", "learned"])
def test_training_lowers_the_loss_of_the_converted_mixture(learn):
    plain = mixture()
    before = loss_of(quantise_model(plain, "kmeans2-g16", backend="reference"), 1000)
    model = prepare_qat(plain, "kmeans2-g16", learn=learn)
    train(model, 80)
    assert loss_of(convert(model, backend="reference"), 1000) < 0.8 * before


def test_overrides_and_skips():
    overrides = {r"experts\.gate_up_proj$": "int8-g16", "out_proj": None}
    model = prepare_qat(mixture(), "kmeans2-g16", overrides=overrides)
    assert {name: str(s.format) for name, s in model.experts.qat.items()} == {
        "gate_up_proj": "int8-g16",
        "down_proj": "kmeans2-g16",
    }
    assert type(model.out_proj) is nn.Linear
    train(model)
    assert_converts_exactly(model)
    model = prepare_qat(mixture(), "kmeans2-g16", skip=[r"experts\.down_proj"])
    assert list(model.experts.qat) == ["gate_up_proj"]
    train(model)
    converted = assert_converts_exactly(model)
    assert torch.equal(converted.experts.down_proj.weight, model.experts.down_proj)
    model = prepare_qat(mixture(), "kmeans2-g16", skip=["experts"])
    assert type(model.experts) is Experts


def test_refits_follow_the_steps_of_the_optimiser_for_each_expert():
    model = prepare_qat(mixture(), "kmeans2-g16", refit_every=3)
    experts, tables = model.experts, []
    optimiser = None
    for step in range(4):
        tables.append(experts.down_proj_codebook.clone())
        optimiser = train(model, 1, start=step, optimiser=optimiser)
    assert torch.equal(tables[0], tables[1])
    assert torch.equal(tables[1], tables[2])
    assert all(not torch.equal(*pair) for pair in zip(tables[2], tables[3], strict=True))
    assert int(experts.down_proj_refit_step) == 4

    def error(codebook):
        q = quantise_stack(experts.down_proj.detach(), "kmeans2-g16", codebook=codebook)
        return (q.dequantise(torch.float32) - experts.down_proj).square().sum((1, 2))

    train(model, 1, optimiser=optimiser)
    before = error(experts.down_proj_codebook)
    refit(model)
    assert (error(experts.down_proj_codebook) < before).all()


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("format", ["kmeans2-g16", "custom2-g16"])
def test_given_codebooks(format, shared):
    table = torch.tensor([-1.0, -0.3, 0.2, 1.0])
    given = table if shared else table * torch.tensor([[1.0], [0.9], [0.8], [0.7]])
    names = ["experts.gate_up_proj", "experts.down_proj"]
    codebook = dict.fromkeys(names, given) | {"out_proj": table}
    model = prepare_qat(mixture(), format, codebook=codebook, refit_every=2)
    assert torch.equal(model.experts.down_proj_codebook, given)
    train(model)
    assert torch.equal(model.experts.down_proj_codebook, given) == (format == "custom2-g16")
    converted = assert_converts_exactly(model)
    assert converted.experts.down_proj.weight_codebook.shape == (1 if shared else 4, 4)
    with pytest.raises(ValueError, match=r"layer experts\.down_proj: .* or \[4, 4\], got \[3"):
        prepare_qat(mixture(), format, codebook=codebook | {"experts.down_proj": torch.ones(3, 4)})


def test_activation_checkpointing_changes_nothing():
    model = prepare_qat(mixture(), "kmeans2-g16", learn=["scale"], refit_every=2)
    other = copy.deepcopy(model)
    train(model)
    train(Recomputed(other))
    assert_same(model, other)


@pytest.mark.parametrize("learn", LEARN, ids=["rules", "learned"])
def test_compile_fullgraph_trains_alike_and_compiles_once(learn):
    model = prepare_qat(mixture(), "kmeans2-g16", learn=learn, refit_every=2)
    other = copy.deepcopy(model)
    torch.compiler.reset()
    compiled = torch.compile(other, fullgraph=True, backend="aot_eager")
    train(model)
    with torch._dynamo.config.patch(error_on_recompile=True):
        train(compiled)
    assert_same(model, other)


@pytest.mark.parametrize("transposed", [False, True], ids=["mixtral", "gpt-oss"])
def test_autocast_converts_exactly_in_its_dtype(transposed):
    model = prepare_qat(mixture(transposed=transposed), "kmeans3-g16")
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with torch.autocast("cpu", torch.bfloat16):
        loss_of(model, 0).backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    optimiser.step()
    x, _ = batch(1)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        wanted = model(x)
        assert torch.equal(convert(model, backend="reference")(x), wanted)


def test_a_mixture_in_bf16():
    model = prepare_qat(mixture().bfloat16(), "kmeans3-g16", learn=["codebook", "scale"])
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    x, wanted = (each.bfloat16() for each in batch(0))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    nn.functional.mse_loss(model(x), wanted).backward()
    optimiser.step()
    with torch.no_grad():
        assert torch.equal(convert(model, backend="reference")(x), model(x))


def test_copies_and_checkpoints_go_on_exactly():
    model = prepare_qat(mixture(), "kmeans2-g16", refit_every=4)
    optimiser = train(model, 6)
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    loaded = prepare_qat(mixture(seed=1), "kmeans2-g16", refit_every=4)
    loaded.load_state_dict(model.state_dict())
    others = [copy.deepcopy(model), torch.load(stream, weights_only=False), loaded]
    saved = copy.deepcopy(optimiser.state_dict())
    train(model, 4, start=6, optimiser=optimiser)
    for other in others:
        resumed = torch.optim.AdamW(other.parameters(), lr=3e-3)
        resumed.load_state_dict(copy.deepcopy(saved))
        train(other, 4, start=6, optimiser=resumed)
        assert_same(model, other)


class Twice(nn.Module):
    """Two modules of experts with one down projection."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Mixture(), Mixture()
        self.second.experts.down_proj = self.first.experts.down_proj

    def forward(self, x):
        return self.second(self.first(x))


def test_a_projection_that_two_modules_share_is_left_as_quantise_model_leaves_it():
    torch.manual_seed(0)
    model = prepare_qat(Twice(), "kmeans2-g16")
    for each in (model.first, model.second):
        assert list(each.experts.qat) == ["gate_up_proj"]
    assert model.first.experts.down_proj is model.second.experts.down_proj
    train(model)
    assert_converts_exactly(model)


def test_a_module_of_experts_alone():
    torch.manual_seed(0)
    experts = Experts()
    x, ids, weights = torch.randn(5, 32), torch.randint(0, 4, (5, 2)), torch.rand(5, 2)
    model = prepare_qat(experts, "int2-g16")
    assert type(model) is QATExperts
    converted = convert(model, backend="reference")
    assert type(converted) is QuantisedExperts
    with torch.no_grad():
        assert torch.equal(converted(x, ids, weights), model(x, ids, weights))


def test_a_mixture_on_meta_is_prepared_and_loaded():
    source = prepare_qat(mixture(), "kmeans2-g16-search", learn=["scale"])
    with torch.device("meta"):
        model = prepare_qat(mixture(), "kmeans2-g16-search", learn=["scale"])
    model.load_state_dict(source.state_dict(), assign=True)
    x, _ = batch(0)
    assert torch.equal(model(x), source(x))


class Halved(nn.Module):
    def forward(self, weight):
        return weight / 2


def test_what_cannot_be_handled_is_refused_by_name():
    prepared = prepare_qat(mixture(), "int2-g16")
    with pytest.raises(ValueError, match=r"layer experts: is a QATExperts, .* prepared already"):
        prepare_qat(prepared, "int4-g16", skip="out_proj")
    model = mixture()
    parametrize.register_parametrization(model.experts, "down_proj", Halved())
    with pytest.raises(ValueError, match=r"layer experts: is a ParametrizedExperts, .* skip it"):
        prepare_qat(model, "int2-g16")
    assert type(prepare_qat(model, "int2-g16", skip="experts").out_proj) is QATLinear
    model = mixture()
    model.experts.forward = lambda *args: args[0]
    with pytest.raises(ValueError, match=r"layer experts\.gate_up_proj: its forward is patched"):
        prepare_qat(model, "int2-g16")
    with pytest.raises(ValueError, match=r"layer experts\.gate_up_proj: int2-g64: k must be"):
        prepare_qat(mixture(), "int2-g64", skip="out_proj")


def test_scale_factors_of_a_stack():
    torch.manual_seed(0)
    weight, scale_log2 = torch.randn(3, 8, 32), torch.randn(3, 8, 2)
    q = quantise_stack(weight, "int3-g16", scale_log2=scale_log2)
    wanted = fake_quantise(weight, "int3-g16", scale_log2=scale_log2)
    assert torch.equal(q.dequantise(torch.float32), wanted)
    with pytest.raises(ValueError, match=r"quantise_stack: scale_log2 must be \[3, 8, 2\], got"):
        quantise_stack(weight, "int3-g16", scale_log2=scale_log2[0])
