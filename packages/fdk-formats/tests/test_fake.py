import pytest
import torch
from torch import nn

from fdk_formats import fake_quantise, fit_codebook, quantise


@pytest.mark.parametrize("format", ["kmeans3-g16", "int4-g32", "affine4-g64", "nf4-row"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_is_the_dequantised_weight(format: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight = torch.randn(6, 64, dtype=dtype)
    assert torch.equal(fake_quantise(weight, format), quantise(weight, format).dequantise(dtype))


def test_gradient_passes_straight_through() -> None:
    torch.manual_seed(0)
    weight = torch.randn(6, 64, requires_grad=True)
    grad = torch.randn(6, 64)
    fake_quantise(weight, "int4-g32").backward(grad)
    assert weight.grad is not None
    assert torch.equal(weight.grad, grad)


def test_gradient_to_the_codebook() -> None:
    # Groups of 16 with absmax scales 2 and 4; codes by hand: 1.0 -> entry 2, -1.0 -> entry 0.
    weight = torch.tensor([[2.0] * 12 + [-2.0] * 4 + [4.0] * 15 + [0.1]])
    codebook = torch.tensor([1.0, 0.0, 0.5, -1.0], requires_grad=True)  # need not be sorted
    grad = torch.ones(1, 32)
    fake_quantise(weight, "custom2-g16-absmax", codebook).backward(grad)
    assert codebook.grad is not None
    # 1.0: 12 weights of scale 2, 15 of scale 4; 0.0: one of scale 4; -1.0: 4 of scale 2
    assert codebook.grad.tolist() == [12 * 2 + 15 * 4, 4.0, 0.0, 4 * 2.0]


def test_gradient_to_the_codebook_is_that_of_indexing() -> None:
    torch.manual_seed(0)
    weight = torch.randn(8, 64)
    codebook = fit_codebook(weight, "kmeans3-g16").requires_grad_()
    grad = torch.randn(8, 64)
    fake_quantise(weight, "kmeans3-g16", codebook).backward(grad)
    q = quantise(weight, "kmeans3-g16", codebook=codebook.detach())
    table = codebook.detach().clone().requires_grad_()
    scale = q.scale.float().repeat_interleave(16, dim=1)
    (table[q.codes().long()] * scale).backward(grad)
    torch.testing.assert_close(codebook.grad, table.grad)


def test_gradient_of_a_transposed_use() -> None:
    weight, codebook = torch.randn(4, 32), torch.linspace(-1, 1, 4, requires_grad=True)
    factor = torch.randn(32, 4)
    (fake_quantise(weight, "custom2-g16", codebook).T * factor).sum().backward()
    transposed, codebook.grad = codebook.grad, None
    (fake_quantise(weight, "custom2-g16", codebook) * factor.T).sum().backward()
    torch.testing.assert_close(transposed, codebook.grad)


def test_training_a_layer_and_its_codebook_lowers_the_loss() -> None:
    torch.manual_seed(0)
    x, target = torch.randn(256, 32), torch.randn(256, 8)
    weight = nn.Parameter(0.1 * torch.randn(8, 32))
    codebook = nn.Parameter(torch.tensor([-1.0, -0.3, 0.3, 1.0]))
    optimiser = torch.optim.Adam([weight, codebook], lr=1e-2)
    losses = []
    for _ in range(60):
        W_hat = fake_quantise(weight, "custom2-g16-rms", codebook)
        loss = (x @ W_hat.T - target).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.95 * losses[0]
    assert not torch.equal(codebook.detach(), torch.tensor([-1.0, -0.3, 0.3, 1.0]))


def test_what_is_no_tensor_is_refused() -> None:
    with pytest.raises(TypeError, match="fake_quantise: weight must be a tensor, got NoneType"):
        fake_quantise(None, "nf4-g64")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="fake_quantise: codebook must be a tensor, got list"):
        fake_quantise(torch.ones(1, 16), "custom1-g16", [0.0, 1.0])  # type: ignore[arg-type]


def test_fixed_codebooks_take_no_other() -> None:
    with pytest.raises(ValueError, match="codebook"):
        fake_quantise(torch.randn(4, 64), "nf4-g64", torch.linspace(-1, 1, 16))
