"""What bounds the Triton kernels: Nsight Compute of one launch of each, and a table of it.

    ncu --profile-from-start off --clock-control none --csv --page raw \\
        --section SpeedOfLight --section WarpStateStats --section ComputeWorkloadAnalysis \\
        --section MemoryWorkloadAnalysis_Tables --section InstructionStats --section LaunchStats \\
        python packages/fdk-cuda/benchmarks/triton_ncu.py > kernels.csv
    python packages/fdk-cuda/benchmarks/triton_ncu.py --table kernels.csv

8192 x 8192, by the configurations that the backend chooses, with a cold L2, which ncu sees to. What
permutes x or adds parts is left out. Lines are those of marlin_ncu.py.
"""

from functools import partial

from _tables import markdown
from marlin_ncu import counters, kernels_of, launch_marked, main
from triton_record import call, config_of, random_x, weights_of

from fdk_cuda.triton.layout import PackedLayout

SIZE, GROUP_SIZE = 8192, 64
# Bits, whether affine, m, and whether of dy @ W_hat.
CASES = (
    *((4, False, 1, False), (4, False, 16, False), (4, True, 1, False), (4, True, 16, False)),
    *((5, True, 16, False), (6, True, 16, False), (4, False, 64, False), (4, True, 64, False)),
    *((4, False, 256, False), (4, True, 256, False), (8, False, 256, False)),
    *((1, False, 1, True), (3, False, 1, True), (4, False, 16, True), (4, False, 64, True)),
    (4, False, 256, True),
)
HELPERS = ("permute_kernel", "reduce_kernel")


def run_all() -> None:
    """Launches every case once between marks of the profiler."""
    for bits, affine, m, transposed in CASES:
        a = PackedLayout(SIZE, SIZE, bits, GROUP_SIZE)
        ws, x = weights_of(a, affine)[:1], random_x(m, SIZE)
        config = config_of(a, m, affine, transposed)
        launch_marked(partial(call, x, ws, config, transposed, 0))


def table(text: str) -> str:
    """Markdown of what ncu wrote: a column for each case.

    Raises:
        ValueError: it is not of these cases.
    """
    kernels, times = kernels_of(text, len(CASES), HELPERS)
    heads = [head(*case) for case in CASES]
    told: list[list[str]] = [["", *heads], ["---"] * (1 + len(heads))]
    told.append(["kernel", *(k["Kernel Name"].removesuffix("_kernel") for k in kernels)])
    told.append(["us", *times])
    return markdown([*told, *counters(kernels)])


def head(bits: int, affine: bool, m: int, transposed: bool) -> str:
    """A column's; a codebook and the product itself go without saying."""
    return f"{'dy, ' * transposed}{'affine ' * affine}{bits} bit{'s' * (bits > 1)}, m = {m}"


if __name__ == "__main__":
    main(__doc__, run_all, table)
