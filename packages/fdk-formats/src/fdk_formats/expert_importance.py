"""Importance of the inputs of each expert, from calibration inputs."""

from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fdk_formats.experts import ExpertLinear
from fdk_formats.model_inputs import calls_of


@torch.no_grad()
def expert_importance(
    model: nn.Module, projections: Iterable[ExpertLinear], inputs: Iterable[Any]
) -> list[Tensor]:
    """Computes the mean square of each input of each expert, the diagonal of its second moments.

    The model is run once with the inputs; experts are computed again for what the second projection
    receives. An expert that no token went to gets the mean of the others.

    Args:
        model: the model, in evaluation mode.
        projections: projections of its experts, see ``layers_and_projections``.
        inputs: see ``calibrate``.

    Returns:
        ``[experts, k]`` for each projection, as ``quantise_stack`` takes it.
    """
    sums = [_Squares(projection) for projection in projections]
    by_owner: dict[int, list[_Squares]] = {}
    for own in sums:
        by_owner.setdefault(id(own.projection.owner[0]), []).append(own)
    with ExitStack() as hooks:
        for group in by_owner.values():
            owner = group[0].projection.owner[0]
            handle = owner.register_forward_pre_hook(partial(_add, group), with_kwargs=True)
            hooks.callback(handle.remove)
        for call in calls_of(inputs):
            call.run(model)
    return [own.mean() for own in sums]


class _Squares:
    """Sums of the squares of what each expert of a projection receives."""

    def __init__(self, projection: ExpertLinear) -> None:
        experts, _, k = projection.stack().shape
        device = projection.stack().device
        self.projection = projection
        self.total = torch.zeros(experts, k, device=device)
        self.count = torch.zeros(experts, device=device)

    def add(self, x: Tensor, expert_ids: Tensor) -> None:
        """Adds ``x :: [t, top_k, k]``."""
        experts = torch.arange(len(self.count), device=expert_ids.device)[:, None]
        hits = (expert_ids.reshape(1, -1) == experts).to(torch.float32)  # [experts, t * top_k]
        self.total.addmm_(hits, x.reshape(hits.shape[1], -1).to(torch.float32).square())
        self.count += hits.sum(1)

    def mean(self) -> Tensor:
        """Returns the mean squares, ``[experts, k]``; ones if no expert got a token."""
        if not self.count.any():
            return torch.ones_like(self.total)
        others = self.total.sum(0) / self.count.sum()
        own = self.total / self.count.clamp(min=1)[:, None]
        return own.where(self.count[:, None] > 0, others)


def _add(group: list[_Squares], owner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
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
