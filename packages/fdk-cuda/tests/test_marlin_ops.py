"""The Marlin kernel for each m, and how large batches are split."""

from dataclasses import replace

import pytest
import torch
from marlin_compile import HOPPER

from fdk_cuda.marlin import ops
from fdk_cuda.marlin.heuristics_hopper import MAX_INVARIANT_M
from fdk_cuda.marlin.heuristics_small_m import MAX_M
from fdk_cuda.marlin.ops import MAX_FUSED_ROWS, MAX_HOPPER_ROWS, kernel_for


def test_kernel_for() -> None:
    """Batch-invariant layers run one kernel for every m."""
    many = (1, 16, 17, MAX_FUSED_ROWS + 1, MAX_HOPPER_ROWS + 1, 1 << 20)
    for is_hopper, is_large in ((True, False), (True, True), (False, False)):
        kinds = {
            invariant: [
                kernel_for(
                    m,
                    is_hopper=is_hopper,
                    small_m_limit=MAX_M,
                    decodes_slowly=is_large,
                    batch_invariant=invariant,
                )
                for m in many
            ]
            for invariant in (False, True)
        }
        assert set(kinds[True]) == {"hopper_gemm" if is_hopper else "small_m"}
        assert kinds[False][0] == "small_m"
        assert (kinds[False][-1] == "dequantise") == (not is_hopper or is_large)


@pytest.mark.parametrize("limit", [8, MAX_M])
@pytest.mark.parametrize("is_large", [False, True])
def test_kernel_around_the_small_m_limit(limit: int, is_large: bool) -> None:
    def kernel(m: int, is_hopper: bool) -> str:
        return kernel_for(
            m,
            is_hopper=is_hopper,
            small_m_limit=limit,
            decodes_slowly=is_large,
            batch_invariant=False,
        )

    assert [kernel(m, True) for m in (1, limit, limit + 1)] == ["small_m", "small_m", "hopper_gemm"]
    assert {kernel(m, False) for m in (1, limit, limit + 1)} == {"small_m"}


@pytest.mark.parametrize(
    ("format", "n", "k", "wanted"),
    [
        ("affine8-g64", 8192, 8192, 8),
        ("affine8-g64", 14336, 4096, 8),
        ("affine8-g64", 4096, 4096, 16),
        ("int8-g64", 8192, 8192, 8),
        ("custom8-g64", 28672, 8192, 8),
        ("custom8-g64", 8192, 8192, 16),
        ("custom4-g64", 28672, 8192, 16),
    ],
)
def test_small_m_limit(format: str, n: int, k: int, wanted: int, monkeypatch) -> None:
    for device, most in ((HOPPER, wanted), (replace(HOPPER, is_hopper=False), MAX_M)):
        monkeypatch.setattr(ops, "device_limits", lambda _, device=device: device)
        ops.small_m_limit.cache_clear()
        assert ops.small_m_limit(format, n, k, 0) == most
    ops.small_m_limit.cache_clear()


def test_large_batches_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part uses the runner of its own m, and rows keep their order."""
    runs = []

    def run(runner: tuple[object, ...], x: torch.Tensor, *_: object) -> torch.Tensor:
        runs.append((*runner[-2:], len(x)))
        return x[:, :3] * 2

    monkeypatch.setattr(ops, "hopper_runner_for", lambda *key: key)
    monkeypatch.setattr(ops, "run_hopper", run)
    packed = torch.empty(1, 1, 1, dtype=torch.uint8)
    for m, invariant, wanted in (
        (5, True, [5]),
        (MAX_INVARIANT_M, True, [1024]),
        (2 * MAX_INVARIANT_M + 1, True, [1024, 1024, 1]),
        (2 * MAX_INVARIANT_M + 1, False, [2049]),
    ):
        runs.clear()
        x = torch.arange(m * 8.0).view(m, 8)
        y = ops.hopper_linear(x, packed, packed, "custom4-g64", None, 3, 8, invariant)
        assert torch.equal(y, x[:, :3] * 2)
        assert runs == [(invariant, rows, rows) for rows in wanted]
