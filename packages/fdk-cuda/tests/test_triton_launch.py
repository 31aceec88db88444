"""Compiled launches that are kept, with a kernel that only counts."""

import ast
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from triton import CompilationError, OutOfResources
from triton.runtime.errors import PTXASError
from triton_cases import DGRAD_CONFIGS

from fdk_cuda.triton import compiled_launch as compiled_launch_module
from fdk_cuda.triton import launch as launch_module
from fdk_cuda.triton.compiled_launch import CompiledLaunch, compile_and_launch, launch_compiled
from fdk_cuda.triton.configs import DgradWgmmaConfig, GemmWgmmaConfig
from fdk_cuda.triton.launch import PackedWeight, dgrad, linear, linear_dgrad
from fdk_cuda.triton.layout import PackedLayout
from fdk_formats import torch_internals


class FakeKernel:
    """A kernel and its compiled form; counts launches that bypass Triton."""

    def __init__(self, asm: dict[str, str], arg_names: tuple[str, ...] = ("x_ptr",)) -> None:
        self.arg_names, self.again = arg_names, 0
        self.compiled = SimpleNamespace(run=self._run, function=None, packed_metadata=None, asm=asm)

    def _run(self, *arguments: object) -> None:
        self.again += 1

    def __getitem__(self, grid: object) -> object:
        return lambda *arguments, **options: self.compiled


@pytest.fixture(autouse=True)
def no_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_launch_module, "INTERPRETED", False)
    monkeypatch.setattr(compiled_launch_module, "_compiled", {})
    monkeypatch.setattr(launch_module, "_not_in_layout", set())
    monkeypatch.setattr(torch_internals, "current_raw_stream", lambda device: 0)


@pytest.mark.parametrize("is_right", [True, False])
def test_wrong_kernels_are_not_kept(is_right: bool) -> None:
    """During the check, another thread does not find the kernel either."""
    tensors, kernel, key = (torch.zeros(4),), FakeKernel({}), ("some", "key")
    found = []

    def look(compiled: object) -> bool:
        found.append(launch_compiled(key, tensors))
        return is_right

    assert compile_and_launch(key, kernel, (1,), tensors, (), {}, look) == is_right
    assert found == [False]
    assert launch_compiled(key, tensors) == is_right
    assert kernel.again == int(is_right)


