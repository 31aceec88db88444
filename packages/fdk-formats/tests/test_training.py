import copy
import gc
import io
import itertools

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from fdk_formats import (
    QATLinear,
    QuantisedLinear,
    convert,
    fit_codebook,
    model_report,
    prepare_qat,
    quantise,
    quantise_model,
    refit,
)
from fdk_formats.training import _refitted

FORMATS = [
    *(f"kmeans{bits}-g32" for bits in (1, 2, 3, 4, 8)),
    *(f"int{bits}-g32" for bits in (1, 2, 3, 4, 8)),
    *("affine2-g32", "affine4-g32-zint", "nf4-row", "binary1-g32", "ternary2-g32"),
    *("kmeans2-g32-hadamard", "affine3-g32-search-hadamard"),
    *("kmeans2-g32-search", "int3-g32-search-e8m0", "affine3-g32-search", "kmeans3-g32-rms-fp16"),
]


class Block(nn.Module):
    recomputes = False

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 64, bias=False)

    def compute(self, x):
        return x + self.down(torch.relu(self.up(x)))

    def forward(self, x):
        if self.recomputes:
            return checkpoint(self.compute, x, use_reentrant=False)
        return self.compute(x)


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(Block(), Block())


def batch(step):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(32, 64, generator=generator)
    return x, x.roll(1, dims=1)


def train(model, steps=6, start=0, optimiser=None):
    optimiser = optimiser or torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(start, start + steps):
        x, target = batch(step)
        loss = nn.functional.mse_loss(model(x), target)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return optimiser


def qat_layers(model):
    return {name: m for name, m in model.named_modules() if isinstance(m, QATLinear)}


def weight_seen(layer, dtype=torch.float32):
    """Returns the weight that the forward pass multiplies with."""
    seen = []
    linear = nn.functional.linear

    def note(x, weight, bias=None):
        seen.append(weight.detach().clone())
        return linear(x, weight, bias)

    nn.functional.linear = note
    try:
        layer(torch.ones(1, layer.in_features, dtype=dtype))
    finally:
        nn.functional.linear = linear
    return seen[0]


def assert_converts_exactly(model, dtype=torch.float32):
    seen = {name: weight_seen(layer, dtype) for name, layer in qat_layers(model).items()}
    converted = convert(model, backend="reference")
    for name, weight in seen.items():
        layer = converted.get_submodule(name)
        assert type(layer) is QuantisedLinear
        assert torch.equal(layer.quantised.dequantise(weight.dtype), weight), name
    x, _ = batch(99)
    with torch.no_grad():
        found, wanted = converted(x.to(dtype)), model(x.to(dtype))
    if any(layer.format.rotation for layer in model_report(converted).layers):
        torch.testing.assert_close(found, wanted)  # x is rotated, in the place of the weight
    else:
        assert torch.equal(found, wanted)
    return converted


@pytest.mark.parametrize("learn", [(), ("codebook", "scale")], ids=["rules", "learned"])
@pytest.mark.parametrize("format", FORMATS)
def test_the_converted_layer_is_what_was_trained(format, learn):
    if not format.startswith("kmeans"):
        learn = [each for each in learn if each != "codebook"]
    model = prepare_qat(network(), format, learn=learn, refit_every=4)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    train(model)
    for name, parameter in model.named_parameters():
        assert not torch.equal(parameter, before[name]), name
    converted = assert_converts_exactly(model)
    assert [str(layer.format) for layer in model_report(converted).layers] == [format] * 4


def test_names_and_parameters_stay_those_of_the_plain_model():
    plain = network()
    names = dict(plain.named_parameters())
    model = prepare_qat(plain, "kmeans2-g32", inplace=True)
    assert model is plain
    assert dict(model.named_parameters()) == names  # the same objects
    assert all(isinstance(layer, nn.Linear) for layer in qat_layers(model).values())
    more = set(model.state_dict()) - set(names)
    layers = [f"{i}.{name}" for i in (0, 1) for name in ("up", "down")]
    assert more == {f"{n}.{own}" for n in layers for own in ("codebook", "refit_step")}
    assert set(prepare_qat(network(), "int4-g32").state_dict()) == set(names)
    assert str(model[0].up) == "QATLinear(in_features=64, out_features=96, bias=True)"


