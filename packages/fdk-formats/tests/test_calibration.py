"""Calibrating whole models block after block."""

import copy
import logging

import pytest
import torch
from torch import nn

from fdk_formats import (
    Format,
    QuantisedEmbedding,
    QuantisedLinear,
    calibration,
    choose_formats,
    quantise,
    quantise_model,
    replace_layers,
)
from fdk_formats.calibration import calibrate, random_windows, token_windows
from fdk_formats.compensate import output_error

K = 32


class Block(nn.Module):
    """A block that also needs a keyword argument, and returns a tuple if asked to."""

    def __init__(self, as_tuple=False):
        super().__init__()
        self.q, self.k = nn.Linear(K, K, bias=False), nn.Linear(K, K)
        self.down = nn.Linear(K, K)
        self.as_tuple = as_tuple

    def forward(self, x, shift=None):
        y = x + self.down(torch.tanh(self.q(x) * self.k(x)) + shift)
        return (y, None) if self.as_tuple else y


class Chain(nn.Module):
    def __init__(self, depth=3, as_tuple=False):
        super().__init__()
        self.embed = nn.Embedding(50, K)
        self.blocks = nn.ModuleList(Block(as_tuple) for _ in range(depth))
        self.head = nn.Linear(K, 50)
        self.calls = 0

    def forward(self, ids):
        x, shift = self.embed(ids), torch.ones(K) / 8
        for block in self.blocks:
            out = block(x, shift=shift)
            x = out[0] if isinstance(out, tuple) else out
        return self.head(x)


class Parallel(nn.Module):
    """Equal modules that do not follow on each other."""

    def __init__(self):
        super().__init__()
        self.arms = nn.ModuleList(nn.Sequential(nn.Linear(K, K), nn.Tanh()) for _ in range(3))

    def forward(self, x):
        return sum(arm(x) for arm in self.arms)


def build(kind=Chain, **options):
    torch.manual_seed(0)
    return kind(**options).eval()


def tokens(count=12, seed=1):
    return torch.randint(0, 50, (count, 20), generator=torch.Generator().manual_seed(seed))


def linear_names(model):
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]


def run(model, inputs, format="int3-g16", names=None, replace=True, **options):
    """Quantises in place; returns all layers by name."""
    found = {}
    formats = dict.fromkeys(names or linear_names(model), format)
    for layers in calibrate(model, formats, inputs, progress=False, **options):
        if replace:
            replace_layers(
                model, {each.name: each.quantised for each in layers}, backend="reference"
            )
        found |= {each.name: each for each in layers}
    return found


