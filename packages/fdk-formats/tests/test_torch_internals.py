"""The private names of torch: where they are used, what they find, and what happens without."""

import importlib.util
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.overrides import BaseTorchFunctionMode

from fdk_formats import torch_internals
from fdk_formats.torch_internals import (
    in_dispatch_mode,
    in_place_version,
    in_transform,
    is_batched,
    is_plain_call,
)

X, BIAS = torch.tensor([[1.0, 0.0, -1.0]]), torch.tensor([1.0, 2.0])
# Except ops: fdk-bench times some of torch's own that have no other name.
PRIVATE_NAME = re.compile(
    r"\b(torch|forward_ad|functorch)\.(?!ops\.)(\w+\.)*_(?!_)\w+"
    r"|\bfrom torch(\.\w+)*\._(?!_)\w+ import"
    r"|\.(_version|_is_zerotensor)\b"
)


def test_private_names_are_in_one_module() -> None:
    sources = list(Path(__file__).parents[2].glob("*/src/**/*.py"))
    if not sources:
        pytest.skip("needs the sources of a checkout; these tests run against a wheel")
    with_names = {path.name for path in sources if PRIVATE_NAME.search(path.read_text())}
    assert with_names == {"torch_internals.py"}


@pytest.mark.parametrize(
    ("line", "is_found"),
    [
        ("torch._C._len_torch_dispatch_stack()", True),
        ("from torch._subclasses import FakeTensorMode", True),
        ("forward_ad._current_level", True),
        ("x._version", True),
        ("torch.__version__", False),
        ("torch.ops.aten._weight_int4pack_mm", False),
        ("torch.cuda.current_device()", False),
    ],
)
def test_what_counts_as_a_private_name(line: str, is_found: bool) -> None:
    assert bool(PRIVATE_NAME.search(line)) == is_found


def test_plain_calls() -> None:
    for x in (X, X[0], torch.zeros(1, 6)[:, ::2], torch.inference_mode()(lambda: X + 1)()):
        assert is_plain_call(x, None)
        assert is_plain_call(x, BIAS)
    parameter = nn.Parameter(BIAS)
    assert not is_plain_call(X, parameter)
    with torch.no_grad():
        assert is_plain_call(X, parameter)
        assert is_plain_call(X.clone().requires_grad_(), None)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        assert is_plain_call(X, parameter)


class Subclass(Tensor):
    """A subclass that adds nothing."""


OTHER_TENSORS: dict[str, Callable[[], Tensor]] = {
    "gradient": lambda: X.clone().requires_grad_(),
    "negative": lambda: torch._neg_view(X),
    "zeros without memory": lambda: torch._efficientzerotensor(1, 3),
    "empty": lambda: X[:0],
    "meta": lambda: X.to("meta"),
    "fake": lambda: FakeTensorMode().from_tensor(X),
    "subclass": lambda: X.as_subclass(Subclass),
}


@pytest.mark.parametrize("make", OTHER_TENSORS.values(), ids=OTHER_TENSORS)
def test_tensors_that_need_torch(make: Callable[[], Tensor]) -> None:
    assert not is_plain_call(make(), None)
    assert not is_plain_call(X, make())


def test_x_that_is_a_parameter_needs_torch() -> None:
    assert not is_plain_call(nn.Parameter(X, requires_grad=False), None)


@contextmanager
def _vmap() -> Iterator[None]:
    torch._C._functorch._vmap_increment_nesting(2, "error")
    try:
        yield
    finally:
        torch._C._functorch._vmap_decrement_nesting()


CONTEXTS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "dispatch mode": FakeTensorMode,
    "function mode": BaseTorchFunctionMode,
    "transform": _vmap,
    "forward mode": forward_ad.dual_level,
    "profiler": torch.autograd.profiler.profile,
}


@pytest.mark.parametrize("context", CONTEXTS.values(), ids=CONTEXTS)
def test_contexts_that_need_torch(context: Callable[[], AbstractContextManager[object]]) -> None:
    with context():
        assert not is_plain_call(X, None)
        assert not is_plain_call(X, BIAS)
    assert is_plain_call(X, None)


@pytest.mark.filterwarnings("ignore:`torch.jit.trace`")
def test_tracers_and_transforms_need_torch() -> None:
    seen = []

    def traced(x: Tensor) -> Tensor:
        seen.append(is_plain_call(x, None) or is_plain_call(X, None))
        return x + 1

    torch.jit.trace(traced, X, check_trace=False)
    torch.func.vmap(traced)(X[None])
    torch.func.grad(lambda x: traced(x).sum())(X)
    assert seen == [False] * 3
    compiled = torch.compile(lambda x: x + is_plain_call(x, None), backend="eager", fullgraph=True)
    assert torch.equal(compiled(X), X)


def test_batched_at_any_level() -> None:
    seen = []

    def look(x: Tensor) -> Tensor:
        seen.append(is_batched(x))
        return x.sum()

    look(X)
    torch.func.grad(look)(X)
    torch.func.vmap(look)(X)
    torch.func.vmap(torch.func.grad(look))(X)
    assert seen == [False, False, True, True]


def test_in_place_version() -> None:
    x = X.clone()
    before = in_place_version(x)
    assert in_place_version(x) == before
    x += 1
    assert in_place_version(x) != before
    with torch.inference_mode():
        assert in_place_version(X + 1) is None


NAMES = (
    (torch._C, "_len_torch_dispatch_stack"),
    (torch._C._functorch, "peek_interpreter_stack"),
    (torch._C._functorch, "is_functorch_wrapped_tensor"),
    (torch._C._autograd, "_profiler_enabled"),
    (forward_ad, "_current_level"),
)


def test_names_of_the_installed_torch() -> None:
    for owner, name in NAMES:
        assert hasattr(owner, name), name
    assert hasattr(torch._C, "_is_any_autocast_enabled")
    assert not torch_internals.may_autocast()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch_internals.may_autocast()
    assert not in_dispatch_mode()
    assert not in_transform()
    if torch.cuda.is_available():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            handle = torch_internals.current_raw_stream(torch.cuda.current_device())
        assert handle == stream.cuda_stream


def _reloaded() -> ModuleType:
    """Return a second copy of the module, which finds torch as it is now."""
    spec = importlib.util.spec_from_file_location("reloaded", torch_internals.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("owner", "name"), NAMES, ids=[name for _, name in NAMES])
def test_without_a_name_calls_go_through_torch(
    owner: object, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _reloaded().is_plain_call(X, BIAS)
    monkeypatch.delattr(owner, name)
    without = _reloaded()
    assert not without.is_batched(X)
    if name != "is_functorch_wrapped_tensor":
        assert not without.is_plain_call(X, BIAS)


def test_without_the_handle_of_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_cuda_getCurrentRawStream", raising=False)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: torch.cuda.Stream, raising=False
    )
    monkeypatch.setattr(torch.cuda.Stream, "cuda_stream", 5, raising=False)
    assert _reloaded().current_raw_stream(0) == 5
