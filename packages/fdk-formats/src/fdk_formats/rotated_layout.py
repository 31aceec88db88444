"""Layouts of rotated formats: x is rotated, then a backend's layout of the unrotated format runs.

Backends know nothing of rotations, and refuse rotated formats.
"""

from dataclasses import replace

from torch import Tensor

from fdk_formats.backends import ExpertLayout, Layout
from fdk_formats.format import Format
from fdk_formats.rotation import rotate
from fdk_formats.tensor import QuantisedStack, QuantisedTensor


class RotatedLayout(Layout):
    """The layout of a weight that is multiplied with rotated x.

    Args:
        layout: a backend's layout of the same tensors in the unrotated format.
        format: the rotated format.

    Attributes:
        layout: the argument.
        format: the argument.
    """

    def __init__(self, layout: Layout, format: Format) -> None:
        super().__init__()
        self.layout, self.format = layout, format
        self.dtypes, self.casts = layout.dtypes, layout.casts

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """See ``Layout``."""
        y: Tensor = self.layout.forward(rotate(x), bias)
        return y

    def unpack(self) -> QuantisedTensor:
        """See ``Layout``."""
        return replace(self.layout.unpack(), format=self.format)


class RotatedExpertLayout(ExpertLayout):
    """The layout of a stack of experts that is multiplied with rotated x, see ``RotatedLayout``."""

    def __init__(self, layout: ExpertLayout, format: Format) -> None:
        super().__init__()
        self.layout, self.format = layout, format
        self.dtypes, self.casts = layout.dtypes, layout.casts

    def forward(
        self,
        x: Tensor,
        expert_ids: Tensor,
        bias: Tensor | None = None,
        routing_weights: Tensor | None = None,
    ) -> Tensor:
        """See ``ExpertLayout``."""
        y: Tensor = self.layout.forward(rotate(x), expert_ids, bias, routing_weights)
        return y

    def unpack(self) -> QuantisedStack:
        """See ``ExpertLayout``."""
        return replace(self.layout.unpack(), format=self.format)
