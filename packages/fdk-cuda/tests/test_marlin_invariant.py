"""A row of y does not depend on m: the plans that see to it, and the proof on a GPU."""

from dataclasses import replace

import pytest
import torch
from marlin_cases import pack, random_x
from torch.nn.functional import linear

import fdk_cuda
from fdk_cuda.marlin import marlin_backends, ops
from fdk_cuda.marlin.heuristics_hopper import (
    INVARIANT_M,
    MAX_INVARIANT_M,
    HopperPlan,
    plan_hopper,
    plan_hopper_invariant,
)
from fdk_cuda.marlin.heuristics_small_m import MAX_M, Device
from fdk_cuda.marlin.layout import Geometry
from fdk_cuda.marlin.ops import MAX_FUSED_ROWS, MAX_HOPPER_ROWS, kernel_for
from fdk_cuda.marlin.runtime import device_limits
from fdk_formats import all_backends
from fdk_formats.format import BITS
from fdk_formats.testing import Case, cases, check_backend, nrmse, poisoned

HOPPER = Device(sm_count=132, shared_bytes=232448, has_clusters=True, is_hopper=True)
FEW = replace(HOPPER, sm_count=6)
SHAPES = ((1, 64), (37, 192), (1000, 1088), (4096, 4096), (4096, 14336), (28672, 8192))
SOME_M = (*range(1, 66), 96, 97, 128, 200, 256, 257, 512, MAX_INVARIANT_M)
BACKENDS = {backend.name: backend for backend in marlin_backends(batch_invariant=True)}


