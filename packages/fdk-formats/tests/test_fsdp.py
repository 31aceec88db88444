"""FSDP2 and DDP with quantised layers, in two and four gloo processes."""

import weakref

import pytest
import torch
from distributed_checks import MLP, results
from mixtures import Mixture
from tensor_parallel_checks import has_integer_fsdp
from torch import distributed, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from fdk_formats import quantise_model

FORMATS = ("kmeans4-g32", "affine3-g32", "int4-row", "kmeans4-g32-hadamard")


def model(format="kmeans4-g32", seed=0):
    torch.manual_seed(seed)
    return quantise_model(nn.Sequential(MLP(), MLP()), format, backend="reference", progress=False)


def sharded(mesh, made, **settings):
    for block in made:
        fully_shard(block, mesh=mesh, **settings)
    return fully_shard(made, mesh=mesh, **settings)


def x():
    return torch.randn(3, 64, generator=torch.Generator().manual_seed(1))


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradients(made):
    return {name: full(p.grad) for name, p in made.named_parameters() if p.grad is not None}


def assert_same_step(made, plain, steps=2):
    """Runs forward and backward on both and compares outputs and gradients exactly."""
    for _ in range(steps):
        given = [x().requires_grad_() for _ in range(2)]
        outputs = [module(own) for module, own in zip((made, plain), given, strict=True)]
        assert torch.equal(*outputs)
        for y in outputs:
            y.square().sum().backward()
        assert torch.equal(given[0].grad, given[1].grad)
        wanted = gradients(plain)
        assert set(wanted) == {f"{i}.{name}.bias" for i in (0, 1) for name in ("up", "down")}
        assert gradients(made).keys() == wanted.keys()
        for name, gradient in gradients(made).items():
            torch.testing.assert_close(gradient, wanted[name])


def check_forward_and_backward(mesh, folder):
    for format in FORMATS:
        for is_called in (False, True):
            made = model(format)
            if is_called:
                made(x())
            assert_same_step(sharded(mesh, made), model(format))


def check_memory_falls_with_the_ranks(mesh, folder):
    for format in FORMATS:
        made = sharded(mesh, model(format))
        local = sum(p.to_local().nbytes for p in made.parameters())
        whole = sum(p.nbytes for p in model(format).parameters())
        # Codes, scales and biases are cut; what a small table cannot share is padding.
        assert local <= whole / mesh.size() + 200, (local, whole)
        made(x())
        assert all(isinstance(p, DTensor) for p in made.parameters())
        made[0].unshard()
        made[0].reshard()
        assert all(isinstance(p, DTensor) for p in made.parameters())


def check_layouts_are_freed(mesh, folder):
    """Neither a module nor autograd keeps a layout between forward and backward."""
    made, layouts = sharded(mesh, model()), []

    def note(module, args, output):
        layouts.append(weakref.ref(module.stored.layout))

    for block in made:
        for layer in block.children():
            layer.register_forward_hook(note)
    y = made(x().requires_grad_())
    assert len(layouts) == 4
    # Blocks reshard after forward, except the last one, which backward needs first.
    assert [layout() for layout in layouts[:2]] == [None, None]
    y.sum().backward()
    assert [layout() for layout in layouts] == [None] * 4


def check_kept_unsharded(mesh, folder):
    assert_same_step(sharded(mesh, model(), reshard_after_forward=False), model())


def check_mixed_precision(mesh, folder):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    made, plain = sharded(mesh, model(), mp_policy=policy), model().bfloat16()
    given = x().requires_grad_(), x().bfloat16().requires_grad_()
    outputs = made(given[0]), plain(given[1])
    assert outputs[0].dtype == torch.bfloat16
    assert torch.equal(*outputs)
    for y in outputs:
        y.float().square().sum().backward()
    assert torch.equal(given[0].grad, given[1].grad.float())
    for name, gradient in gradients(made).items():
        assert gradient.dtype == torch.float32
        torch.testing.assert_close(gradient, gradients(plain)[name].float(), rtol=0.01, atol=0.01)


def check_activation_checkpointing(mesh, folder):
    made = model()
    for block in made:
        block.recomputes = True
    assert_same_step(sharded(mesh, made), model())


def check_state_dict(mesh, folder):
    for is_full in (True, False):
        options = StateDictOptions(full_state_dict=is_full, broadcast_from_rank0=is_full)
        made, other = sharded(mesh, model(seed=0)), sharded(mesh, model(seed=5))
        wanted = made(x())
        assert not torch.equal(other(x()), wanted)
        state = get_model_state_dict(made, options=StateDictOptions(full_state_dict=is_full))
        assert list(state) == list(model().state_dict())
        if is_full:
            for name, tensor in state.items():
                assert torch.equal(tensor, model().state_dict()[name])
        set_model_state_dict(other, state, options=options)
        assert torch.equal(other(x()), wanted)


