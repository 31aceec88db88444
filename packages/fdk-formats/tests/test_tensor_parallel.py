"""Tensor parallelism of torch with quantised layers, in two and four gloo processes."""

import re
from functools import partial

import pytest
import tensor_parallel_checks as shared
import torch
from distributed_checks import results
from tensor_parallel_checks import HIDDEN, Case, K, full, parallel_blocks
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fdk_formats import Format, fuse_layers, tensor_parallel

FORMATS = ("kmeans4-g32", "affine3-g32", "int4-row", "int1-g64")
ROTATED = Case("kmeans4-g32-hadamard", k=256, hidden=1024)  # four parts of whole blocks


def refused(kind, message, call):
    """Checks the error of a call in this process."""
    with pytest.raises(kind, match=message):
        call()


# For each format.


def check_columns(case, mesh, folder):
    shared.check_columns(case, mesh)


def check_columns_of_uneven_n(case, mesh, folder):
    for n in (37, 5):  # 5 rows leave the fourth process without any
        shared.check_columns(case, mesh, n)


def check_rows(case, mesh, folder):
    shared.check_rows(case, mesh)


def check_blocks(case, mesh, folder):
    shared.check_blocks(case, mesh)


def check_memory(case, mesh, folder):
    shared.check_memory(case, mesh)


def check_placements(case, mesh, folder):
    made = parallel_blocks(mesh, case.blocks())
    is_by_row = case.format.endswith("row")
    for block in made:
        for layer in (block.gate, block.up, block.down):
            is_down = layer is block.down
            wanted = {name: Shard(1 if is_down else 0) for name in layer.weight_names}
            if "weight_codebook" in wanted:
                wanted["weight_codebook"] = Replicate()
            if is_down and is_by_row:
                wanted["weight_scale"] = Replicate()
            wanted["bias"] = Replicate() if is_down else Shard(0)
            assert wanted == {name: p.placements[0] for name, p in layer.named_parameters()}


def check_layers_called_before(case, mesh, folder):
    made, plain = case.blocks(), case.blocks()
    made(case.x)
    shared.assert_same_step(case, parallel_blocks(mesh, made), plain, case.x)


def check_cast(case, mesh, folder):
    made, plain = parallel_blocks(mesh, case.blocks()).bfloat16(), case.blocks().bfloat16()
    rounded = Case(case.format, dtype=torch.bfloat16, tolerance=0.02)
    shared.assert_same_step(rounded, made, plain, rounded.x)
    for name, p in made.named_parameters():
        assert p.dtype == dict(plain.named_parameters())[name].dtype


def check_state_dict(case, mesh, folder):
    plain = case.blocks().state_dict()
    for is_full in (True, False):
        options = StateDictOptions(full_state_dict=is_full, broadcast_from_rank0=is_full)
        made, other = (parallel_blocks(mesh, case.blocks(seed)) for seed in (0, 5))
        wanted = made(case.x)
        assert not torch.allclose(other(case.x), wanted, rtol=0.01)
        state = get_model_state_dict(made, options=StateDictOptions(full_state_dict=is_full))
        assert list(state) == list(plain)
        for name, tensor in state.items():
            assert isinstance(tensor, DTensor) != is_full
            assert torch.equal(full(tensor), plain[name])
        set_model_state_dict(other, state, options=options)
        assert torch.equal(other(case.x), wanted)


def check_distributed_checkpoint(case, mesh, folder):
    made, other = (parallel_blocks(mesh, case.blocks(seed)) for seed in (0, 5))
    wanted, place = made(case.x), folder / f"dcp-{case.format}"
    checkpoint.save(get_model_state_dict(made), checkpoint_id=place)
    state = get_model_state_dict(other)
    checkpoint.load(state, checkpoint_id=place)
    set_model_state_dict(other, state)
    assert torch.equal(other(case.x), wanted)
    # A file of shards loads into an unsharded model, and the other way round.
    alone = case.blocks(seed=5)
    state = alone.state_dict()
    checkpoint.load(state, checkpoint_id=place)
    alone.load_state_dict(state)
    assert torch.equal(alone(case.x), case.blocks()(case.x))


