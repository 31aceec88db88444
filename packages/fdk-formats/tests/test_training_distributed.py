"""Training with quantised weights under DDP and FSDP2, in two gloo processes."""

import pytest
import torch
from distributed_checks import MLP, results
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from fdk_formats import convert, prepare_qat

FORMATS = ("kmeans2-g32", "affine3-g32", "kmeans2-g32-search")
LEARN = ((), ("scale",))


def model(format="kmeans2-g32", seed=0, **settings):
    torch.manual_seed(seed)
    return prepare_qat(nn.Sequential(MLP(), MLP()), format, refit_every=2, **settings)


def sharded(mesh, made, **settings):
    for block in made:
        fully_shard(block, mesh=mesh, **settings)
    return fully_shard(made, mesh=mesh, **settings)


def train(made, steps=3):
    """Trains on the same batch in every process: its mean gradient is that of one process."""
    optimiser = torch.optim.SGD(made.parameters(), lr=0.1)
    for step in range(steps):
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(step))
        made(x).float().square().mean().backward()
        optimiser.step()
        optimiser.zero_grad()


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_equal_states(made, wanted):
    found = made.state_dict()
    assert list(found) == list(wanted.state_dict())
    for name, tensor in wanted.state_dict().items():
        assert torch.equal(full(found[name]), tensor), name


def check_fsdp_trains_as_one_process(mesh, folder):
    for format in FORMATS:
        for learn in LEARN:
            made, plain = sharded(mesh, model(format, learn=learn)), model(format, learn=learn)
            train(made)
            train(plain)
            assert_equal_states(made, plain)
            if "kmeans" in format:  # a refit came
                assert not torch.equal(plain[0].up.codebook, model(format)[0].up.codebook)


def check_fsdp_with_learned_codebooks(mesh, folder):
    learn = ("codebook", "scale")
    made, plain = sharded(mesh, model(learn=learn)), model(learn=learn)
    train(made)
    train(plain)
    assert isinstance(made[0].up.codebook, DTensor)
    assert_equal_states(made, plain)


def check_fsdp_with_activation_checkpointing(mesh, folder):
    made = model()
    for block in made:
        block.recomputes = True
    made, plain = sharded(mesh, made), model()
    train(made)
    train(plain)
    assert_equal_states(made, plain)


def check_fsdp_compiled(mesh, folder):
    made = model()
    for block in made:
        block.compile(backend="aot_eager")
    made, plain = sharded(mesh, made), model()
    train(made)
    train(plain)
    assert_equal_states(made, plain)


def check_mixed_precision_converts_what_it_saw(mesh, folder):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    made = sharded(mesh, model(), mp_policy=policy)
    train(made)
    x = torch.ones(2, 64)
    y = made(x)
    state = get_model_state_dict(
        made, options=StateDictOptions(full_state_dict=True, cpu_offload=False)
    )
    alone = model(seed=5)
    if mesh.get_rank() == 0:
        alone.load_state_dict(state)
        codebooks = {n: b for n, b in alone.named_buffers() if n.endswith("codebook")}
        alone = alone.bfloat16()
        for name, codebook in codebooks.items():  # FSDP leaves buffers in float32
            alone.get_submodule(name.rpartition(".")[0]).codebook = codebook
        assert torch.equal(convert(alone, backend="reference")(x.bfloat16()), y)


def check_checkpoint_resumes(mesh, folder):
    made, other = sharded(mesh, model()), sharded(mesh, model(seed=5))
    train(made)
    checkpoint.save(get_model_state_dict(made), checkpoint_id=folder / "dcp")
    state = get_model_state_dict(other)
    checkpoint.load(state, checkpoint_id=folder / "dcp")
    set_model_state_dict(other, state)
    train(made)
    train(other)
    for name, tensor in made.state_dict().items():
        assert torch.equal(full(other.state_dict()[name]), full(tensor)), name


def check_sharded_models_are_not_converted(mesh, folder):
    made = sharded(mesh, model())
    with pytest.raises(ValueError, match=r"convert: layer 0\.up: its weight is a DTensor: gather"):
        convert(made)


def check_ddp_trains_as_one_process(mesh, folder):
    for learn in ((), ("codebook", "scale")):
        made, plain = nn.parallel.DistributedDataParallel(model(learn=learn)), model(learn=learn)
        train(made)
        train(plain)
        assert_equal_states(made.module, plain)


CHECKS = {name: value for name, value in globals().items() if name.startswith("check_")}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return results(__file__, CHECKS, 2, tmp_path_factory.mktemp("processes"))


@pytest.mark.parametrize("check", CHECKS)
def test_training_distributed(check, found):
    assert not found[check], found[check]