def test_a_copy_is_made_unless_inplace():
    plain = network()
    model = prepare_qat(plain, "int2-g32")
    assert type(plain[0].up) is nn.Linear
    assert type(model[0].up) is QATLinear
    converted = convert(model, backend="reference")
    assert type(model[0].up) is QATLinear
    assert convert(model, backend="reference", inplace=True) is model
    assert type(model[0].up) is QuantisedLinear
    x, _ = batch(0)
    assert torch.equal(model(x), converted(x))


def test_an_untrained_model_converts_as_quantise_model_does():
    for format in ("kmeans3-g32", "int2-g32", "affine4-g32"):
        aware = convert(prepare_qat(network(), format), backend="reference")
        plain = quantise_model(network(), format, backend="reference")
        for (name, a), (_, b) in zip(
            aware.state_dict().items(), plain.state_dict().items(), strict=True
        ):
            assert torch.equal(a, b), (format, name)


def test_overrides_and_skips():
    overrides = {r"0\.up$": "int8-g32", r"1\.down$": None}
    model = prepare_qat(network(), "kmeans2-g32", skip=r"1\.up$", overrides=overrides)
    layers = {name: str(layer.qat.format) for name, layer in qat_layers(model).items()}
    assert layers == {"0.up": "int8-g32", "0.down": "kmeans2-g32"}
    assert type(model[1].up) is type(model[1].down) is nn.Linear
    train(model)
    assert_converts_exactly(model)


@pytest.mark.parametrize("learn", [(), ("codebook", "scale")], ids=["rules", "learned"])
@pytest.mark.parametrize("format", ["kmeans2-g32", "affine2-g32", "kmeans1-g32"])
def test_fine_tuning_recovers_what_quantising_loses(format, learn):
    def loss(model):
        x, target = batch(1000)
        return nn.functional.mse_loss(model(x), target).item()

    plain = network()
    train(plain, 150)
    learn = [each for each in learn if each == "scale" or format.startswith("kmeans")]
    aware = prepare_qat(plain, format, learn=learn)
    optimiser = torch.optim.AdamW(aware.parameters(), lr=1e-3)
    train(aware, 120, start=150, optimiser=optimiser)
    after = loss(quantise_model(plain, format, backend="reference"))
    assert loss(convert(aware, backend="reference")) < 0.8 * after


def test_refits_follow_the_steps_of_the_optimiser():
    model = prepare_qat(network(), "kmeans2-g32", refit_every=3)
    layer = model[0].up
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = [layer.codebook.clone()]
    for step in range(7):
        for part in range(2):  # two backward passes to one step
            x, target = batch(2 * step + part)
            nn.functional.mse_loss(model(x), target).backward()
        model.eval()(x)
        model.train()
        optimiser.step()
        optimiser.zero_grad()
        seen.append(layer.codebook.clone())
    changed = [not torch.equal(a, b) for a, b in itertools.pairwise(seen)]
    assert changed == [False, False, True, False, False, True, False]
    assert int(layer.refit_step) == 7


def test_a_refit_is_no_worse_than_the_codebook_before_and_near_a_new_fit():
    torch.manual_seed(0)
    model = prepare_qat(network(), "kmeans3-g32", refit_every=0)
    before = {name: layer.codebook.clone() for name, layer in qat_layers(model).items()}
    train(model, 20)
    assert all(torch.equal(qat_layers(model)[name].codebook, old) for name, old in before.items())

    def error(layer, codebook):
        q = quantise(layer.weight, "kmeans3-g32", codebook=codebook)
        return (q.dequantise() - layer.weight).square().sum().item()

    refit(model)
    for name, layer in qat_layers(model).items():
        new = error(layer, fit_codebook(layer.weight, "kmeans3-g32"))
        assert error(layer, layer.codebook) < error(layer, before[name])
        assert error(layer, layer.codebook) < 1.02 * new


def test_learned_codebooks_are_not_refitted():
    model = prepare_qat(network(), "kmeans2-g32", learn=["codebook"], refit_every=1)
    assert "0.up.codebook" in dict(model.named_parameters())
    codebook = model[0].up.codebook.detach().clone()
    refit(model)
    assert torch.equal(model[0].up.codebook, codebook)


def test_other_optimisers_do_not_count():
    model, other = prepare_qat(network(), "kmeans2-g32", refit_every=1), network()
    codebook = model[0].up.codebook.clone()
    train(other)
    assert torch.equal(model[0].up.codebook, codebook)


