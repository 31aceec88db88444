"""Error compensation: codes chosen column by column for the least error of a layer's outputs.

With inputs x whose second moments are ``H = mean(x x^T)``, quantising ``W`` to ``W_hat`` changes
the outputs by a mean square of ``tr(D H D^T)`` with ``D = W - W_hat``. Every row counts alone.
Factor ``H = M diag(d) M^T`` with a unit upper triangular M; a row's error is then

    sum_i d_i (v_i - w_hat_i)^2   with   v_i = w_i + sum_{j < i} (w_j - w_hat_j) M_ji

so that the best value of column i, given the columns before it, is the one nearest to ``v_i``.
That is GPTQ (Frantar et al. 2022) in the form of LDLQ (Chee et al. 2023, QuIP), which needs no
inverse. Columns go by descending ``H_ii``, and each keeps the scale of its group in the original
order: a file is the same as without compensation.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from fdk_formats.encode import CodebookEncoder
from fdk_formats.rotation import rotate
from fdk_formats.rounding import round_columns_for
from fdk_formats.scales import Grid, decode_scale, encode_scale, largest_scale

# Columns per block: inside it a column is a matrix-vector product, between blocks all are GEMMs.
BLOCK = 128
# Added to the diagonal, in units of its mean: raised tenfold until the Cholesky factor exists.
DAMPING = 0.01
# Rows of a least-squares system for scales that are held at once, in float32 numbers.
SYSTEM_SIZE = 1 << 26
# Rounds of refitting scales, each followed by a pass, for up to 2 bits; above, one.
REFIT_ROUNDS = 2
# Sweeps of coordinate descent at the end, with a refit between.
SWEEPS = 2


class Hessian:
    """Second moments of a layer's inputs, factored once for all layers of that input.

    A column of zeros (an input that is always zero) and moments of zeros everywhere are allowed.

    Args:
        moments: ``[k, k]``, the mean of ``x x^T`` over inputs x; floating, symmetric.

    Raises:
        TypeError: if ``moments`` is not a floating tensor.
        ValueError: if it is not square, or not finite, or has a negative diagonal.

    Example:
        >>> hessian = Hessian(x.T @ x / len(x))
        >>> q, k = (quantise(w, "kmeans3-g64", hessian=hessian) for w in (w_q, w_k))
    """

    def __init__(self, moments: Tensor) -> None:
        if not isinstance(moments, Tensor) or not moments.dtype.is_floating_point:
            got = moments.dtype if isinstance(moments, Tensor) else type(moments).__name__
            raise TypeError(f"hessian: wanted a floating tensor [k, k], got {got}")
        if moments.ndim != 2 or moments.shape[0] != moments.shape[1]:
            raise ValueError(f"hessian: wanted [k, k], got {list(moments.shape)}")
        moments = moments.detach().to(torch.float32)
        if not torch.isfinite(moments).all() or (moments.diagonal() < 0).any():
            raise ValueError(
                "hessian: wanted finite second moments with no negative diagonal: "
                "an input of the calibration overflows, or the model gives NaN"
            )
        # In units of the mean: moments of tiny and of huge inputs are factored alike.
        mean = float(moments.diagonal().mean()) if len(moments) else 0.0
        self.matrix = moments / mean if mean > 0 else torch.eye(len(moments)).to(moments)

    @property
    def diagonal(self) -> Tensor:
        """The mean of each squared input, ``[k, float32]``, in units of their mean."""
        return self.matrix.diagonal()

    def to(self, device: torch.device) -> "Hessian":
        """Returns the moments on another device."""
        return self if self.matrix.device == device else Hessian(self.matrix.to(device))

    @cached_property
    def rotated(self) -> "Hessian":
        """The moments of rotated inputs, ``R H R^T``; see ``fdk_formats.rotation``."""
        moments = rotate(rotate(self.matrix).T)
        moments = (moments + moments.T) / 2
        moments.diagonal().clamp_(min=0)  # a rotated input that is always zero, but for rounding
        return Hessian(moments)

    @cached_property
    def order(self) -> Tensor:
        """Columns by descending diagonal, ``[k, int64]``: later ones make up for earlier ones."""
        return self.diagonal.argsort(descending=True, stable=True)

    @cached_property
    def ordered(self) -> Tensor:
        """The moments with rows and columns in ``order``, ``[k, k]``."""
        return self.matrix[self.order][:, self.order]

    @cached_property
    def feedback(self) -> Tensor:
        """``M^T``, unit lower triangular in ``order``: row i has what column i adds to itself."""
        flipped = self.order.flip(0)
        matrix = self.matrix[flipped][:, flipped]
        damping = DAMPING
        while True:
            damped = matrix + damping * torch.eye(len(matrix), device=matrix.device)
            factor, info = torch.linalg.cholesky_ex(damped)
            if info.item() == 0 and bool(torch.isfinite(factor).all()):
                break
            damping *= 10
        upper = factor.flip(0, 1)  # damped = upper @ upper^T, in order
        unit: Tensor = upper / upper.diagonal()
        return unit.T.contiguous()

    def row_errors(self, error: Tensor) -> Tensor:
        """Computes ``d H d^T`` of each row of ``error :: [n, k]``: ``[n, float32]``."""
        return ((error @ self.matrix) * error).sum(-1)


def add_moments(total: Tensor, x: Tensor) -> None:
    """Adds ``x^T x`` to ``total :: [k, k, float32]``.

    On an NVIDIA GPU tensor cores multiply inputs of 16 bits, exactly, and sum in float32.

    Args:
        total: the sum.
        x: ``[rows, k]``, floating.
    """
    if x.is_cuda and x.element_size() == 2 and torch.version.hip is None:
        total += torch.mm(x.T, x, out_dtype=torch.float32)
    else:
        x = x.to(torch.float32)
        total.addmm_(x.T, x)


def output_error(weight: Tensor, quantised: Tensor, hessian: Hessian | Tensor) -> float:
    """Computes the relative RMS error of a layer's outputs, ``sqrt(tr(D H D^T) / tr(W H W^T))``.

    Args:
        weight: ``[n, k]``.
        quantised: ``[n, k]``, the values that stand for it.
        hessian: second moments of the inputs.
    """
    hessian = hessian if isinstance(hessian, Hessian) else Hessian(hessian)
    weight = weight.detach().to(torch.float32)
    error = hessian.row_errors(weight - quantised.to(torch.float32)).sum()
    total = hessian.row_errors(weight).sum()
    return float((error / total).clamp(min=0).sqrt()) if total > 0 else 0.0


@dataclass(frozen=True)
class Compensated:
    """A grid with its codes.

    codes  :: [n, k, uint8]
    errors :: [n, float32]    tr(D H D^T) of each row
    """

    grid: Grid
    codes: Tensor
    errors: Tensor


def compensate(weight: Tensor, grid: Grid, hessian: Hessian) -> Compensated:
    """Chooses codes for the least error of the outputs, and refits the scales to them.

    After a pass over the columns, the scales of each row are refitted together by least squares,
    followed by another pass, then by sweeps of coordinate descent with another refit between.
    Every row keeps the best that was found for it by ``tr(D H D^T)``.

    Args:
        weight: ``[n, k, float32]``.
        grid: scales, and codebook or zero points, to start from.
        hessian: second moments of the inputs of the layer, on the weight's device.
    """
    found = _pass(weight, grid, hessian)
    for _ in range(REFIT_ROUNDS if grid.format.bits <= 2 else min(1, REFIT_ROUNDS)):
        refitted = _refit_scales(weight, found, hessian)
        found = _better_rows(found, refitted)
        found = _better_rows(found, _pass(weight, refitted.grid, hessian))
    for number in range(SWEEPS):
        if number:
            found = _better_rows(found, _refit_scales(weight, found, hessian))
        found = _better_rows(found, _sweep(weight, found, hessian))
    return found


def _pass(weight: Tensor, grid: Grid, hessian: Hessian) -> Compensated:
    """Chooses codes column by column, each making up for the error of those before it."""
    order, feedback = hessian.order, hessian.feedback
    rounding = _ColumnRounding(grid, order)
    columns = weight.T[order].contiguous()  # [k, n]
    error, codes = torch.empty_like(columns), torch.empty_like(columns, dtype=torch.uint8)
    for start in range(0, len(columns), BLOCK):
        block = slice(start, start + BLOCK)
        wanted = torch.addmm(columns[block], feedback[block, :start], error[:start])
        codes[block], error[block] = rounding(block, wanted, columns[block], feedback[block, block])
    original = order.argsort()
    errors = hessian.row_errors(error[original].T)
    return Compensated(grid, codes[original].T.contiguous(), errors)


def _sweep(weight: Tensor, found: Compensated, hessian: Hessian) -> Compensated:
    """Chooses each column's codes again, given all the others: coordinate descent.

    A pass gives a column the errors of those before it alone. The best value of column i, given all
    others, is the one nearest to ``w_hat_i + (D H)_i / H_ii``.
    """
    order, matrix = hessian.order, hessian.ordered
    rounding = _ColumnRounding(found.grid, order)
    value = found.grid.decode(found.codes, slice(None), torch.float32)
    value = value.T[order].contiguous()  # [k, n]
    codes = torch.empty_like(value, dtype=torch.uint8)
    error = weight.T[order] - value
    diagonal = matrix.diagonal()
    inverse = torch.where(diagonal > 0, 1 / diagonal, 0)[:, None]
    for start in range(0, len(value), BLOCK):
        block = slice(start, start + BLOCK)
        wanted = torch.addcmul(value[block], inverse[block], matrix[block] @ error)
        codes[block], residual = rounding(
            block, wanted, value[block], matrix[block, block] * inverse[block]
        )
        error[block] += residual
    errors = ((matrix @ error) * error).sum(0)
    return Compensated(found.grid, codes[order.argsort()].T.contiguous(), errors)


class _ColumnRounding:
    """Rounds columns to a grid, in the order of a Hessian, each making up for those before it.

    Args:
        grid: scales, and codebook or zero points.
        order: the columns, ``[k, int64]``.
    """

    def __init__(self, grid: Grid, order: Tensor) -> None:
        self.group = order // (len(order) // grid.scale.shape[1])
        self.scale = decode_scale(grid.scale).T.contiguous()  # [k/G, n]
        self.zero = self.first = None
        if grid.codebook is None:
            assert grid.zero_point is not None
            self.zero = grid.zero_point.to(torch.float32).T.contiguous()
            self.entries = torch.arange(1 << grid.format.bits, device=order.device).float()
            self.midpoints = self.entries[:-1] + 0.5
        else:
            encoder = CodebookEncoder(grid.codebook)
            self.midpoints, self.first = encoder.midpoints, encoder.first
            self.entries = encoder.entries
        self.kernel = round_columns_for(order.device, len(self.entries)) or round_columns

    def __call__(
        self, block: slice, wanted: Tensor, reference: Tensor, feedback: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Rounds some columns; see ``register_round_columns``.

        Args:
            block: which ones.
            wanted: ``[b, n]``.
            reference: ``[b, n]``.
            feedback: ``[b, b]``.

        Returns:
            Codes, and what they leave of ``reference``.
        """
        group = self.group[block]
        codes, residual = self.kernel(
            self.midpoints,
            self.entries,
            wanted,
            reference,
            feedback.contiguous(),
            self.scale[group],
            None if self.zero is None else self.zero[group],
        )
        if self.first is not None:
            codes = self.first.index_select(0, codes.view(-1).to(torch.int32)).view(codes.shape)
        return codes, residual


