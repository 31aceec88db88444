"""Which kernel serves which number of rows, in words: what ``fdk-bench info`` shows."""

from collections.abc import Callable
from dataclasses import replace
from itertools import groupby

import torch

from fdk_cuda.marlin import ops, runtime
from fdk_cuda.marlin.layout import has_grid
from fdk_formats.backends import Problem
from fdk_formats.format import Format

DEQUANTISED = "dequantise + cuBLAS"
# Up to so many rows each number is asked for; nothing changes above, at any shape.
MOST_ROWS = 4200
Choice = Callable[[int], str]


def explain(problem: Problem, backend: str | None) -> str:
    """Of y, then of dx: ``rows of x: 1 to 16 small_m, from 17 hopper_gemm; of dy: ...``.

    Of ``int8``, whose weights are looked up like those of ``custom8`` where they hold a code that
    no grid has (backend.py), also what serves those, where that differs. Of backends that are not
    batch-invariant, as they are registered. Empty for a backend that is none of this package's,
    which asks no GPU: there may be none.
    """
    if backend not in ("marlin", "marlin-lut", "triton") or problem.device.type != "cuda":
        return ""
    index = torch.cuda.current_device() if problem.device.index is None else problem.device.index
    choices = triton_choices if backend == "triton" else marlin_choices
    forward, gradient = choices(problem.format, problem.n, problem.k, index)
    text = f"rows of x: {ranges(forward)}; of dy: {ranges(gradient)}"
    format = problem.format
    if backend != "triton" and has_grid(format) and format.scale_rule != "signmax":
        looked_up = explain(replace(problem, format=replace(format, codebook="custom")), backend)
        text += f"; where a code is 255, {looked_up}" if looked_up != text else ""
    return text


def ranges(choice: Choice) -> str:
    """``1 to 16 small_m, from 17 hopper_gemm``: what is chosen for numbers of rows in turn."""
    runs = [list(rows) for _, rows in groupby(range(1, MOST_ROWS + 1), key=choice)]
    return ", ".join(f"{_span(rows)} {choice(rows[0])}" for rows in runs)


def marlin_choices(format: Format, n: int, k: int, index: int) -> tuple[Choice, Choice]:
    """Of y and of dx, through ``marlin`` or ``marlin-lut``."""
    text, is_hopper = str(format), runtime.device_limits(index).is_hopper
    few, most = ops.few_rows(text, n, k, index), ops.max_backward_rows(text)
    names = {"small": "small_m", "hopper": "hopper_gemm", "dequantise": DEQUANTISED}

    def forward(m: int) -> str:
        kernel = ops.kernel_for(
            m,
            is_hopper=is_hopper,
            few_rows=few,
            decodes_slowly=ops.decodes_slowly(text),
            batch_invariant=False,
        )
        return names[kernel]

    return forward, lambda m: "hopper_backward" if is_hopper and m <= most else DEQUANTISED


def triton_choices(format: Format, n: int, k: int, index: int) -> tuple[Choice, Choice]:
    """The same through ``triton``, where nothing was tuned."""
    from fdk_cuda.triton import autotune, configs, linear
    from fdk_cuda.triton.permute_reduce import gpu_at

    group_size = format.group_size_for(k)
    a, gpu = linear.arrangement_of(n, k, format.bits, group_size), gpu_at(index)
    names = {
        configs.SmallConfig: "small_kernel",
        configs.ManyConfig: "many_kernel",
        configs.GemmConfig: "gemm_kernel",
        configs.TransposedConfig: "transposed_kernel",
        configs.ManyTransposedConfig: "many_transposed_kernel",
    }

    def name(config: object) -> str:
        return names.get(type(config), DEQUANTISED)

    return (
        lambda m: name(autotune.default(a, m, gpu, affine=format.is_affine)),
        lambda m: name(linear.gradient_config(a, m, gpu, affine=format.is_affine)),
    )


def _span(rows: list[int]) -> str:
    if rows[-1] == MOST_ROWS:
        return "any number" if rows[0] == 1 else f"from {rows[0]}"
    return f"{rows[0]} to {rows[-1]}"
