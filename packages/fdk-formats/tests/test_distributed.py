"""torch.distributed.checkpoint with quantised layers."""

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    set_model_state_dict,
)

from fdk_formats import QuantisedLinear


def layer(format: str = "kmeans4-g32") -> QuantisedLinear:
    torch.manual_seed(0)
    return QuantisedLinear.from_linear(nn.Linear(64, 24), format, backend="reference")


@pytest.mark.parametrize("format", ["nf4-g64", "affine3-row-zint"])
def test_model_state_dict(format: str) -> None:
    """It asks the model for everything that ``state_dict`` names."""
    model, other = nn.Sequential(layer(format)), nn.Sequential(layer(format))
    state = get_model_state_dict(model)
    assert list(state) == list(model.state_dict())
    other.load_state_dict({name: torch.zeros_like(tensor) for name, tensor in state.items()})
    set_model_state_dict(other, state)
    x = torch.ones(1, 64)
    assert torch.equal(other(x), model(x))
    weight = model[0].weight
    assert torch.equal(weight.packed, state["0.weight.packed"])
    assert (weight.codebook is None) == (weight.zero_point is not None)
