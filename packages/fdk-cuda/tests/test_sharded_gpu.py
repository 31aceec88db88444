"""Tensor parallelism and FSDP2 over NCCL, and accelerate's device maps, on two GPUs."""

from functools import partial

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

shared = pytest.importorskip(
    "tensor_parallel_checks", reason="needs the tests of fdk-formats, beside these in a checkout"
)
processes = pytest.importorskip("distributed_checks", reason="as above")
Case = shared.Case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.device_count() < 2,
        reason=f"needs two GPUs, torch finds {torch.cuda.device_count()}",
    ),
]
LAYERS = (("marlin-lut", "kmeans4-g64"), ("triton", "kmeans4-g64"), ("triton", "affine4-g64"))
# Sums of two parts in bfloat16, and gradients through two blocks, are rounded differently.
CASES = tuple(
    Case(format, backend, "cuda", torch.bfloat16, k=256, hidden=512, tolerance=0.03)
    for backend, format in LAYERS
)


def check_columns(case, mesh, folder):
    shared.check_columns(case, mesh)


def check_rows(case, mesh, folder):
    shared.check_rows(case, mesh)


def check_blocks(case, mesh, folder):
    shared.check_blocks(case, mesh)


def check_memory(case, mesh, folder):
    shared.check_memory(case, mesh)


def check_fsdp(case, mesh, folder):
    """The same kernels on the same gathered weight give the same bits."""
    made, plain = case.blocks(), case.blocks()
    for block in made:
        fully_shard(block, mesh=mesh)
    fully_shard(made, mesh=mesh)
    shared.assert_same_step(case, made, plain, case.x)
    assert torch.equal(made(case.x), plain(case.x))
    for block, other in zip(made, plain, strict=True):
        assert block.down.backend_name == other.down.backend_name == case.backend


def check_memory_of_fsdp(case, mesh, folder):
    """Between calls each GPU holds its part of the parameters, and no layout."""
    made = case.blocks()
    whole = sum(p.nbytes for p in made.parameters())
    for block in made:
        fully_shard(block, mesh=mesh)
    fully_shard(made, mesh=mesh)
    for is_called in (False, True):
        if is_called:
            made(case.x.clone().requires_grad_()).float().square().sum().backward()
        assert all(isinstance(p, DTensor) for p in made.parameters())
        local = sum(p.to_local().nbytes for p in made.parameters())
        assert local <= whole / mesh.size() + 1024, (local, whole)
    layers = [layer for block in made for layer in block.children()]
    assert [layer._stored() for layer in layers] == [None] * len(layers)


CHECKS = {
    f"{check.__name__}-{case.backend}-{case.format}": partial(check, case)
    for check in (
        check_columns,
        check_rows,
        check_blocks,
        check_memory,
        # FSDP2 of torch 2.11 gives every shard a gradient at first, which integers cannot have.
        *([check_fsdp, check_memory_of_fsdp] if shared.has_integer_fsdp() else []),
    )
    for case in CASES
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return processes.results(__file__, CHECKS, 2, tmp_path_factory.mktemp("processes"), "cuda")


@pytest.mark.parametrize("check", CHECKS)
def test_sharded(check, found):
    assert not found[check], found[check]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.backend}-{case.format}")
def test_device_map_of_accelerate(case):
    """A block on each GPU, and one that is offloaded to the CPU between calls."""
    from accelerate import dispatch_model

    three, plain = (torch.nn.Sequential(*case.blocks(), case.blocks(5)[0]) for _ in range(2))
    with torch.no_grad():
        wanted = plain(case.x)
        places = {"0": 0, "1": 1, "2": "cpu"}
        made = dispatch_model(three, places, main_device=0)
        for _ in range(2):
            y = made(case.x)
            case.close(y.to(wanted.device), wanted)
    devices = [block.up.device for block in made]
    assert devices == [torch.device("cuda", 0), torch.device("cuda", 1), torch.device("meta")]
    assert [block.up.backend_name for block in made[:2]] == [case.backend] * 2
