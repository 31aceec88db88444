"""Distillation: scales and codebooks trained end to end."""

import copy

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import fdk_formats.distil as distillation
from fdk_formats import calibrate_weights, choose_formats, quantise, quantise_model, replace_layers
from fdk_formats.compensate import unit_values
from fdk_formats.distil import Teacher, _Trained, distil
from fdk_formats.scales import decode_scale

K, WORDS = 32, 40


class Language(nn.Module):
    """A language model as transformers has them, in what matters here."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, K)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.lm_head = nn.Linear(K, WORDS, bias=False)

    def get_output_embeddings(self):
        return self.lm_head

    def get_input_embeddings(self):
        return self.embed

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.lm_head(x)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(K)
        self.up, self.down = nn.Linear(K, 64), nn.Linear(64, K)

    def forward(self, x):
        mixed = x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]
        return x + self.down(torch.tanh(self.up(self.norm(x + mixed))))


def build(dtype=torch.float32):
    torch.manual_seed(0)
    model = Language()
    model.lm_head.weight.data.mul_(4)  # predictions that are not flat
    return model.to(dtype).eval()


def windows(count, seed):
    return torch.randint(WORDS, (count, 24), generator=torch.Generator().manual_seed(seed))


def runs_of(model, inputs):
    return [lambda ids=ids: model(ids) for ids in inputs.split(1)]


@torch.no_grad()
def divergence(source, model, ids):
    p, q = (each(ids).float().log_softmax(-1) for each in (source, model))
    return float((p.exp() * (p - q)).sum(-1).mean())


def quantised(model, format):
    formats = choose_formats(model, format, backend="reference")
    return {name: quantise(model.get_submodule(name).weight, f) for name, f in formats.items()}


def start(format, dtype=torch.float32, count=48):
    """Returns a model, its teacher and runs, and quantised layers."""
    model = build(dtype)
    runs = runs_of(model, windows(count, 1))
    return model, Teacher(model, runs), runs, quantised(model, format)


@pytest.mark.parametrize(
    "format", ["kmeans2-g16", "kmeans3-row", "int4-g32", "affine2-g16", "affine3-g16-zint"]
)
def test_gradients_are_those_of_autograd(format):
    torch.manual_seed(1)
    layer = nn.Linear(K, 24)
    q = quantise(layer.weight, f"{format}-fp32")
    trained = _Trained(layer, q)
    x, y = torch.randn(10, K), torch.randn(10, 24)
    for _ in range(2):  # gradients of a step's inputs add up
        ((layer(x) - y) ** 2).sum().backward()
    assert layer.weight.grad is None
    log_scale = torch.zeros_like(trained.start, requires_grad=True)
    shift = torch.zeros(1 << q.format.bits, requires_grad=True)
    grid = trained.grid()
    if q.codebook is not None:
        unit = (q.codebook + shift * q.codebook.abs().mean())[q.codes().int()]
    else:
        unit = unit_values(grid, q.codes())
    weight = unit.view(*trained.start.shape, -1) * (trained.start * log_scale.exp())[..., None]
    ((x @ weight.view(24, K).T + layer.bias.detach() - y) ** 2).sum().mul(2).backward()
    torch.testing.assert_close(trained.change.grad, log_scale.grad, rtol=1e-4, atol=1e-4)
    if q.format.is_fitted:
        torch.testing.assert_close(trained.shift.grad, shift.grad, rtol=1e-4, atol=1e-4)
    else:
        assert trained.shift is None


@pytest.mark.parametrize("format", ["kmeans1-g16", "kmeans2-g32", "affine2-g16", "int3-g32-fp16"])
def test_predictions_come_nearer_to_the_source(format):
    source = build()
    model, teacher, runs, layers = start(format)
    held_out = windows(8, 2)
    replaced = build()
    replace_layers(replaced, layers, backend="reference")
    before = divergence(source, replaced, held_out)
    steps = []
    found = distil(model, layers, teacher, runs, epochs=6, on_step=lambda *step: steps.append(step))
    assert divergence(source, model, held_out) < 0.9 * before
    assert steps == [(i + 1, len(steps)) for i in range(12)]  # two of 1,024 tokens an epoch
    # The model is that of the result, and only what is trained has changed.
    for name, q in found.items():
        assert torch.equal(model.get_submodule(name).weight, q.dequantise())
        assert not torch.equal(decode_scale(q.scale), decode_scale(layers[name].scale))
        if q.format.is_fitted:
            assert (q.codebook.diff() >= 0).all()
        else:
            assert torch.equal(q.packed, layers[name].packed)
    rest = {n: p for n, p in model.named_parameters() if n.removesuffix(".weight") not in found}
    assert all(torch.equal(p, source.get_parameter(n)) for n, p in rest.items())


@pytest.mark.parametrize(
    ("format", "share"), [("kmeans2-g32", 1), ("kmeans3-g32", 1), ("kmeans4-g32", 1 / 2)]
)
def test_rates_halve_with_each_bit_above_three(format, share, tmp_path):
    model, teacher, runs, layers = start(format)
    file = tmp_path / "state.safetensors"
    distil(model, layers, teacher, runs, epochs=1, file=file)
    # Two steps of a quarter of the highest rate, by which Adam moves what has a gradient.
    moved = [p.abs().max() for name, p in load_file(file).items() if name.endswith(".value")]
    assert 0.45 * share < max(moved) / distillation.RATE < 0.55 * share


def test_models_in_bfloat16_and_stored_values():
    model, teacher, runs, layers = start("kmeans3-g32", torch.bfloat16)
    source, held_out = build(torch.bfloat16), windows(8, 2)
    found = distil(model, layers, teacher, runs, epochs=4)
    replaced = build(torch.bfloat16)
    replace_layers(replaced, layers, backend="reference")
    before = divergence(source, replaced, held_out)
    replaced = build(torch.bfloat16)
    replace_layers(replaced, found, backend="reference")
    assert divergence(source, replaced, held_out) < 0.9 * before


def test_scales_of_powers_of_two_stay_such_and_zeros_stay():
    model = build()
    model.blocks[0].up.weight.data[:, :16] = 0
    runs = runs_of(model, windows(48, 1))
    teacher, layers = Teacher(model, runs), quantised(model, "kmeans2-g16-e8m0")
    found = distil(model, layers, teacher, runs, epochs=1)
    assert found["blocks.0.up"].scale.dtype == torch.uint8
    assert (found["blocks.0.up"].scale[:, 0] == 0).all()
    assert (model.blocks[0].up.weight[:, :16] == 0).all()


def test_same_bits_again_and_nothing_is_left_on_the_model():
    results = []
    for _ in range(2):
        model, teacher, runs, layers = start("kmeans2-g32")
        model.embed.weight.requires_grad_(False)
        before = {name: p.requires_grad for name, p in model.named_parameters()}
        results.append(distil(model, layers, teacher, runs, epochs=2))
        assert {name: p.requires_grad for name, p in model.named_parameters()} == before
        assert all(p.grad is None for p in model.parameters())
        assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
        assert not model.lm_head._forward_pre_hooks
    for name, q in results[0].items():
        assert all(map(torch.equal, q.tensors().values(), results[1][name].tensors().values()))


class KilledError(Exception):
    pass


@pytest.fixture
def many_steps(monkeypatch):
    """Steps of 96 tokens, each saved."""
    monkeypatch.setattr(distillation, "STEP_TOKENS", 96)
    monkeypatch.setattr(distillation, "SAVE_SECONDS", 0)
    monkeypatch.setattr(distillation, "SAVE_SHARE", 0)


def run_until(last, file, epochs=2):
    """Distils up to a step, or whole; returns the weights and the numbers of the steps."""
    model, teacher, runs, layers = start("kmeans2-g32")
    seen = []

    def on_step(step, _):
        seen.append(step)
        if step == last:
            raise KilledError

    try:
        found = distil(model, layers, teacher, runs, epochs=epochs, on_step=on_step, file=file)
    except KilledError:
        return None, seen
    return found, seen


def test_training_goes_on_after_a_kill_with_the_same_result(many_steps, tmp_path):
    wanted, steps = run_until(None, None)
    file = tmp_path / "state.safetensors"
    assert run_until(7, file) == (None, steps[:7])
    assert run_until(11, file) == (None, steps[7:11])
    found, seen = run_until(None, file)
    assert seen == steps[11:]
    for name, q in found.items():
        assert all(map(torch.equal, q.tensors().values(), wanted[name].tensors().values()))
    assert run_until(None, file)[1] == []  # all done
    assert run_until(None, file, epochs=1)[1] == steps[: len(steps) // 2]  # another training


def test_calibration_goes_on_within_training(many_steps, tmp_path, monkeypatch):
    def calibrated(folder):
        model = build()
        formats = choose_formats(model, "kmeans2-g32", backend="reference")
        return calibrate_weights(model, formats, windows(48, 1), folder=folder, progress=False)

    wanted = calibrated(None)
    save, steps = distillation._StateFile.save, []

    def killed(self, step):
        save(self, step)
        steps.append(step)
        if len(steps) == 5:
            raise KilledError

    monkeypatch.setattr(distillation._StateFile, "save", killed)
    with pytest.raises(KilledError):
        calibrated(tmp_path)
    found = calibrated(tmp_path)
    assert steps == list(range(1, len(steps) + 1))
    for name, layer in found.items():
        tensors = layer.quantised.tensors().values(), wanted[name].quantised.tensors().values()
        assert all(map(torch.equal, *tensors))


def test_errors_leave_the_model_as_others_use_it():
    model, teacher, runs, layers = start("kmeans2-g32")
    teacher.states[-1] = teacher.states[-1] * torch.nan
    with pytest.raises(ValueError, match="predictions are not finite"):
        distil(model, layers, teacher, runs, epochs=1)
    assert all(p.requires_grad for p in model.parameters())
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    with pytest.raises(ValueError, match=r"wanted a language model .* got Sequential"):
        Teacher(nn.Sequential(), [])
    model.lm_head = nn.Linear(K, WORDS)
    with pytest.raises(ValueError, match="does not call its output head"):
        Teacher(model, [lambda: None])


def test_calibrated_language_models_are_distilled():
    source, inputs, held_out = build(), windows(48, 1), windows(8, 2)
    plain = quantise_model(
        source, "kmeans2-g32", backend="reference", calibration=inputs, epochs=0, progress=False
    )
    small = quantise_model(
        source, "kmeans2-g32", backend="reference", calibration=inputs, epochs=6, progress=False
    )
    assert divergence(source, small, held_out) < 0.9 * divergence(source, plain, held_out)
    assert torch.equal(source.blocks[0].up.weight, build().blocks[0].up.weight)
    # The errors of the layers are those before: of weights that have not been trained.
    up = [each.blocks[0].up for each in (plain, small)]
    assert up[0].relative_error == up[1].relative_error > 0.1


def test_weights_are_calibrated_once_where_layers_share_them():
    model = build()
    model.blocks[2].up.weight = model.blocks[0].up.weight
    found = calibrate_weights(
        copy.deepcopy(model),
        choose_formats(model, "kmeans2-g32", backend="reference"),
        windows(48, 1),
        progress=False,
    )
    assert "blocks.0.up" in found
    assert "blocks.2.up" not in found
    small = quantise_model(
        model, "kmeans2-g32", backend="reference", calibration=windows(48, 1), progress=False
    )
    assert small.blocks[2].up.weight_packed is small.blocks[0].up.weight_packed
    assert torch.equal(small.blocks[2].up.weight, found["blocks.0.up"].quantised.dequantise())
