"""Which codebooks of 1 bit the kernels of Marlin take as signs."""

import pytest
import torch

from fdk_cuda.marlin.backend import _kernel_format
from fdk_formats import quantise

WEIGHT = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("pair", "signs"),
    [
        ((-1.0, 1.0), {torch.float16, torch.bfloat16}),
        ((-1.0, 1.0002), {torch.float16, torch.bfloat16}),
        ((-1.0, 1.003), {torch.bfloat16}),
        ((-1.0, 1.01), set()),
        ((0.5, 1.0), set()),
    ],
)
def test_signs_are_those_of_the_dtype(
    pair: tuple[float, float], signs: set[torch.dtype], dtype: torch.dtype
) -> None:
    q = quantise(WEIGHT, "custom1-g64", codebook=torch.tensor(pair))
    assert _kernel_format(q, dtype).codebook == ("binary" if dtype in signs else "custom")


def test_kmeans_of_normal_weights_goes_by_signs() -> None:
    assert _kernel_format(quantise(WEIGHT, "kmeans1-g64"), torch.float16).codebook == "binary"