@pytest.mark.parametrize("asm", [{}, {"ttgir": "no transposition"}], ids=["none", "other"])
def test_dgrad_without_the_right_layout(
    asm: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uses the dequantised weight, also where Triton kept no text of its layouts."""
    names = "y words scale zero values lanes out m n k k_tiles groups"
    monkeypatch.setattr(launch_module, "dgrad_kernel", FakeKernel(asm, tuple(names.split())))
    weight = torch.eye(64, dtype=torch.bfloat16)
    monkeypatch.setattr(launch_module, "dequantise", lambda w, dtype: weight)
    one = torch.zeros(4)
    w = PackedWeight(one, one, None, one, one, PackedLayout(64, 64, 4, 64))
    grad_y = torch.randn(2, 64).bfloat16()
    for _ in range(2):
        assert torch.equal(dgrad(grad_y, w, replace(DGRAD_CONFIGS[0], split_n=1)), grad_y)
    assert launch_module._not_in_layout
    assert not compiled_launch_module._compiled


class NotMade(FakeKernel):
    """A kernel that this Triton cannot compile, or that this machine cannot hold."""

    def __init__(self, error: Exception) -> None:
        super().__init__({}, ("CLUSTER",))
        self.error, self.clusters = error, list[int]()

    def warmup(self, *arguments: object, CLUSTER: int = 1, **options: object) -> None:
        self.clusters.append(CLUSTER)
        raise self.error


ERRORS = (
    CompilationError("def many(): pass", ast.parse("1").body[0], "no barrier"),
    PTXASError("no barrier"),
    OutOfResources(300000, 232448, "no barrier"),
    RuntimeError("no barrier"),
)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_gemm_wgmma_that_cannot_compile(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tries without clusters, then uses the dequantised weight, and warns once."""
    kernel, weight = NotMade(error), torch.eye(64, dtype=torch.bfloat16)
    monkeypatch.setattr(launch_module, "gemm_wgmma_kernel", kernel)
    monkeypatch.setattr(launch_module, "_not_made", set())
    monkeypatch.setattr(launch_module, "permute", lambda x, w: x)
    monkeypatch.setattr(launch_module, "dequantise", lambda w, dtype: weight)
    w = PackedWeight(
        *[torch.zeros(4)] * 2, None, *[torch.zeros(4)] * 2, PackedLayout(64, 64, 4, 64)
    )
    x, bias = torch.randn(70, 64).bfloat16(), torch.randn(64).bfloat16()
    with pytest.warns(UserWarning, match="(?s)cannot make gemm_wgmma_kernel.*no barrier"):
        y = linear(x, w, bias, GemmWgmmaConfig(128, 2, 2))
    assert torch.equal(y, x + bias)
    assert torch.equal(linear(x, w, bias, GemmWgmmaConfig(128, 2, 2)), y)
    assert kernel.clusters == [2, 1]


@pytest.mark.parametrize("offset", [0, 1], ids=["aligned", "unaligned"])
def test_dgrad_wgmma_that_cannot_compile(offset: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses the dequantised weight and warns once; also for a dy that TMA cannot read."""
    kernel, weight = NotMade(PTXASError("no barrier")), torch.eye(64, dtype=torch.bfloat16)
    monkeypatch.setattr(launch_module, "dgrad_wgmma_kernel", kernel)
    monkeypatch.setattr(launch_module, "_not_made", set())
    monkeypatch.setattr(launch_module, "dequantise", lambda w, dtype: weight)
    w = PackedWeight(
        *[torch.zeros(4)] * 2, None, *[torch.zeros(4)] * 2, PackedLayout(64, 64, 4, 64)
    )
    grad_y = torch.randn(offset + 70 * 64).bfloat16()[offset:].view(70, 64)
    with pytest.warns(UserWarning, match="(?s)cannot make dgrad_wgmma_kernel.*no barrier"):
        grad_x = linear_dgrad(grad_y, w, DgradWgmmaConfig())
    assert torch.equal(grad_x, grad_y)
    assert torch.equal(linear_dgrad(grad_y, w, DgradWgmmaConfig()), grad_y)
    assert kernel.clusters == [1]


@pytest.mark.parametrize("packed", [(8, 1, 512), (8, 1, 512, 1, 1, 1)], ids=["known", "other"])
def test_launch_of_clusters(packed: tuple[int, ...]) -> None:
    """The launch adds clusters, or raises if this Triton cannot."""
    metadata = SimpleNamespace(num_warps=8, shared=512)
    given = []
    kernel = SimpleNamespace(
        run=lambda *arguments: given.append(arguments),
        function="function",
        packed_metadata=packed,
        metadata=metadata,
    )
    if len(packed) > 3:
        with pytest.raises(RuntimeError, match="no way to launch clusters"):
            CompiledLaunch(kernel, (4,), (7,), 2)
        return
    CompiledLaunch(kernel, (4,), (7,), 2)((16, 32), 0)
    assert given == [(4, 1, 1, 0, "function", (8, 2, 512), None, None, None, 16, 32, 7)]


def test_launch_uses_the_current_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments are kept for the stream of the last launch."""
    streams, seen = iter([0, 5, 5, 0]), []
    monkeypatch.setattr(torch_internals, "current_raw_stream", lambda device: next(streams))
    kernel = SimpleNamespace(
        run=lambda *arguments: seen.append(arguments), function="f", packed_metadata=None
    )
    own = CompiledLaunch(kernel, (4,), (7,))
    for _ in range(4):
        own((16, 32), 0)
    assert [arguments[:5] for arguments in seen] == [(4, 1, 1, s, "f") for s in (0, 5, 5, 0)]
    assert {arguments[5:] for arguments in seen} == {(None, None, None, None, 16, 32, 7)}


@pytest.mark.parametrize("scratch", [0, 128])
@pytest.mark.parametrize("version", ["3.6.0", "3.7.1"])
def test_launch_without_wrapper(
    version: str, scratch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton 3.6's launch gets its wrapper's arguments, unless there is scratch memory."""
    calls: list[tuple[str, tuple[object, ...]]] = []

    class Run:
        global_scratch_size, profile_scratch_size = 0, scratch
        launch_cooperative_grid, launch_pdl = False, True

        def launch(self, *args: object) -> None:
            calls.append(("launch", args))

        def __call__(self, *args: object) -> None:
            calls.append(("run", args))

    kernel = SimpleNamespace(run=Run(), function="f", packed_metadata="packed")
    monkeypatch.setattr(compiled_launch_module.triton, "__version__", version)
    monkeypatch.setattr(torch_internals, "current_raw_stream", lambda device: 5)
    CompiledLaunch(kernel, (4,), (7,))((16, 32), 0)
    added = (False, True, None, None)
    expected = ("run", (4, 1, 1, 5, "f", "packed", None, None, None, 16, 32, 7))
    if version == "3.6.0" and not scratch:
        expected = ("launch", (4, 1, 1, 5, "f", *added, "packed", None, None, None, 16, 32, 7))
    assert calls == [expected]
