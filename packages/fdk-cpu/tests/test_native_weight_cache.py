"""The native weight that a layout caches between calls is never that of other tensors."""

import copy
import gc
import pickle
from collections.abc import Callable
from weakref import ref

import pytest
import torch
from torch import Tensor

import fdk_cpu
from fdk_cpu import CpuLayout
from fdk_cpu import linear as linear_module
from fdk_cpu.linear import NativeWeightCache
from fdk_formats import Format
from fdk_formats.testing import random_quantised

N, K = 24, 128
FORMATS = ("custom4-g64", "affine4-g64")


def laid_out(format: str = "custom4-g64", activations: str = "float") -> CpuLayout:
    q = random_quantised(Format.parse(format), N, K)
    layout = fdk_cpu.CpuBackend().pack(q, dtype=torch.float32, activations=activations)
    assert isinstance(layout, CpuLayout)
    return layout


def used(
    format: str = "custom4-g64", activations: str = "float"
) -> tuple[CpuLayout, Tensor, Tensor]:
    """Return a layout with a cached weight, x, and y."""
    x = torch.randn(3, K, generator=torch.Generator().manual_seed(0))
    layout = laid_out(format, activations)
    return layout, x, layout(x)


def twice(scale: Tensor) -> Tensor:
    return scale * 2


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """A list with an item for each native weight that is built."""
    calls: list[None] = []
    make = linear_module.native_weight
    monkeypatch.setattr(
        linear_module,
        "native_weight",
        lambda *args, **kwargs: calls.append(None) or make(*args, **kwargs),
    )
    return calls


@pytest.mark.parametrize("activations", ["float", "int8"])
@pytest.mark.parametrize("format", FORMATS)
def test_made_once(format: str, activations: str, made: list[None]) -> None:
    layout, x, y = used(format, activations)
    with torch.inference_mode():
        assert torch.equal(layout(x), y)
        assert torch.equal(layout(x[:1])[0], layout(x[0]))
        assert torch.equal(layout(x.view(1, 3, K)), y[None])
    assert len(made) == 1


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
@pytest.mark.parametrize("format", FORMATS)
def test_copies(format: str, copied: Callable[[CpuLayout], CpuLayout]) -> None:
    layout, x, y = used(format)
    other = copied(layout)
    other.scale.mul_(2)
    del layout
    gc.collect()
    assert torch.equal(other(x), 2 * y)


def set_buffer(layout: CpuLayout) -> None:
    layout.scale = twice(layout.scale)


def set_data(layout: CpuLayout) -> None:
    layout.scale.data = twice(layout.scale)


def set_storage(layout: CpuLayout) -> None:
    layout.scale.set_(twice(layout.scale))


def to_dtype(layout: CpuLayout) -> None:
    layout.scale.mul_(2)
    layout.to(torch.float32)


@pytest.mark.parametrize("activations", ["float", "int8"])
@pytest.mark.parametrize("change", [set_buffer, set_data, set_storage, to_dtype])
def test_tensors_that_change(change: Callable[[CpuLayout], None], activations: str) -> None:
    layout, x, y = used(activations=activations)
    change(layout)
    assert torch.equal(layout(x), 2 * y)


def test_dtype_that_changes_in_place() -> None:
    layout, x, _ = used()
    layout.scale.data = layout.scale.view(torch.float16)  # the same address and bytes
    other = laid_out()
    other.scale = layout.scale.clone()
    assert layout.scale.dtype == torch.float16
    torch.testing.assert_close(layout(x), other(x), rtol=0, atol=0, equal_nan=True)


def test_size_that_changes_in_place() -> None:
    layout, x, _ = used()
    layout.codes.resize_(10)  # the same address and dtype
    with pytest.raises(ValueError, match="codes must be 1536 bytes, got 10"):
        layout(x)


@pytest.mark.parametrize("activations", ["float", "int8"])
def test_freed_storage(activations: str) -> None:
    layout, x, y = used(activations=activations)
    bias = torch.randn(N, generator=torch.Generator().manual_seed(1))
    for name, tensors in (("x", (x.clone(), bias)), ("bias", (x, bias.clone()))):
        tensors[name == "bias"].untyped_storage().resize_(0)
        with pytest.raises(ValueError, match=rf"{name} must be \d+ bytes, got no memory"):
            layout(*tensors)
    assert torch.equal(layout(x), y)
    layout.scale.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="scales must be 96 bytes, got no memory"):
        layout(x)


@pytest.mark.parametrize("activations", ["float", "int8"])
def test_zero_tensors(activations: str) -> None:
    layout, x, y = used(activations=activations)
    bias = torch.randn(N, generator=torch.Generator().manual_seed(1))
    # Autograd passes this on in place of a missing gradient: it has a shape but no memory.
    with torch.no_grad():
        assert torch.equal(layout(torch._efficientzerotensor((3, K)), bias), bias.expand(3, N))
        assert torch.equal(layout(x, torch._efficientzerotensor((N,))), y)


