"""Weights, activations, single plans and checks of the Marlin kernels, for the tests on a GPU."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import linear

from fdk_cuda.marlin import marlin_backends
from fdk_cuda.marlin.heuristics_small_m import MAX_M, Device, plan_small
from fdk_cuda.marlin.instantiations import Variant, small_m_program
from fdk_cuda.marlin.runtime import SMALL_FIELDS, device_limits, small_fields
from fdk_cuda.marlin.testing import multiplied_weight
from fdk_cuda.nvrtc import Kernel, Launch
from fdk_formats.codebooks import named_codebook
from fdk_formats.format import BITS, Format
from fdk_formats.testing import nrmse, poisoned, random_quantised

DTYPES = (torch.bfloat16, torch.float16)
# Cases of the conformance kit.
KIT = {"bits": BITS, "group_sizes": (32, 64, 128, None), "dtypes": DTYPES, "device": "cuda"}
# With few SMs each block runs several tiles.
FEW = Device(sm_count=6, shared_bytes=232448, has_clusters=True)
FEW_HOPPER = replace(FEW, is_hopper=True)
ON_HOPPER = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
        reason="needs a GPU of compute capability 9.x",
    ),
]


def pack(format, n, k, dtype=torch.bfloat16, seed=0, *, batch_invariant=False):
    """Returns a random weight and its layout; named grids get the codebook of their name."""
    q = random_quantised(Format.parse(format), n, k, seed=seed).to("cuda")
    if q.format.codebook in ("int", "binary"):
        q = replace(q, codebook=named_codebook(q.format, k).tensor(q.device))
    affine, lut = marlin_backends(batch_invariant=batch_invariant)
    backend = affine if q.format.is_affine else lut
    return q, backend.pack(q, dtype=dtype)


def random_x(*shape, dtype=torch.bfloat16, seed=1):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, device="cuda", generator=generator).to(dtype)


def check_rounded_once(y, oracle, *context):
    """Asserts that y is nearly as close to float64 as rounding the oracle once makes it."""
    assert nrmse(y, oracle) <= 1.2 * nrmse(oracle.to(y.dtype), oracle) + 1e-5, context


def repeats_bit_for_bit(run, first):
    """Returns whether 1000 more runs give the same bits."""
    differs = torch.zeros((), dtype=torch.bool, device="cuda")
    for _ in range(1000):
        differs |= (run() != first).any()
    return not differs


def check(layout, q, x, bias=None):
    """Checks y against the weight that the chosen kernel multiplies, and returns it."""
    shape = None
    if len(x) <= MAX_M:
        limits = device_limits(x.device.index)
        shape = plan_small(layout.geometry, x.dtype, len(x), limits).shape
    W = multiplied_weight(q, x.dtype, shape)
    with poisoned():
        y = layout(x, bias)
    check_rounded_once(y, linear(x.double(), W, None if bias is None else bias.double()))
    return y


def run_plan(layout, x, plan, *options):
    """Returns y by one plan of small m; ``options`` are added to the compiler's."""
    variant = Variant.of(layout.geometry, x.dtype)
    program = small_m_program(variant, plan.shape)
    kernel = Kernel(
        replace(program, options=(*program.options, *options)), program.name.removesuffix(".cu")
    )
    launch = Launch(
        kernel,
        x.device.index,
        fields=SMALL_FIELDS,
        grid=plan.grid,
        threads=32 * plan.shape.warps,
        shared_bytes=plan.shared_bytes,
        cluster=plan.cluster,
        overlap=True,
    )
    y = torch.full((len(x), layout.shape[0]), torch.nan, dtype=x.dtype, device=x.device)
    pointers = (t.data_ptr() for t in (layout.packed, layout.codebook, x))
    fields = small_fields(variant, plan, layout.geometry, len(x))
    launch(*pointers, 0, y.data_ptr(), *fields)
    return y
