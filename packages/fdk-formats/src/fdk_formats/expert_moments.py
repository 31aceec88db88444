"""Second moments of what each expert of a mixture receives, from calibration inputs."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fdk_formats.compensate import Hessian, add_moments
from fdk_formats.expert_ops import tokens_of_experts
from fdk_formats.experts import ExpertLinear
from fdk_formats.tensor import QuantisedStack


class ExpertMoments:
    """Sums of ``x x^T`` over what each expert of a projection receives.

    Args:
        projection: the projection, see ``layers_and_projections``.

    Attributes:
        total: ``[experts, k, k]``, the sums; None before the first inputs.
        count: how many inputs each expert had.
    """

    def __init__(self, projection: ExpertLinear) -> None:
        self.projection = projection
        self.total: Tensor | None = None
        self.count = [0] * len(projection.stack())

    def add(self, x: Tensor, expert_ids: Tensor) -> None:
        """Adds the inputs of a call.

        Args:
            x: ``[t, top_k, k]``.
            expert_ids: ``[t, top_k]``, integers.
        """
        rows, experts = x.reshape(-1, x.shape[-1]), len(self.count)
        if self.total is None:
            shape = experts, rows.shape[1], rows.shape[1]
            self.total = torch.zeros(shape, device=x.device)
        for expert, own in tokens_of_experts(expert_ids, experts):
            add_moments(self.total[expert], rows[own])
            self.count[expert] += len(own)

    def hessians(self) -> list[Hessian] | None:
        """Returns the moments of each expert; those of all for one that no token went to.

        None if the projection was never called.
        """
        if self.total is None or not any(self.count):
            return None
        pooled = Hessian(self.total.sum(0) / sum(self.count))
        return [
            Hessian(total / count) if count else pooled
            for total, count in zip(self.total, self.count, strict=True)
        ]

    def output_error(self, weight: Tensor, quantised: QuantisedStack) -> float | None:
        """Computes the relative RMS error of the outputs of all experts, see ``output_error``."""
        if self.total is None or not any(self.count):
            return None
        error = total = torch.zeros((), device=weight.device)
        for sums, own, q in zip(self.total, weight, quantised.matrices(), strict=True):
            exact = own.to(torch.float32)
            change = exact - q.dequantise()
            error = error + ((change @ sums) * change).sum()
            total = total + ((exact @ sums) * exact).sum()
        return float((error / total).clamp(min=0).sqrt()) if total > 0 else 0.0


@contextmanager
def expert_moments(projections: Iterable[ExpertLinear]) -> Iterator[list[ExpertMoments]]:
    """Sums up what experts receive while the model, or a part of it, is run.

    Experts are computed again for what the second projection receives.

    Args:
        projections: projections of modules of experts.

    Yields:
        The moments, in the order of the projections.
    """
    moments = [ExpertMoments(projection) for projection in projections]
    by_owner: dict[int, list[ExpertMoments]] = {}
    for own in moments:
        by_owner.setdefault(id(own.projection.owner[0]), []).append(own)
    with ExitStack() as hooks:
        for group in by_owner.values():
            owner = group[0].projection.owner[0]
            handle = owner.register_forward_pre_hook(partial(_add, group), with_kwargs=True)
            hooks.callback(handle.remove)
        yield moments


@torch.no_grad()
def _add(
    group: list[ExpertMoments], owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Adds what the experts of a module receive; a forward pre-hook."""
    hidden, ids = (*args, *kwargs.values())[:2]
    places = hidden[:, None].expand(*ids.shape, -1)
    for own in group:
        if own.projection.name != "down_proj":
            own.add(places, ids)
            continue
        first = ExpertLinear(owner, "gate_up_proj" if owner.has_gate else "up_proj")
        middle = first(hidden, ids)
        own.add(owner._apply_gate(middle) if owner.has_gate else owner.act_fn(middle), ids)