def test_changed_levels() -> None:
    layout, x, y = used(activations="int8")
    # Negating levels and offset negates y.
    layout.levels, layout.offset = -layout.levels, -layout.offset
    torch.testing.assert_close(layout(x), -y)
    levels = layout.levels
    for wrong, message in (
        (levels[:8], "levels must be 16 bytes, got 8"),
        (levels.short(), r"levels must be torch\.int8, got torch\.int16"),
        (levels.to("meta"), r"levels must be .* on the CPU, got strides \[1\] on meta"),
        (None, "levels must be 16 bytes, got 0"),
    ):
        layout.levels = wrong
        with pytest.raises((TypeError, ValueError), match=message):
            layout(x)
    affine, x, _ = used("affine4-g64", "int8")
    affine.levels = levels
    with pytest.raises(ValueError, match="levels must be 0 bytes, got 16"):
        affine(x)


class Interrupted(NativeWeightCache):
    """Runs another thread's call after the first attribute that a call sets."""

    other: Callable[[], object] | None = None

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if self.other is not None:
            other, self.__dict__["other"] = self.other, None
            other()


def test_threads_with_other_tensors() -> None:
    kept, layout, x = Interrupted(), laid_out(), torch.ones(1, K)
    ours = dict(layout.named_buffers()) | {"zero_point": None}
    theirs = ours | {"scale": twice(layout.scale)}
    y = layout(x)
    kept.__dict__["other"] = lambda: kept.linear(x, None, theirs, 64, 4, N, False)
    for _ in range(2):
        assert torch.equal(kept.linear(x, None, ours, 64, 4, N, False), y)
        assert torch.equal(kept.linear(x, None, theirs, 64, 4, N, False), 2 * y)


def test_affine_for_codebook() -> None:
    layout, x, _ = used()
    affine = laid_out("affine4-g64")
    layout.codebook, layout.zero_point = None, affine.zero_point
    layout.codes, layout.scale = affine.codes, affine.scale
    assert torch.equal(layout(x), affine(x))
    layout.codebook = laid_out().codebook
    with pytest.raises(ValueError, match="a codebook or zero points, got both"):
        layout(x)


def test_sizes_are_checked_again() -> None:
    layout, x, _ = used()
    layout.codes = layout.codes[:-1]
    with pytest.raises(ValueError, match="codes must be 1536 bytes, got 1535"):
        layout(x)
    layout.codes = torch.empty(1536, dtype=torch.int8)
    with pytest.raises(TypeError, match=r"codes must be torch\.uint8"):
        layout(x)


def test_functional_call() -> None:
    layout, x, y = used()
    swapped = {"scale": twice(layout.scale)}
    assert torch.equal(torch.func.functional_call(layout, swapped, (x,)), 2 * y)
    assert torch.equal(layout(x), y)


def test_tensors_are_not_kept_alive() -> None:
    layout, _, _ = used()
    codes = ref(layout.codes)
    layout.to("meta")
    gc.collect()
    assert codes() is None
    with pytest.raises(ValueError, match="codes must be contiguous and on the CPU"):
        layout(torch.randn(1, K))


def test_fake_tensors_and_compile() -> None:
    layout, x, y = used()
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert layout(mode.from_tensor(x)).shape == (3, N)
    compiled = torch.compile(layout, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), y)
    layout.scale = twice(layout.scale)
    assert torch.equal(compiled(x), 2 * y)
    exported = torch.export.export(layout, (x,)).module()
    assert torch.equal(exported(x), 2 * y)


@pytest.mark.parametrize(
    ("x", "bias", "message"),
    [
        (torch.ones(1, K + 1), None, rf"x must be \[..., {K}\], got \[1, {K + 1}\]"),
        (torch.tensor(1.0), None, r"x must be"),
        (torch.ones(1, K, dtype=torch.int64), None, "x must be floating"),
        (torch.ones(1, K, dtype=torch.float64), None, "x must be one of .*got torch.float64"),
        (torch.ones(1, K), torch.ones(N + 1), "bias must be"),
        (torch.ones(1, K), torch.ones(N).bfloat16(), "bias must be"),
        (torch.ones(1, K, device="meta"), None, r"x must be on (cpu|meta)"),
    ],
)
def test_refused_as_by_the_op(x: Tensor, bias: Tensor | None, message: str) -> None:
    layout, _, _ = used()
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=message):
        layout(x, bias)


def test_x_of_any_stride_and_shape() -> None:
    layout, x, y = used()
    wide = torch.stack([x, x], dim=-1)[..., 0]  # every other element
    assert torch.equal(layout(wide), y)
    assert layout(x[:0]).shape == (0, N)
    bias = torch.arange(2.0 * N)[::2]
    torch.testing.assert_close(layout(x, bias), y + bias)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(layout(x), y)


def test_gradients_take_the_op() -> None:
    layout, x, y = used()
    x.requires_grad_()
    out = layout(x)
    assert torch.equal(out, y)
    out.sum().backward()
    assert x.grad is not None