def units(plan: HopperPlan, stages: int) -> list[tuple[int, int, int]]:
    """Tile and stages of each unit, as tile_scheduler.cuh's Unit counts them."""
    found = []
    tiles = plan.n_tiles * plan.m_tiles
    for index in range(plan.whole_tiles + (tiles - plan.whole_tiles) * plan.splits):
        part = index - plan.whole_tiles
        tile = index if part < 0 else plan.whole_tiles + part // plan.splits
        rank, parts = (0, 1) if part < 0 else (part % plan.splits, plan.splits)
        found.append((tile, stages * rank // parts, stages * (rank + 1) // parts))
    return found


def orders(plan: HopperPlan, geometry: Geometry) -> set[tuple[tuple[int, int], ...]]:
    """In which parts the columns of a tile are summed: one answer where all tiles agree."""
    by_tile: dict[int, list[tuple[int, int]]] = {}
    for tile, first, last in units(plan, geometry.padded_k // (64 * plan.shape.k_blocks)):
        by_tile.setdefault(tile, []).append((first, last))
    assert sorted(by_tile) == list(range(plan.n_tiles * plan.m_tiles))
    return {tuple(parts) for parts in by_tile.values()}


@pytest.mark.parametrize("device", [HOPPER, FEW], ids=["132", "6"])
@pytest.mark.parametrize(("bits", "signs"), [*((bits, False) for bits in BITS), (1, True)])
def test_hopper_sums_in_one_order(bits: int, signs: bool, device: Device) -> None:
    for n, k in SHAPES:
        geometry = Geometry(bits, n, k, 64, torch.bfloat16, False, has_signs=signs)
        seen = set()
        for m in SOME_M:
            plan = plan_hopper_invariant(geometry, m, device)
            found = orders(plan, geometry)
            assert len(found) == 1, (plan, found)
            seen.add((plan.shape, *found))
            assert plan.shape.cluster == 1
            assert (plan.m_tiles - 1) * plan.shape.tile_m < m
            assert m <= plan.m_tiles * plan.shape.tile_m
            assert plan.grid <= device.sm_count
            assert plan.shared_bytes <= device.shared_bytes
            # No more parts than are worth it at INVARIANT_M: few outputs have many.
            assert plan.partial_tiles * plan.shape.tile_n * plan.shape.tile_m * 4 <= 128 << 20
        assert len(seen) == 1, seen


def test_ordinary_plans_do_not_have_one_order() -> None:
    """What the option is for: the test above can fail."""
    geometry = Geometry(4, 4096, 4096, 64, torch.bfloat16, False)
    seen = set()
    for m in (32, 64, 256):
        plan = plan_hopper(geometry, m, HOPPER)
        seen.add((plan.shape, frozenset(orders(plan, geometry))))
    assert len(seen) > 1


def test_kernel_for() -> None:
    """One kernel for every m where rows must not depend on it."""
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


@pytest.mark.parametrize("few", [8, MAX_M])
@pytest.mark.parametrize("is_large", [False, True])
def test_kernel_for_few_rows(few: int, is_large: bool) -> None:
    def kernel(m: int, is_hopper: bool) -> str:
        return kernel_for(
            m,
            is_hopper=is_hopper,
            small_m_limit=few,
            decodes_slowly=is_large,
            batch_invariant=False,
        )

    assert [kernel(m, True) for m in (1, few, few + 1)] == ["small_m", "small_m", "hopper_gemm"]
    assert {kernel(m, False) for m in (1, few, few + 1)} == {"small_m"}


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
def test_few_rows(format: str, n: int, k: int, wanted: int, monkeypatch) -> None:
    for device, most in ((HOPPER, wanted), (replace(HOPPER, is_hopper=False), MAX_M)):
        monkeypatch.setattr(ops, "device_limits", lambda _, device=device: device)
        ops.small_m_limit.cache_clear()
        assert ops.small_m_limit(format, n, k, 0) == most
    ops.small_m_limit.cache_clear()


def test_many_rows_are_taken_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part by the runner of its own m, with the same plan; rows keep their order."""
    taken = []

    def run(runner: tuple[object, ...], x: torch.Tensor, *_: object) -> torch.Tensor:
        taken.append((*runner[-2:], len(x)))
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
        taken.clear()
        x = torch.arange(m * 8.0).view(m, 8)
        y = ops.hopper_linear(x, packed, packed, "custom4-g64", None, 3, 8, invariant)
        assert torch.equal(y, x[:, :3] * 2)
        assert taken == [(invariant, rows, rows) for rows in wanted]


def test_register_backends() -> None:
    names = ("marlin", "marlin-lut", "triton")
    try:
        fdk_cuda.register_backends(batch_invariant=True)
        assert all(all_backends()[name].batch_invariant for name in names)
    finally:
        fdk_cuda.register_backends()
    assert not any(all_backends()[name].batch_invariant for name in names)


FORMATS = [
    *(f"custom{bits}-g64" for bits in BITS),
    *("affine4-g32", "affine8-g64-zint", "binary1-g64", "binary1-g32"),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), [(1000, 1088), (4096, 4096), (28672, 1024)], ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_rows_do_not_depend_on_m(format: str, n: int, k: int) -> None:
    q, layout = pack(format, n, k, batch_invariant=True)
    assert layout.geometry.has_signs == format.startswith("binary")
    x, bias = random_x(3000, k), random_x(n, seed=2)
    with poisoned():
        whole = layout(x, bias)
    if device_limits(0).is_hopper:  # elsewhere the weight is not rounded, see test_conformance
        oracle = linear(x.double(), q.dequantise(x.dtype).double(), bias.double())
        assert nrmse(whole, oracle) <= 1.2 * nrmse(oracle.to(x.dtype), oracle) + 1e-5
    for m in (*range(1, 65), 200, 256, 257, 1024, 1025):
        with poisoned():
            first, last = layout(x[:m], bias), layout(x[-m:], bias)
        assert torch.equal(first, whole[:m]), f"the first {m} rows"
        assert torch.equal(last, whole[-m:]), f"the last {m} rows"


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS)
def test_rows_do_not_depend_on_m_elsewhere(format: str) -> None:
    """What GPUs other than Hopper run: small_m.cu, 16 rows of x at a time."""
    q, layout = pack(format, 1000, 1088, batch_invariant=True)
    arguments = layout.packed, layout.codebook, str(q.format)
    x = random_x(150, 1088)
    whole = ops.small_linear(x, *arguments, None, *q.shape, True)
    for m in (*range(1, 65), 96, 97):
        for rows in (slice(None, m), slice(-m, None)):
            y = ops.small_linear(x[rows], *arguments, None, *q.shape, True)
            assert torch.equal(y, whole[rows]), (m, rows)


INVARIANT_CASES = list(
    cases(
        bits=BITS,
        codebooks=("custom", "affine"),
        group_sizes=(32, None),
        dtypes=(torch.bfloat16, torch.float16),
        ms=(1, INVARIANT_M + 1),
        device="cuda",
    )
)


@pytest.mark.gpu
@pytest.mark.parametrize("case", INVARIANT_CASES, ids=str)
def test_conformance(case: Case) -> None:
    check_backend(BACKENDS["marlin" if case.format.is_affine else "marlin-lut"], case)