def check_distributed_checkpoint(mesh, folder):
    made, other = sharded(mesh, model(seed=0)), sharded(mesh, model(seed=5))
    wanted = made(x())
    checkpoint.save(get_model_state_dict(made), checkpoint_id=folder / "dcp")
    state = get_model_state_dict(other)
    checkpoint.load(state, checkpoint_id=folder / "dcp")
    set_model_state_dict(other, state)
    assert torch.equal(other(x()), wanted)
    alone = model(seed=5)
    state = alone.state_dict()
    checkpoint.load(state, checkpoint_id=folder / "dcp")
    alone.load_state_dict(state)
    assert torch.equal(alone(x()), wanted)


class Adapted(nn.Module):
    """A frozen layer and a low-rank adapter."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.A = nn.Linear(base.in_features, 4, bias=False)
        self.B = nn.Linear(4, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.B(self.A(x))


def adapted():
    made = model()
    torch.manual_seed(3)
    for block in made:
        block.up, block.down = Adapted(block.up), Adapted(block.down)
    for name, parameter in made.named_parameters():
        parameter.requires_grad_(".A." in name or ".B." in name)
    return made


def check_adapters(mesh, folder):
    made, plain = sharded(mesh, adapted()), adapted()
    steps = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (made, plain)]
    losses = []
    for _ in range(3):
        for module, step in zip((made, plain), steps, strict=True):
            loss = module(x()).square().mean()
            loss.backward()
            step.step()
            step.zero_grad()
            losses.append(loss.detach())
    torch.testing.assert_close(losses[0::2], losses[1::2])
    assert losses[4] < losses[0]
    for (name, p), (_, q) in zip(made.named_parameters(), plain.named_parameters(), strict=True):
        assert p.requires_grad == q.requires_grad == (".A." in name or ".B." in name)
        torch.testing.assert_close(full(p), q.detach().clone())


def check_compiled_blocks(mesh, folder):
    made = model()
    for block in made:
        block.compile(backend="aot_eager")
    assert_same_step(sharded(mesh, made), model(), steps=3)


def check_ddp(mesh, folder):
    made = nn.parallel.DistributedDataParallel(model())
    sent = []
    broadcast = distributed._broadcast_coalesced

    def count(group, tensors, *rest):
        sent.extend(tensors)
        return broadcast(group, tensors, *rest)

    distributed._broadcast_coalesced = count
    try:
        assert_same_step_ddp(made, model())
    finally:
        distributed._broadcast_coalesced = broadcast
    assert sent == []
    assert list(made.module.buffers()) == []


def assert_same_step_ddp(made, plain):
    for _ in range(2):
        outputs = made(x()), plain(x())
        assert torch.equal(*outputs)
        for y in outputs:
            y.square().sum().backward()
        for name, gradient in gradients(made.module).items():
            torch.testing.assert_close(gradient, gradients(plain)[name])


def mixture(format="kmeans4-g16", transposed=False):
    torch.manual_seed(0)
    made = nn.Sequential(*(Mixture(transposed=transposed) for _ in range(2)))
    return quantise_model(made, format, backend="reference", progress=False)


def check_experts(mesh, folder):
    """Stacks are cut by experts: memory falls, and a step equals that of the whole model."""
    for format, transposed in (("kmeans4-g16", False), ("affine3-g16", True), ("int4-g16", False)):
        plain, made = mixture(format, transposed), sharded(mesh, mixture(format, transposed))
        packed = made[0].experts.gate_up_proj.weight_packed
        assert packed.to_local().shape[0] * mesh.size() == packed.shape[0] == 4
        local = sum(p.to_local().nbytes for p in made.parameters())
        assert local <= sum(p.nbytes for p in plain.parameters()) / mesh.size() + 200
        for _ in range(2):
            x = torch.randn(6, 32, generator=torch.Generator().manual_seed(1))
            given = [x.clone().requires_grad_() for _ in range(2)]
            outputs = [module(own) for module, own in zip((made, plain), given, strict=True)]
            assert torch.equal(*outputs)
            for y in outputs:
                y.square().sum().backward()
            assert torch.equal(given[0].grad, given[1].grad)
        assert gradients(made).keys() == gradients(plain).keys()
        for name, gradient in gradients(made).items():
            torch.testing.assert_close(gradient, gradients(plain)[name])
        state = get_model_state_dict(made, options=StateDictOptions(full_state_dict=True))
        for name, tensor in state.items():
            assert torch.equal(tensor, plain.state_dict()[name]), name


CHECKS = {name: value for name, value in globals().items() if name.startswith("check_")}


pytestmark = pytest.mark.skipif(
    not has_integer_fsdp(), reason=f"FSDP2 of torch {torch.__version__} shards no integers"
)


@pytest.fixture(scope="module", params=[2, 4], ids="{} processes".format)
def found(request, tmp_path_factory):
    return results(__file__, CHECKS, request.param, tmp_path_factory.mktemp("processes"))


@pytest.mark.parametrize("check", CHECKS)
def test_fsdp(check, found):
    assert not found[check], found[check]