def test_layers_that_are_gone_are_not_kept():
    gc.collect()
    before = len(_refitted)
    model = prepare_qat(network(), "kmeans2-g32")
    assert len(_refitted) == before + 4
    del model
    gc.collect()
    assert len(_refitted) == before


def test_copies_are_refitted_too():
    model = prepare_qat(network(), "kmeans2-g32", refit_every=2)
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    copies = [copy.deepcopy(model), torch.load(stream, weights_only=False)]
    train(model)
    for other in copies:
        train(other)
        for name, tensor in model.state_dict().items():
            assert torch.equal(other.state_dict()[name], tensor), name


@pytest.mark.parametrize("learn", [(), ("codebook", "scale")])
def test_a_checkpoint_resumes_exactly(learn):
    """Also between two refits, which go on counting."""
    whole = prepare_qat(network(), "kmeans2-g32", learn=learn, refit_every=4)
    train(whole, steps=10)

    first = prepare_qat(network(), "kmeans2-g32", learn=learn, refit_every=4)
    optimiser = train(first, steps=6)
    saved = copy.deepcopy((first.state_dict(), optimiser.state_dict()))
    second = prepare_qat(network(seed=1), "kmeans2-g32", learn=learn, refit_every=4)
    resumed = torch.optim.AdamW(second.parameters(), lr=3e-3)
    second.load_state_dict(saved[0])
    resumed.load_state_dict(saved[1])
    train(second, steps=4, start=6, optimiser=resumed)
    for name, tensor in whole.state_dict().items():
        assert torch.equal(second.state_dict()[name], tensor), name


def test_a_plain_checkpoint_loads():
    state = network().state_dict()
    model = prepare_qat(network(seed=1), "kmeans2-g32")
    missing = model.load_state_dict(state, strict=False)
    assert missing.unexpected_keys == []
    assert {name.rpartition(".")[2] for name in missing.missing_keys} == {"codebook", "refit_step"}


def test_activation_checkpointing_changes_nothing():
    model = prepare_qat(network(), "kmeans2-g32", refit_every=2)
    other = copy.deepcopy(model)
    for block in other:
        block.recomputes = True
    train(model)
    train(other)
    for name, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name


# aot_eager traces, where graph breaks show, and needs no C++ compiler.
@pytest.mark.parametrize("learn", [(), ("codebook", "scale")])
def test_compile_fullgraph_trains_alike_and_compiles_once(learn):
    model = prepare_qat(network(), "kmeans2-g32", learn=learn, refit_every=2)
    other = copy.deepcopy(model)
    torch.compiler.reset()
    compiled = torch.compile(other, fullgraph=True, backend="aot_eager")
    train(model)
    with torch._dynamo.config.patch(error_on_recompile=True):
        train(compiled)
    for name, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name


def test_autocast_converts_exactly_in_its_dtype():
    model = prepare_qat(network(), "kmeans3-g32")
    x, target = batch(0)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with torch.autocast("cpu", torch.bfloat16):
        loss = nn.functional.mse_loss(model(x).float(), target)
    loss.backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    optimiser.step()
    layer = model[0].up
    with torch.autocast("cpu", torch.bfloat16):
        seen = weight_seen(layer)
        y = layer(x)
    assert seen.dtype == y.dtype == torch.bfloat16
    converted = convert(model, backend="reference")[0].up
    assert torch.equal(converted.quantised.dequantise(torch.bfloat16), seen)
    assert torch.equal(converted.bfloat16()(x.bfloat16()), y)


def test_a_model_in_bf16():
    model = prepare_qat(network().bfloat16(), "kmeans3-g32", learn=["codebook", "scale"])
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    x, target = batch(0)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    nn.functional.mse_loss(model(x.bfloat16()), target.bfloat16()).backward()
    optimiser.step()
    assert_converts_exactly(model, torch.bfloat16)


def test_custom_codebooks():
    table = torch.tensor([-1.0, -0.2, 0.2, 1.0])
    model = prepare_qat(network(), "custom2-g32", codebook=table)
    assert torch.equal(model[0].up.codebook, table)
    assert model[0].up.codebook is not model[1].up.codebook
    train(model)
    assert torch.equal(model[0].up.codebook, table)
    assert_converts_exactly(model)
    with pytest.raises(ValueError, match="custom2-g32 needs codebook=, 4 values"):
        prepare_qat(network(), "custom2-g32")


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


