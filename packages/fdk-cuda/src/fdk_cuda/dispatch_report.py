"""Report of which kernel serves which number of rows, as ``fdk-bench info`` prints it."""

from collections.abc import Callable
from dataclasses import replace
from itertools import groupby

import torch

from fdk_cuda.marlin import ops, runtime
from fdk_cuda.marlin.layout import has_grid
from fdk_formats.backends import Problem
from fdk_formats.format import Format

DEQUANTISED = "dequantise + cuBLAS"
# The choice is evaluated up to this many rows; it never changes above.
MOST_ROWS = 4200
Choice = Callable[[int], str]


def explain(problem: Problem, backend: str | None) -> str:
    """Explains the dispatch of y and dx: ``rows of x: 1 to 16 small_m, from 17 hopper_gemm; ...``.

    An ``int`` weight with the repeated top code is looked up like ``custom`` (marlin/backend.py);
    the report covers that too where it differs. It describes backends without batch invariance.

    Args:
        problem: format, shape, dtype and device.
        backend: name of the backend.

    Returns:
        The report; empty for backends of other packages, without querying a GPU.
    """
    if backend not in ("marlin", "marlin-lut", "triton") or problem.device.type != "cuda":
        return ""
    index = torch.cuda.current_device() if problem.device.index is None else problem.device.index
    choices = triton_choices if backend == "triton" else marlin_choices
    forward, gradient = choices(problem.format, problem.n, problem.k, index)
    text = f"rows of x: {ranges(forward)}; of dy: {ranges(gradient)}"
    format = problem.format
    if backend != "triton" and has_grid(format) and format.has_repeated_top:
        looked_up = explain(replace(problem, format=replace(format, codebook="custom")), backend)
        text += f"; where a code is 255, {looked_up}" if looked_up != text else ""
    return text


def ranges(choice: Choice) -> str:
    """Returns the choice for every number of rows: ``1 to 16 small_m, from 17 hopper_gemm``."""
    runs = [list(rows) for _, rows in groupby(range(1, MOST_ROWS + 1), key=choice)]
    return ", ".join(f"{_span(rows)} {choice(rows[0])}" for rows in runs)


def marlin_choices(format: Format, n: int, k: int, index: int) -> tuple[Choice, Choice]:
    """Returns the choices of y and of dx through ``marlin`` or ``marlin-lut``."""
    text, is_hopper = str(format), runtime.device_limits(index).is_hopper
    few, most = ops.small_m_limit(text, n, k, index), ops.max_dgrad_rows(text)

    def forward(m: int) -> str:
        kernel = ops.kernel_for(
            m,
            is_hopper=is_hopper,
            small_m_limit=few,
            decodes_slowly=ops.decodes_slowly(text),
            batch_invariant=False,
        )
        return DEQUANTISED if kernel == "dequantise" else kernel

    return forward, lambda m: "hopper_dgrad" if is_hopper and m <= most else DEQUANTISED


def triton_choices(format: Format, n: int, k: int, index: int) -> tuple[Choice, Choice]:
    """Returns the choices of y and of dx through ``triton``, without autotuning."""
    from fdk_cuda.triton import configs
    from fdk_cuda.triton.launch import gpu_at
    from fdk_cuda.triton.layout import PackedLayout

    layout = PackedLayout(n, k, format.bits, format.group_size_for(k))
    gpu, affine = gpu_at(index), format.is_affine
    names = {
        configs.GemvConfig: "gemv_kernel",
        configs.GemmWgmmaConfig: "gemm_wgmma_kernel",
        configs.GemmConfig: "gemm_kernel",
        configs.DgradConfig: "dgrad_kernel",
        configs.DgradWgmmaConfig: "dgrad_wgmma_kernel",
    }

    def name(config: object) -> str:
        return names.get(type(config), DEQUANTISED)

    return (
        lambda m: name(configs.forward_config(layout, m, gpu, affine=affine)),
        lambda m: name(configs.grad_config(layout, m, gpu, affine=affine)),
    )


def _span(rows: list[int]) -> str:
    if rows[-1] == MOST_ROWS:
        return "any number" if rows[0] == 1 else f"from {rows[0]}"
    return f"{rows[0]} to {rows[-1]}"