def moments_of(model, name, batches):
    """Returns the mean of x x^T over what a layer is given, summed call by call."""
    seen = []
    handle = model.get_submodule(name).register_forward_pre_hook(
        lambda _, args: seen.append(args[0])
    )
    with torch.no_grad():
        for ids in batches:
            model(ids)
    handle.remove()
    total = torch.zeros(K, K)
    for x in seen:
        total.addmm_(x.reshape(-1, K).T, x.reshape(-1, K))
    return total / sum(x.numel() // K for x in seen)


def same(a, b):
    return all(torch.equal(a.tensors()[name], b.tensors()[name]) for name in a.tensors())


@pytest.mark.parametrize("as_tuple", [False, True])
def test_each_block_sees_what_the_quantised_blocks_before_give(as_tuple):
    source, model = (build(as_tuple=as_tuple) for _ in range(2))
    found = run(model, tokens().split(4))
    assert list(found) == linear_names(source)
    # By hand: the first block is calibrated with the source model, the second with a model whose
    # first block is quantised, the head with a model whose blocks all are.
    staged = build(as_tuple=as_tuple)
    for names in (["blocks.0"], ["blocks.1"], ["blocks.2"], ["head"]):
        own = [name for name in found if name.startswith(names[0])]
        for name in own:
            weight, q = source.get_submodule(name).weight, found[name].quantised
            moments = moments_of(staged, name, tokens().split(4))
            assert same(q, quantise(weight, "int3-g16", hessian=moments)), name
            assert found[name].output_error == output_error(weight, q.dequantise(), moments)
        replace_layers(staged, {name: found[name].quantised for name in own}, backend="reference")


def test_calibration_lowers_the_error_of_the_model():
    source, calibrated, plain = (build() for _ in range(3))
    few = torch.randn(50, 3) @ torch.randn(3, K) / 2  # inputs that go together
    for model in (source, calibrated, plain):
        model.embed.weight.data = few
    run(calibrated, tokens(), "kmeans2-g16")
    names = linear_names(plain)
    weights = {name: plain.get_submodule(name).weight for name in names}
    plain_weights = {n: quantise(w, "kmeans2-g16-search") for n, w in weights.items()}
    replace_layers(plain, plain_weights, backend="reference")
    held_out = tokens(seed=9)
    with torch.no_grad():
        wanted = source(held_out)
        errors = [(model(held_out) - wanted).square().mean() for model in (calibrated, plain)]
    assert errors[0] < 0.7 * errors[1]
    assert isinstance(calibrated.blocks[0].q, QuantisedLinear)


@pytest.mark.parametrize("kind", ["tensor", "tuple", "dict"])
def test_inputs_of_every_kind(kind):
    ids = tokens()
    inputs = {
        "tensor": ids,
        "tuple": [(row,) for row in ids.split(1)],
        "dict": [{"ids": row} for row in ids.split(1)],
    }[kind]
    found, wanted = run(build(), inputs), run(build(), iter(ids.split(1)))
    assert all(same(found[name].quantised, wanted[name].quantised) for name in wanted)


def test_layers_of_one_input_share_their_moments():
    model, seen = build(), []
    original = torch.Tensor.addmm_
    try:
        torch.Tensor.addmm_ = lambda self, *args: seen.append(1) or original(self, *args)
        run(model, tokens(2))
    finally:
        torch.Tensor.addmm_ = original
    # Two calls, and per block one input for q and k and one for down; one input of the head.
    assert len(seen) == 2 * (3 * 2 + 1)


def test_blocks_run_twice_and_the_source_once(monkeypatch):
    model, calls = build(), []
    for block in model.blocks:
        block.register_forward_hook(lambda *_: calls.append(1))
    run(model, tokens(4), names=[f"blocks.{i}.q" for i in range(3)])
    # Per input and block one run for the moments, one for the outputs. The recording calls hooks
    # of the stubs, except of the last, which ends the run.
    assert len(calls) == 4 * (2 * 3 + 2)
    assert "forward" not in vars(model.blocks[0])


def test_modules_that_are_no_chain_are_calibrated_at_the_end():
    x = torch.randn(9, 7, K, generator=torch.Generator().manual_seed(0))
    found = run(build(Parallel), x)
    moments = x.reshape(-1, K).T @ x.reshape(-1, K) / 63
    for name, layer in found.items():
        weight = build(Parallel).get_submodule(name).weight
        assert layer.output_error == pytest.approx(
            output_error(weight, layer.quantised.dequantise(), moments), rel=1e-3
        )


def test_a_single_linear_model_and_layers_never_called(caplog):
    class Idle(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle = nn.Linear(K, K), nn.Linear(K, K)

        def forward(self, x):
            return self.used(x)

    model = build(Idle)
    with caplog.at_level(logging.WARNING):
        found = run(model, [torch.randn(5, K)])
    assert "idle: never called" in caplog.text
    assert found["idle"].output_error is None
    assert same(found["idle"].quantised, quantise(build(Idle).idle.weight, "int3-g16"))


@pytest.mark.parametrize("stop", [0, 1, 2])
def test_resumed_after_a_kill_bit_for_bit(tmp_path, stop):
    wanted = run(build(), tokens(), "kmeans3-g16")
    model = build()
    formats = dict.fromkeys(linear_names(model), "kmeans3-g16")
    steps = calibrate(model, formats, tokens(), folder=tmp_path, progress=False)
    for _ in range(stop):
        replace_layers(
            model, {each.name: each.quantised for each in next(steps)}, backend="reference"
        )
    steps.close()
    assert len(list(tmp_path.glob("quantised-*"))) == stop
    found = run(build(), tokens(), "kmeans3-g16", folder=tmp_path)
    assert list(found) == list(wanted)
    for name, layer in wanted.items():
        assert same(found[name].quantised, layer.quantised)
        assert found[name].relative_error == layer.relative_error
        assert found[name].output_error == layer.output_error
    again = run(build(), tokens(), "kmeans3-g16", folder=tmp_path)
    assert all(same(again[name].quantised, wanted[name].quantised) for name in wanted)


def test_a_folder_of_other_arguments_is_refused(tmp_path):
    run(build(), tokens(), folder=tmp_path)
    for change in ({"inputs": tokens(seed=5)}, {"format": "int2-g16"}):
        with pytest.raises(ValueError, match="holds results of another"):
            run(build(), **({"inputs": tokens(), "folder": tmp_path} | change))


def test_errors_name_the_cause():
    with pytest.raises(ValueError, match="no calibration inputs"):
        run(build(), [])
    with pytest.raises(ValueError, match="'embed' is no linear layer of the model, nor experts"):
        run(build(), tokens(), names=["embed"])
    with pytest.raises(ValueError, match="iterable of model inputs, got str"):
        run(build(), "a text")
    broken = build()
    with torch.no_grad():
        broken.blocks[0].q.weight[0, 0] = float("inf")
    with pytest.raises(ValueError, match=r"layer blocks.0.q: quantise: weight must be finite"):
        run(broken, tokens())


def test_a_cache_of_keys_and_values_is_not_extended():
    class Caching(Block):
        def forward(self, x, shift=None, past_key_values=None):
            if past_key_values is not None:
                past_key_values.append(x)
                x = x + len(past_key_values)
            return super().forward(x, shift)

    class Model(Chain):
        def forward(self, ids):
            x, cache = self.embed(ids), []
            for block in self.blocks:
                x = block(x, shift=torch.zeros(K), past_key_values=cache)
            return x

    model = build(Model)
    model.blocks = nn.ModuleList(Caching() for _ in range(2))
    weight = model.blocks[0].q.weight
    found = run(model, tokens())
    assert found["blocks.1.q"].output_error > 0
    with torch.no_grad():
        x = model.embed(tokens()).reshape(-1, K)
    assert found["blocks.0.q"].output_error == pytest.approx(
        output_error(weight, found["blocks.0.q"].quantised.dequantise(), x.T @ x / len(x)), rel=1e-3
    )


def test_hooks_and_forwards_are_removed():
    model = build()
    steps = calibrate(model, {"blocks.1.q": "int4-g16"}, tokens(), progress=False)
    assert [layer.name for layers in steps for layer in layers] == ["blocks.1.q"]
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert not any("forward" in vars(module) for module in model.modules())


def test_formats_are_those_of_quantise_model():
    model = build()
    model.blocks[1].k.weight = model.blocks[1].q.weight  # tied, in the same format
    model.lm_head = nn.Linear(K, 50)
    model.other_name = model.blocks[2].down
    overrides = {r"1\.[qk]": "int4-g16", "other_name": "int8-g16", r"0\.q": None}
    found = choose_formats(model, "int3-g16", "head", overrides, backend="reference")
    small = quantise_model(model, "int3-g16", "head", overrides, backend="reference")
    expected = {n: m.format for n, m in small.named_modules() if isinstance(m, QuantisedLinear)}
    assert found == expected
    assert len(found) == 8
    assert str(found["blocks.2.down"]) == "int8-g16"  # an override by another name of the layer
    with pytest.raises(ValueError, match=r"layer blocks.0.q: int3-g64: .* skip or override"):
        choose_formats(model, "int3-g64", backend="reference")


def test_replaced_layers_keep_hooks_names_ties_and_attributes():
    model = build()
    block = model.blocks[0]
    block.k.weight = block.q.weight
    model.other_name = block.down
    seen = []
    block.q.register_forward_hook(lambda *_: seen.append("hook"))
    block.q.note = "kept"
    weights = {n: quantise(model.get_submodule(n).weight, "int4-g16") for n in linear_names(model)}
    bias = block.down.bias
    replace_layers(model, weights, backend="reference")
    assert all(isinstance(model.get_submodule(name), QuantisedLinear) for name in weights)
    assert model.other_name is block.down
    assert block.down.bias is bias
    assert block.q.note == "kept"
    assert block.q.weight_packed is block.k.weight_packed
    model(tokens(1))
    assert seen == ["hook"]
    with pytest.raises(ValueError, match="'blocks', which is a ModuleList"):
        replace_layers(model, {"blocks": weights["head"]})
    linear = nn.Linear(K, 4)
    with pytest.raises(ValueError, match="the model itself"):
        replace_layers(linear, {"": quantise(linear.weight, "int4-g16")})
    patched = nn.Sequential(nn.Linear(K, 4))
    patched[0].forward = lambda x: x
    with pytest.raises(ValueError, match="its forward is patched"):
        replace_layers(patched, {"0": quantise(patched[0].weight, "int4-g16")})


class Letters:
    """A tokenizer of letters, with a token before each text where it has one."""

    def __init__(self, bos: int | None = None) -> None:
        self.bos_token_id = bos

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> dict[str, list[int]]:
        has_bos = add_special_tokens and self.bos_token_id is not None
        return {"input_ids": [self.bos_token_id] * has_bos + list(range(len(text)))}


def test_token_windows():
    assert token_windows("x" * 11, Letters(), length=3).tolist() == [
        [0, 1, 2],
        [3, 4, 5],
        [6, 7, 8],
    ]
    assert token_windows("x" * 40, Letters(), 4, count=3)[:, 0].tolist() == [0, 12, 24]


def test_random_windows_begin_as_the_tokenizer_begins_texts():
    class Words(Letters):
        all_special_ids = (3, 7)

        def __len__(self):
            return 10

    found = random_windows(Words(bos=7), length=5, count=40)
    assert found.shape == (40, 5)
    assert found[:, 0].eq(7).all()
    assert set(found[:, 1:].flatten().tolist()) == set(range(10)) - {3, 7}
    with pytest.raises(ValueError, match="wanted windows of 2 tokens or more, got 1"):
        random_windows(Words(bos=7), length=1)


def test_token_windows_begin_as_the_tokenizer_begins_texts():
    found = token_windows("x" * 100, Letters(bos=777), length=4, count=2)
    assert found.tolist() == [[777, 0, 1, 2], [777, 48, 49, 50]]
    assert token_windows("x" * 7, Letters(bos=777), length=4).shape == (2, 4)


@pytest.mark.parametrize(
    ("length", "count", "said"),
    [
        (8, 3, "wanted 3 windows of 8 tokens, the text has 2; use a longer text, or fewer"),
        (8, 0, "wanted at least one window of 8 tokens, got 0"),
        (21, None, "wanted 1 windows of 21 tokens, the text has 0"),
    ],
)
def test_texts_too_short_for_windows(length, count, said):
    with pytest.raises(ValueError, match=said):
        token_windows("x" * 20, Letters(), length, count)
    with pytest.raises(ValueError, match="wanted 1 windows of 1 tokens, the text has 0"):
        token_windows("x" * 20, Letters(bos=777), length=1)


def test_calibration_is_advised_once(caplog):
    calibration._advise.cache_clear()
    calibration.advise_calibration([Format.parse("int4-g64")])
    assert caplog.text == ""
    for _ in range(2):
        calibration.advise_calibration([Format.parse("int4-g64"), Format.parse("kmeans3-g64")])
    assert caplog.text.count("without calibration") == 1


@pytest.mark.parametrize("inplace", [False, True])
def test_quantise_model_calibrates(inplace):
    """The layers are those of ``calibrate``; embeddings are quantised without."""
    model = nn.Sequential(nn.Embedding(20, 32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    ids = torch.randint(20, (4, 8), generator=torch.Generator().manual_seed(0))
    expected, reference = {}, copy.deepcopy(model)
    for layers in calibrate(
        reference, dict.fromkeys(["1", "3"], "kmeans3-g32"), ids, progress=False
    ):
        expected |= {each.name: each.quantised for each in layers}
        replace_layers(
            reference, {each.name: each.quantised for each in layers}, backend="reference"
        )
    result = quantise_model(
        model,
        "kmeans3-g32",
        calibration=ids,
        include=["embedding"],
        inplace=inplace,
        backend="reference",
        progress=False,
    )
    assert (result is model) == inplace
    for name, q in expected.items():
        assert torch.equal(result.get_submodule(name).quantised.packed, q.packed)
    assert isinstance(result[0], QuantisedEmbedding)
    with pytest.raises(ValueError, match="wanted calibration, or importance and codebook"):
        quantise_model(model, "nf4-g32", calibration=ids, importance={"1": torch.ones(32)})