@pytest.mark.parametrize("learn", [(), ("codebook", "scale")])
def test_tied_layers_stay_tied(learn):
    model = prepare_qat(Tied(), "kmeans2-g32", learn=learn, refit_every=2)
    assert model.first.weight is model.second.weight
    assert model.first.codebook is model.second.codebook
    train(model)
    converted = assert_converts_exactly(model)
    assert converted.first.weight_packed is converted.second.weight_packed


class Hooked(nn.Linear):
    pass


def test_subclasses_are_refused_by_name_unless_skipped():
    model = network()
    model[1].up = Hooked(64, 96)
    with pytest.raises(ValueError, match=r"prepare_qat: layer 1\.up: is a Hooked, .* skip it"):
        prepare_qat(model, "int2-g32")
    assert list(qat_layers(prepare_qat(model, "int2-g32", skip=r"1\.up"))) == [
        "0.up",
        "0.down",
        "1.down",
    ]
    prepared = prepare_qat(network(), "int2-g32")
    with pytest.raises(ValueError, match=r"layer 0\.up: is a QATLinear"):
        prepare_qat(prepared, "int4-g32")


def test_parametrised_and_patched_layers_are_refused_by_name():
    model = network()
    parametrizations.orthogonal(model[0].down)
    with pytest.raises(ValueError, match=r"prepare_qat: layer 0\.down: is a ParametrizedLinear"):
        prepare_qat(model, "int2-g32")
    model = network()
    model[0].up.forward = lambda x: x
    with pytest.raises(ValueError, match=r"prepare_qat: layer 0\.up: its forward is patched"):
        prepare_qat(model, "int2-g32")
    model = network()
    with pytest.warns(FutureWarning, match="weight_norm"):
        nn.utils.weight_norm(model[0].up)
    with pytest.raises(ValueError, match=r"prepare_qat: layer 0\.up: its weight must be a param"):
        prepare_qat(model, "int2-g32")


def test_a_prepared_model_is_not_changed_by_a_refusal():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 40), nn.Linear(40, 8))
    with pytest.raises(ValueError, match=r"prepare_qat: layer 2: .*k must be a positive multiple"):
        prepare_qat(model, "int2-g32", inplace=True)
    assert [type(layer) for layer in model] == [nn.Linear] * 3


def test_hooks_stay():
    plain, calls = network(), []
    plain[0].up.register_forward_hook(lambda *_: calls.append(1))
    model = prepare_qat(plain, "int2-g32")
    x, _ = batch(0)
    model(x)
    assert calls == [1]
    convert(model, backend="reference")(x)
    assert calls == [1, 1]


def test_a_model_on_meta_is_prepared_and_loaded():
    source = prepare_qat(network(), "kmeans2-g32-search", learn=["scale"])
    with torch.device("meta"):
        model = prepare_qat(network(), "kmeans2-g32-search", learn=["scale"])
    model.load_state_dict(source.state_dict(), assign=True)
    x, _ = batch(0)
    assert torch.equal(model(x), source(x))


def test_bad_arguments():
    with pytest.raises(TypeError, match="prepare_qat: model must be a module, got dict"):
        prepare_qat({}, "int2-g32")
    with pytest.raises(ValueError, match=r"learn: wanted a list of .*, got 'scale'"):
        prepare_qat(network(), "int2-g32", learn="scale")
    with pytest.raises(ValueError, match="int2-g32 has no codebook to learn"):
        prepare_qat(network(), "int2-g32", learn=["codebook"])
    with pytest.raises(ValueError, match="refit_every must be at least 0, got -1"):
        prepare_qat(network(), "int2-g32", refit_every=-1)
    with pytest.raises(ValueError, match="prepare_qat: override 'x' fits no linear layer"):
        prepare_qat(network(), "int2-g32", overrides={"x": None})
    with pytest.raises(ValueError, match="convert: wanted a model of prepare_qat"):
        convert(network())


def test_a_single_layer():
    layer = prepare_qat(nn.Linear(64, 8), "int2-g32")
    assert type(layer) is QATLinear
    assert type(convert(layer, backend="reference")) is QuantisedLinear
    same = convert(layer, backend="reference", inplace=True)
    assert type(same) is QuantisedLinear
