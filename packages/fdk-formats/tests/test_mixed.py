"""Formats chosen layer by layer for a number of bits on average."""

import pytest
import torch
from test_distil import Language, build, divergence, windows
from torch import nn

from fdk_formats import mix_formats, quantise_model
from fdk_formats.mixed import _sensitivities
from fdk_formats.model_inputs import calls_of

LADDER = ["kmeans2-g32", "kmeans3-g32", "kmeans4-g32"]


def names_of(model):
    return [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"]


def bits_of(model, formats):
    sizes = {n: model.get_submodule(n).weight.numel() for n in formats}
    total = sum(f.bits_per_weight(32) * sizes[n] for n, f in formats.items())
    return total / sum(sizes.values())


@pytest.mark.parametrize("bits", [2.5, 2.9, 3.3, 4.5])
def test_bits_are_spent(bits):
    model = build()
    found = mix_formats(model, names_of(model), LADDER, bits, windows(8, 1))
    assert list(found) == names_of(model)
    assert bits - 1 / 6 - 1e-9 <= bits_of(model, found) <= bits + 1e-6  # six layers of one size


def test_layers_that_matter_get_more():
    model = build()
    found = mix_formats(model, names_of(model), LADDER, 2.9, windows(8, 1))
    harm = _sensitivities(model, names_of(model), calls_of(windows(8, 1)))
    bits = [found[name].bits for name in sorted(harm, key=lambda name: harm[name])]
    assert bits == sorted(bits)
    assert len(set(bits)) > 1
    assert all(p.requires_grad for p in model.parameters())
    assert not model.blocks[0].up._forward_hooks
    assert not model.embed._forward_hooks
    assert model.training is False


def test_sensitivities_predict_the_divergence():
    """Noise of a share of each output's mean square, at one layer at a time."""
    model, ids = build(), windows(64, 1)
    source, names = build(), names_of(model)
    tokens = ids.numel()
    harm = _sensitivities(model, names, calls_of(ids.split(8)))
    for name in names:
        torch.manual_seed(2)

        def disturb(_, args, output):
            size = output.square().mean(-1, keepdim=True).sqrt()
            return output + 0.05 * size * torch.randn_like(output)

        handle = model.get_submodule(name).register_forward_hook(disturb)
        found = divergence(source, model, ids)
        handle.remove()
        assert found == pytest.approx(0.05**2 * harm[name] / tokens, rel=0.25), name


def test_mixed_formats_do_better_than_the_other_way_round():
    source, held_out = build(), windows(16, 2)
    with torch.no_grad():
        for index, scale in enumerate((0.2, 6, 0.2)):
            source.blocks[index].down.weight.mul_(scale)
    found = mix_formats(source, names_of(source), LADDER[:2], 3.0, windows(8, 1))
    a, b = dict.fromkeys(found.values())
    swapped = {name: b if format == a else a for name, format in found.items()}
    assert bits_of(source, swapped) == bits_of(source, found) == 3.0
    results = [
        divergence(
            source, quantise_model(source, LADDER[0], overrides=each, backend="reference"), held_out
        )
        for each in (found, swapped)
    ]
    assert results[0] < 0.7 * results[1]


def test_errors():
    model = build()
    with pytest.raises(ValueError, match=r"wanted 2.5 to 4.5 bits per weight, as .* got 2.4"):
        mix_formats(model, names_of(model), LADDER, 2.4, windows(8, 1))
    with pytest.raises(ValueError, match="wanted a language model"):
        mix_formats(nn.Sequential(nn.Linear(32, 32)), ["0"], LADDER, 3, windows(8, 1))
    assert isinstance(model, Language)