# For one format.


def check_local_outputs(mesh, folder):
    case = Case("kmeans4-g32")
    x, columns, rows = case.random(3, HIDDEN), case.layer(HIDDEN, K), case.layer(HIDDEN, K)
    wanted = columns(x)
    parallelize_module(columns, mesh, ColwiseParallel(use_local_output=False))
    plan = RowwiseParallel(input_layouts=Replicate(), use_local_output=False)
    parallelize_module(rows, mesh, plan)
    for layer, placement in ((columns, Shard(1)), (rows, Replicate())):
        y = layer(x)
        assert isinstance(y, DTensor)
        assert y.placements == (placement,)
        assert (y.shape, y.stride()) == (wanted.shape, wanted.stride())
        case.close(y.full_tensor(), wanted)
    assert columns(x).to_local().shape == (3, K // mesh.size())


def check_input_layouts_of_columns(mesh, folder):
    case = Case("affine3-g32")
    x, plain = case.random(8, K), case.layer(K, HIDDEN)
    for dim in (0, -1, 1):
        made = case.layer(K, HIDDEN)
        plan = ColwiseParallel(input_layouts=Shard(dim), output_layouts=Replicate())
        parallelize_module(made, mesh, plan)
        own = x.chunk(mesh.size(), dim)[mesh.get_local_rank()].clone().requires_grad_()
        given = x.clone().requires_grad_()
        y, wanted = made(own), plain(given)
        case.close(y, wanted)
        y.square().sum().backward()
        wanted.square().sum().backward()
        # The sum of all processes' losses reaches each part of x once.
        case.close(own.grad, given.grad.chunk(mesh.size(), dim)[mesh.get_local_rank()])


def check_output_layouts_of_rows(mesh, folder):
    case = Case("affine3-g32")
    x, plain = case.random(8, HIDDEN), case.layer(HIDDEN, K)
    for dim in (0, 1):
        made = case.layer(HIDDEN, K)
        plan = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(dim))
        parallelize_module(made, mesh, plan)
        case.close(made(x), plain(x).chunk(mesh.size(), dim)[mesh.get_local_rank()])


def check_more_dimensions_of_x(mesh, folder):
    case = Case("kmeans4-g32")
    made, plain = parallel_blocks(mesh, case.blocks()), case.blocks()
    shared.assert_same_step(case, made, plain, case.random(2, 3, K))
    shared.assert_same_step(case, made, plain, case.random(K))


def check_permuted_inputs(mesh, folder):
    case, order = Case("kmeans4-g32"), torch.randperm(K, generator=torch.Generator())
    made, plain = case.layer(K, HIDDEN), case.layer(K, HIDDEN)
    for layer in (made, plain):
        layer.permute_inputs(order)
    message = "a weight with permuted inputs cannot be cut along k.*ColwiseParallel"
    refused(ValueError, message, lambda: parallelize_module(made, mesh, RowwiseParallel()))
    assert torch.equal(made(case.x), plain(case.x))
    parallelize_module(made, mesh, ColwiseParallel(output_layouts=Replicate()))
    shared.assert_same_step(case, made, plain, case.x)
    shared.assert_same_weight(made, plain)


def check_cuts_that_do_not_fit(mesh, folder):
    ranks = mesh.size()
    # A group would be cut; a byte of eight 1-bit codes would be cut.
    for format, k, unit, bits in (
        ("kmeans4-g32", 32 * (ranks + 1), 32, 4),
        ("int4-row", 2 * ranks + 2, 1, 4),
        ("int1-row", 4 * ranks, 1, 1),
    ):
        case = Case(format)
        made, x = case.layer(k, K), case.random(3, k)
        wanted = made(x)
        message = re.escape(
            f"{format} of k={k} cannot be cut into {ranks} along k: each part needs whole groups "
            f"of {unit} and whole bytes of {bits}-bit codes, and k/{ranks} is {k / ranks:g}; cut "
            f"it along n (ColwiseParallel)"
        )
        refused(
            ValueError,
            message,
            lambda made=made: parallelize_module(made, mesh, RowwiseParallel()),
        )
        assert torch.equal(made(x), wanted)
        parallelize_module(made, mesh, ColwiseParallel(output_layouts=Replicate()))
        case.close(made(x), wanted)