def round_columns(
    midpoints: Tensor,
    entries: Tensor,
    wanted: Tensor,
    reference: Tensor,
    feedback: Tensor,
    scale: Tensor,
    zero: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Rounds columns in torch; see ``register_round_columns``."""
    codes, residual = torch.empty_like(wanted, dtype=torch.uint8), torch.empty_like(wanted)
    divisor = torch.where(scale == 0, torch.inf, scale)
    for i in range(len(wanted)):
        value = torch.addmv(wanted[i], residual[:i].T, feedback[i, :i]).div_(divisor[i])
        if zero is not None:
            value += zero[i]
        code = torch.bucketize(value, midpoints, out_int32=True)
        codes[i] = code
        rounded = entries.index_select(0, code)
        if zero is not None:
            rounded -= zero[i]
        torch.sub(reference[i], rounded.mul_(scale[i]), out=residual[i])
    return codes, residual


def _better_rows(a: Compensated, b: Compensated) -> Compensated:
    """Returns, row by row, the better of two results that differ in scales and codes only."""
    is_better = (b.errors < a.errors)[:, None]
    scale = torch.where(is_better, b.grid.scale, a.grid.scale)
    return Compensated(
        replace(a.grid, scale=scale),
        torch.where(is_better, b.codes, a.codes),
        torch.minimum(a.errors, b.errors),
    )


def _refit_scales(weight: Tensor, found: Compensated, hessian: Hessian) -> Compensated:
    """Refits the scales of each row together by least squares, codes fixed."""
    grid, matrix = found.grid, hessian.matrix
    n, k = weight.shape
    groups = grid.scale.shape[1]
    size = k // groups
    scale = grid.scale.clone()
    damped = matrix + DAMPING * torch.eye(k, device=matrix.device)
    for rows in torch.arange(n).split(max(1, SYSTEM_SIZE // max(groups * groups, k))):
        part = slice(int(rows[0]), int(rows[-1]) + 1)
        unit = unit_values(grid, found.codes, part)
        target = (unit * (weight[part] @ damped)).view(-1, groups, size).sum(-1)
        system = unit.new_empty((len(unit), groups, groups))
        for group in range(groups):
            first = group * size
            product = unit[:, first : first + size] @ damped[first : first + size, first:]
            product.mul_(unit[:, first:])
            sums = product.view(len(unit), groups - group, size).sum(-1)
            system[:, group, group:] = system[:, group:, group] = sums
        diagonal = system.diagonal(dim1=-2, dim2=-1)
        diagonal += 1e-6 * diagonal.mean(-1, keepdim=True) + (diagonal == 0)
        solved, info = torch.linalg.solve_ex(system, target)
        old = decode_scale(grid.scale[part])
        limit = largest_scale(grid.format.scale_dtype)
        # A scale that changes its sign is a group whose codes say nothing: it keeps its own.
        is_sound = (solved * old > 0) & (solved.abs() <= limit) & (info == 0)[:, None]
        solved = torch.where(is_sound, solved, old)
        scale[part] = encode_scale(solved, grid.format.scale_dtype)
    return _evaluated(weight, replace(grid, scale=scale), found.codes, hessian)


def unit_values(grid: Grid, codes: Tensor, rows: slice = slice(None)) -> Tensor:
    """Returns the values of some rows of ``codes :: [n, k]`` for scales of 1, float32."""
    codes = codes[rows]
    if grid.codebook is not None:
        index = codes.reshape(-1).to(torch.int32)
        return grid.codebook.index_select(0, index).view(codes.shape)
    assert grid.zero_point is not None
    zero = grid.zero_point[rows].to(torch.float32)
    return codes - zero.repeat_interleave(codes.shape[1] // zero.shape[1], 1)


def _evaluated(weight: Tensor, grid: Grid, codes: Tensor, hessian: Hessian) -> Compensated:
    value = grid.decode(codes, slice(None), torch.float32)
    return Compensated(grid, codes, hessian.row_errors(weight - value))
