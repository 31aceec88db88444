"""Perplexity, divergence and their standard errors, against independent computations."""

import copy
import math
import shutil
import statistics
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import cross_entropy, kl_div

from fdk_bench import perplexity
from fdk_bench.perplexity import Comparison, Estimate, Reference, estimate


@pytest.fixture
def windows():
    return torch.randint(40, (5, 24), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def changed(hf_model):
    """The model with noise on its weights."""
    torch.manual_seed(2)
    model = copy.deepcopy(hf_model)
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return model


def test_estimate():
    values = torch.tensor([[1.0, 3.0], [2.0, 6.0], [0.0, 1.0]])
    found = estimate(values)
    means = [2.0, 4.0, 0.5]
    assert found.mean == pytest.approx(statistics.mean(means))
    assert found.error == pytest.approx(statistics.stdev(means) / math.sqrt(3))


def test_error_of_one_window_is_unknown():
    assert estimate(torch.tensor([[1.0, 3.0]])) == Estimate(2.0, None)


def test_error_is_that_of_repeated_texts():
    """The standard error predicts how far means of other texts of the same kind are apart."""
    torch.manual_seed(0)
    # Positions of a window share most of their deviation, as those of a text do.
    drawn = [torch.randn(32, 1) + 0.3 * torch.randn(32, 100) for _ in range(400)]
    found = [estimate(values) for values in drawn]
    spread = statistics.stdev(f.mean for f in found)
    assert statistics.mean(f.error for f in found) == pytest.approx(spread, rel=0.1)


def test_comparison(hf_model, changed, windows, monkeypatch):
    """Against torch's losses in double precision over all logits at once."""
    monkeypatch.setattr(perplexity, "POSITIONS", 7)  # pieces that do not divide 23
    found = Reference(hf_model, windows).compare(changed)
    losses, excesses, divergences, same = [], [], [], []
    for ids in windows:
        with torch.no_grad():
            q, p = (m(input_ids=ids[None]).logits[0, :-1].double() for m in (changed, hf_model))
        losses.append(cross_entropy(q, ids[1:]).item())
        excesses.append(losses[-1] - cross_entropy(p, ids[1:]).item())
        logs = (q.log_softmax(-1), p.log_softmax(-1))
        divergences.append(kl_div(*logs, log_target=True, reduction="batchmean").item())
        same += (q.argmax(-1) == p.argmax(-1)).tolist()
    for estimated, values in (
        (found.loss, losses),
        (found.excess, excesses),
        (found.divergence, divergences),
    ):
        assert estimated.mean == pytest.approx(statistics.mean(values), rel=1e-4, abs=1e-6)
        error = statistics.stdev(values) / math.sqrt(len(values))
        assert estimated.error == pytest.approx(error, rel=1e-3, abs=1e-6)
    assert found.agreement == pytest.approx(statistics.mean(same))
    assert 0 < found.agreement < 1
    assert found.divergence.mean > 0.01
    assert found.perplexity.mean == pytest.approx(math.exp(statistics.mean(losses)), rel=1e-4)
    assert found.perplexity.error == pytest.approx(found.perplexity.mean * found.loss.error)


def test_same_model(hf_model, windows):
    found = Reference(hf_model, windows).compare(hf_model)
    assert (found.excess, found.divergence, found.agreement) == (Estimate(0, 0), Estimate(0, 0), 1)
    assert found.loss.error > 0


def test_differences_are_paired(hf_model, windows):
    """Texts differ far more than a small change of the model does."""
    near = copy.deepcopy(hf_model)
    near.lm_head.weight.data *= 1.001
    found = Reference(hf_model, windows).compare(near)
    assert found.excess.error < found.loss.error / 50


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_are_kept_exactly(dtype, hf_model, windows):
    found = Reference(hf_model.to(dtype), windows).compare(hf_model)
    assert found.divergence == Estimate(0, 0)


def test_each_window_is_told(hf_model, windows):
    seen = []
    reference = Reference(hf_model, windows, lambda: seen.append("reference"))
    reference.compare(hf_model, lambda: seen.append("compare"))
    assert seen == ["reference"] * 5 + ["compare"] * 5


def test_no_room_for_logits(hf_model, windows, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    with pytest.raises(OSError, match=r"need .* GB .*; set TMPDIR .* or pass fewer --tokens"):
        Reference(hf_model, windows)


def test_perplexity_of_a_broken_model_is_a_number():
    broken = Comparison(Estimate(5000.0, 1.0), Estimate(0, 0), Estimate(0, 0), 0.0)
    assert math.isfinite(broken.perplexity.mean)