def check_plain_x_on_a_sharded_layer(mesh, folder):
    case = Case("kmeans4-g32")
    made, plain = case.layer(K, HIDDEN), case.layer(K, HIDDEN)
    parallelize_module(made, mesh, ColwiseParallel())
    placed = distribute_tensor(case.x, mesh, [Replicate()])
    message = "x and the weight must both be DTensors, got {} and {}: call the module that para"
    # forward itself, without the hooks that convert x
    refused(
        TypeError,
        message.format("a tensor", "a DTensor"),
        lambda: made.forward(case.x),
    )
    refused(TypeError, message.format("a DTensor", "a tensor"), lambda: plain(placed))
    case.close(made.forward(placed).full_tensor(), plain(case.x))


def check_two_mesh_dimensions(mesh, folder):
    two = init_device_mesh("cpu", (mesh.size() // 2, 2))
    made = Case("kmeans4-g32").layer(K, HIDDEN)
    weight = distribute_tensor(made.dequantise(), two, [Shard(0), Shard(0)])
    message = "can be sharded along one mesh dimension, by Shard"
    refused(NotImplementedError, message, lambda: setattr(made, "weight", weight))


def check_fused_layers(mesh, folder):
    case = Case("affine3-g32")
    made, plain = case.blocks(), case.blocks()
    fuse_layers(made, [("gate", "up")])
    shared.assert_same_step(case, parallel_blocks(mesh, made), plain, case.x)


def check_frozen_bias(mesh, folder):
    case = Case("kmeans4-g32")
    made = case.layer(K, HIDDEN)
    made.bias.requires_grad_(False)
    parallelize_module(made, mesh, ColwiseParallel())
    assert [p.requires_grad for p in made.parameters()] == [False] * 4


OF_A_FORMAT = (
    check_columns,
    check_columns_of_uneven_n,
    check_rows,
    check_blocks,
    check_memory,
    check_placements,
)
# Slower ones, for a format with a codebook and one with zero points or scales of whole rows.
OF_TWO_FORMATS = {
    check_layers_called_before: "int4-row",
    check_cast: "int4-row",
    check_state_dict: "affine3-g32",
    check_distributed_checkpoint: "affine3-g32",
}
CHECKS = (
    {
        f"{check.__name__}-{format}": partial(check, Case(format))
        for check in (*OF_A_FORMAT, *OF_TWO_FORMATS)
        for format in (FORMATS if check in OF_A_FORMAT else ("kmeans4-g32", OF_TWO_FORMATS[check]))
    }
    | {
        f"{check.__name__}-{ROTATED.format}": partial(check, ROTATED)
        for check in (*OF_A_FORMAT, check_layers_called_before)
    }
    | {
        name: value
        for name, value in globals().items()
        if name.startswith("check_") and value not in (*OF_A_FORMAT, *OF_TWO_FORMATS)
    }
)


@pytest.fixture(scope="module", params=[2, 4], ids="{} processes".format)
def found(request, tmp_path_factory):
    return results(__file__, CHECKS, request.param, tmp_path_factory.mktemp("processes"))


@pytest.mark.parametrize("check", CHECKS)
def test_tensor_parallel(check, found):
    assert not found[check], found[check]


@pytest.mark.parametrize(
    ("format", "k", "remedy"),
    [
        ("kmeans4-g128", 2 * 192, "kmeans4-g64 fits"),
        ("int4-g64", 2 * 96, "int4-g32 fits"),
        ("kmeans3-g64", 3 * 64, "kmeans3-g32 fits"),
        ("int1-g16", 3 * 16, "no group size fits"),
    ],
)
def test_refused_cuts_name_the_format_that_fits(format, k, remedy):
    format = Format.parse(format)
    with pytest.raises(ValueError, match=rf"divides k/2: {remedy}$|positive multiple"):
        tensor_parallel.check_cut(format, k, 2, "cut it along n")
