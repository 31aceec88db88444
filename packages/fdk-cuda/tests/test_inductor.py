"""The code of Inductor's kernels for a GPU, which none is needed for; test_inductor_pdl_gpu.py runs
it.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._inductor import config
from torch._inductor.codegen.triton import TritonKernel
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fdk_cuda.inductor import REPLACED, start_kernels_early

START, WAIT = TritonKernel.GDC_LAUNCH, TritonKernel.GDC_WAIT
SIZE = r"\w+(: tl.constexpr)? = \w+"
HOPPER = DeviceProperties(
    type="cuda",
    index=0,
    multi_processor_count=132,
    cc=90,
    major=9,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    warp_size=32,
)


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undoes what a test changes in Inductor."""
    for name in REPLACED:
        monkeypatch.setattr(TritonKernel, name, getattr(TritonKernel, name))
    with torch.compiler.config.patch(cache_key_tag=""):
        yield


@pytest.fixture
def hopper() -> Iterator[None]:
    """Makes Inductor generate code as if there were an H200."""
    properties = SimpleNamespace(
        major=9, minor=0, multi_processor_count=132, total_memory=1 << 37, name="H200"
    )
    changes = {
        "torch.cuda.is_available": lambda: True,
        "torch.cuda.current_device": lambda: 0,
        "torch.cuda.get_device_properties": lambda device=None: properties,
        "torch.cuda.get_device_capability": lambda device=None: (9, 0),
        "torch._inductor.scheduler.has_triton": lambda: True,
        "torch._inductor.runtime.hints.DeviceProperties.create": lambda device: HOPPER,
        "torch.utils._triton.triton_hash_with_backend": lambda: "",
    }
    with ExitStack() as stack:
        for name, value in changes.items():
            stack.enter_context(mock.patch(name, value))
        stack.enter_context(config.patch({"triton.enable_pdl": True}))
        yield


def kernels_of(function: Callable[..., object], *shapes: tuple[int, ...]) -> list[list[str]]:
    """Returns the lines of each kernel that Inductor makes of a function of bf16 tensors."""
    with FakeTensorMode() as mode:
        inputs = [torch.empty(shape, device="cuda:0", dtype=torch.bfloat16) for shape in shapes]
        traced = make_fx(function, decomposition_table=select_decomp_table())(*inputs)
        graph = GraphLowering(traced, example_inputs=inputs)
        handlers = V.set_graph_handler(graph), V.set_fake_mode(mode)
        with handlers[0], handlers[1], V.set_debug_handler(DebugContext()):
            graph.run(*inputs)
            code = graph.codegen()[0].value
    bodies = re.findall(r"\ndef triton_\w+\(.*\):\n((?:    .*\n|\n)+)", code)
    return [[line.strip() for line in body.splitlines() if line.strip()] for body in bodies]


def norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    x = x + residual
    scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)
    return x, x * scale.to(x.dtype) * weight


def activation(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def constants(x: Tensor) -> Tensor:
    return torch.full_like(x, 2.0)


CASES = {
    "loop": (norm, (64, 8192), (64, 8192), (8192,)),
    "no-loop": (norm, (64, 256), (64, 256), (256,)),
    "pointwise": (activation, (64, 2048)),
    "only-stores": (constants, (64, 2048)),
    "sums-of-columns": (lambda x: x.sum(0), (4096, 512)),
}


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("function", "shapes"), [(c[0], c[1:]) for c in CASES.values()], ids=CASES)
def test_kernels_start_the_next_one_and_wait_before_anything_else(
    function: Callable[..., object], shapes: tuple[tuple[int, ...], ...]
) -> None:
    assert start_kernels_early()
    kernels = kernels_of(function, *shapes)
    assert kernels
    for lines in kernels:
        at = lines.index(START)
        assert all(re.fullmatch(SIZE, line) for line in lines[:at])
        assert lines[at + 1] == WAIT
        assert sum(line in (START, WAIT) for line in lines) == 2
        assert any("tl.store(" in line for line in lines)


@pytest.mark.usefixtures("hopper")
def test_inductor_itself_starts_the_next_one_after_its_loads() -> None:
    """The replaced methods take effect: torch's own place the start elsewhere."""
    (lines,) = kernels_of(*CASES["loop"])
    loads = [i for i, line in enumerate(lines) if "tl.load(" in line]
    assert lines.index(START) > loads[0]


@pytest.mark.usefixtures("hopper")
def test_nothing_changes_without_the_option() -> None:
    with config.patch({"triton.enable_pdl": False}):
        before = kernels_of(*CASES["pointwise"])
        assert start_kernels_early()
        assert kernels_of(*CASES["pointwise"]) == before


def test_code_in_caches_is_told_apart() -> None:
    for _ in range(2):
        assert start_kernels_early()
    assert torch.compiler.config.cache_key_tag.count("fdk") == 1


@pytest.mark.parametrize("name", REPLACED)
def test_another_torch_is_left_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(TritonKernel, name)
    before = dict(vars(TritonKernel))
    assert not start_kernels_early()
    assert dict(vars(TritonKernel)) == before
