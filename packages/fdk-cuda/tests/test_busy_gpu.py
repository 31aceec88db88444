"""Hopper kernels finish while other work occupies most SMs."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from marlin_cases import ON_HOPPER, check_rounded_once, pack, random_x

from fdk_cuda.marlin.dgrad import dgrad_plans, dgrad_runner, run_dgrad
from fdk_cuda.marlin.heuristics_hopper import HopperPlan, hopper_plans
from fdk_cuda.marlin.runtime import device_limits, hopper_runner, run_hopper
from fdk_cuda.nvrtc import Kernel, Launch, Program
from fdk_formats.testing import poisoned

pytestmark = ON_HOPPER

# A block occupies its SM until the host releases it, or for ten seconds. It counts itself first.
HOLD = Program(
    "hold.cu",
    """
struct Params { int* held; volatile int* let_go; };
extern "C" __global__ void hold(const __grid_constant__ Params p) {
  unsigned long long start, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
  atomicAdd_system(p.held, 1);
  do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  while (*p.let_go == 0 && now - start < 10000000000ull);
}
""",
)
SECONDS = 5.0
N, K, M = 1000, 1088, 150


@contextmanager
def held(count: int) -> Iterator[None]:
    """Occupies ``count`` SMs within this context."""
    device = torch.cuda.current_device()
    flags = torch.zeros(2, dtype=torch.int32).pin_memory()
    # All shared memory of an SM: no other block fits.
    shared = device_limits(device).shared_bytes
    launch = Launch(
        Kernel(HOLD, "hold"), device, fields="2P", grid=count, threads=32, shared_bytes=shared
    )
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        launch(flags.data_ptr(), flags.data_ptr() + flags.element_size())
    end = time.monotonic() + SECONDS
    while int(flags[0]) < count:
        assert time.monotonic() < end, f"{int(flags[0])} of {count} blocks run"
    try:
        yield
    finally:
        flags[1] = 1
        torch.cuda.synchronize()


def finishes(event: torch.cuda.Event) -> bool:
    """Returns whether an event completes in time."""
    end = time.monotonic() + SECONDS
    while not event.query():
        if time.monotonic() > end:
            return False
    return True


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("free", [1, 2, 10, 64])
def test_plans_finish_on_the_free_sms(free: int, direction: str) -> None:
    """Grids are planned for all SMs. A cluster needs two SMs of one GPC."""
    q, layout = pack("custom4-g64", N, K, seed=1)
    geometry, weight = layout.geometry, (layout.packed, layout.codebook)
    limits = device_limits(0)
    forward = direction == "forward"
    x = random_x(M, K if forward else N)
    W_hat = q.dequantise(torch.bfloat16).double()
    oracle = x.double() @ (W_hat.T if forward else W_hat)
    # One plan of each kind; others differ in the tile's width.
    kinds = {
        (
            plan.shape.consumers,
            plan.shape.k_groups,
            plan.shape.cluster,
            plan.partial_tiles > 0,
        ): plan
        for plan in (hopper_plans if forward else dgrad_plans)(geometry, M, limits)
    }
    plans = list(kinds.values())
    assert {(2, 1, 1, False), (2, 1, 1, True), (2, 1, 2, False)} <= set(kinds)

    def run(plan: HopperPlan) -> torch.Tensor:
        if forward:
            runner = hopper_runner(geometry, torch.bfloat16, M, plan, 0)
            return run_hopper(runner, x, *weight, None, N)
        return run_dgrad(dgrad_runner(geometry, torch.bfloat16, M, plan, 0), x, *weight, K)

    # Loading code at first use waits for running kernels: load ours, and torch's fill.
    with poisoned():
        for plan in plans:
            check_rounded_once(run(plan), oracle, plan)
    # With few free SMs clusters may find no such pair, and wait.
    alone = [plan for plan in plans if plan.shape.cluster == 1 or free >= limits.sm_count // 4]
    waiting = [plan for plan in plans if plan not in alone]
    with poisoned(), held(limits.sm_count - free):
        ends = []
        outs = []
        for plan in alone + waiting:
            outs.append(run(plan))
            ends.append(torch.cuda.Event())
            ends[-1].record()
        for plan, end in zip(alone, ends, strict=False):
            assert finishes(end), plan
    assert all(map(finishes, ends))
    for plan, y in zip(alone + waiting, outs, strict=True):
        check_rounded_once(y, oracle, plan)
