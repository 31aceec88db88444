"""torch.distributed.checkpoint with quantised layers."""

import pytest
import torch
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)

from fdk_formats import QuantisedLinear


def layer(format="kmeans4-g32"):
    torch.manual_seed(0)
    return QuantisedLinear.from_linear(nn.Linear(64, 24), format, backend="reference")


@pytest.mark.parametrize("format", ["nf4-g64", "affine3-row-zint"])
def test_model_state_dict(format):
    model, other = nn.Sequential(layer(format)), nn.Sequential(layer(format))
    state = get_model_state_dict(model)
    assert list(state) == list(model.state_dict())
    other.load_state_dict({name: torch.zeros_like(tensor) for name, tensor in state.items()})
    set_model_state_dict(other, state)
    x = torch.ones(1, 64)
    assert torch.equal(other(x), model(x))
    assert torch.equal(model[0].weight_packed, state["0.weight_packed"])


@pytest.fixture
def process_group():
    """Initialises a group of one process."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


WRAPPERS = {
    "DDP": nn.parallel.DistributedDataParallel,
    "compiled": lambda model: torch.compile(model, backend="eager"),
}


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("from_rank_0", [False, True])
@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_state_dict_of_a_wrapped_model(wrap, from_rank_0):
    model, x = nn.Sequential(layer()), torch.ones(1, 64)
    state = get_model_state_dict(model)
    wrapped = wrap(nn.Sequential(layer()))
    zeros = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    wrapped.load_state_dict(
        {name: zeros[other] for name, other in zip(wrapped.state_dict(), state, strict=True)}
    )
    options = StateDictOptions(full_state_dict=from_rank_0, broadcast_from_rank0=from_rank_0)
    set_model_state_dict(wrapped, dict(state), options=options)
    assert torch.equal(wrapped(x), model(x))
    found = get_model_state_dict(wrapped)
    assert list(found) == list(state)
    assert all(torch.equal(found[name], state[name]) for name in state)
