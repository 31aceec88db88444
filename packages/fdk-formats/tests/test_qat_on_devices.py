"""A training step reads no value of a device: fake CUDA tensors have none, and no GPU is needed."""

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from fdk_formats import quantise
from fdk_formats.format import Format
from fdk_formats.qat import _run, _run_grad_codebook, _run_grad_scale

FORMATS = [
    "kmeans1-g32",
    "kmeans4-g32",
    "kmeans2-g32-search",
    "custom3-g32-rms-fp16",
    "int4-g32",
    "nf4-row-e8m0",
    "affine4-g32",
    "affine3-g32-zint",
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("format", FORMATS)
def test_no_synchronisation(format, dtype):
    wanted = Format.parse(format)
    with FakeTensorMode():
        weight = torch.randn(8, 64, dtype=dtype, device="cuda")
        shape = (8, 64 // wanted.group_size_for(64))
        scale_log2 = torch.zeros(shape, device="cuda")
        codebook = None
        if wanted.accepts_codebook:
            codebook = torch.randn(1 << wanted.bits, dtype=dtype, device="cuda")
        W_hat, codes, scale, points = _run(weight, codebook, scale_log2, None, format, dtype)
        assert W_hat.device.type == codes.device.type == "cuda"
        grad = torch.randn_like(W_hat)
        if codebook is not None:
            assert _run_grad_codebook(grad, codes, scale, format).shape == codebook.shape
        assert _run_grad_scale(grad, codes, scale, points, weight, format).shape == shape


def test_quantise_does_synchronise():
    """The check above can fail: quantise looks at values."""
    with FakeTensorMode(), pytest.raises(DataDependentOutputException):
        quantise(torch.randn(8, 64, device="cuda"), "int4-g32")


class OtherDevice(torch.Tensor):
    """A CPU tensor that says that it is elsewhere, so that the code for devices runs on it."""

    @property
    def device(self):
        return torch.device("cuda")


@pytest.mark.parametrize("bits", [1, 2, 4, 6])
def test_codebooks_of_a_device_give_the_same_codes(bits):
    from fdk_formats.encode import CodebookEncoder

    torch.manual_seed(0)
    codebook = torch.randn(1 << bits).sort().values
    codebook[-1] = codebook[-2] if bits > 1 else codebook[-1]
    values = torch.cat([torch.randn(1000), codebook, (codebook[1:] + codebook[:-1]) / 2])
    encoder = CodebookEncoder(codebook.as_subclass(OtherDevice))
    assert torch.equal(encoder.codes(values), CodebookEncoder(codebook).codes(values))


def test_codebook_gradients_of_a_device_are_the_same():
    torch.manual_seed(0)
    codes = torch.randint(4, (8, 64), dtype=torch.uint8)
    scale, grad = torch.rand(8, 2).bfloat16(), torch.randn(8, 64)
    found = _run_grad_codebook(grad.as_subclass(OtherDevice), codes, scale, "kmeans2-g32")
    torch.testing.assert_close(
        found.as_subclass(torch.Tensor), _run_grad_codebook(grad, codes, scale, "kmeans2-g32")
    )


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("format", ["kmeans2-g32", "int4-g32", "nf4-g32-e8m0", "affine4-g32"])
def test_unchecked_weights_that_are_not_finite_show(format, bad):
    from fdk_formats.scales import GroupedWeight

    weight = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    weight[1, 40] = bad
    wanted = Format.parse(format)
    codebook = torch.tensor([-1.0, -0.3, 0.3, 1.0]) if wanted.accepts_codebook else None
    grouped = GroupedWeight.of(weight, wanted, is_checked=False)
    grid = grouped.fit(codebook)
    (chunk,) = grouped.chunks()
    values = grid.round(chunk, torch.float32)[1]
    finite = torch.isfinite(values)
    assert finite[0].all()
    assert finite[1, :32].all()
    assert not finite[1, 40]
