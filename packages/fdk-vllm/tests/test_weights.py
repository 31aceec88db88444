"""Loading of one layer, without vLLM: tensors in, product out."""

import pytest
import torch
from torch import nn

from fdk_formats import quantise
from fdk_vllm.cut import Part
from fdk_vllm.product import Product, Weight
from fdk_vllm.weights import LayerWeights, Plan, packed_source, unquantised_source

K = 128
SIZES = (64, 32, 32)
NAMES = ("q", "k", "v")


def stored(q):
    return {f"weight.{field}": tensor for field, tensor in q.tensors().items()}


def layer(sources, parts=None, **options):
    parts = [Part(0, n, n) for n in SIZES] if parts is None else parts
    plan = Plan(tuple(sources), options.pop("activations", "float"))
    return LayerWeights("qkv", plan, parts, K, torch.float32, torch.device("cpu"), **options)


def packed_layer(weights, **options):
    sources = [
        packed_source(name, {key: t.dtype for key, t in stored(q).items()}, q.format, q.shape)
        for name, q in zip(NAMES, weights, strict=False)
    ]
    return layer(sources, **options)


def product_of(*weights):
    return Product(weights, torch.float32, "auto", "float")


def expected(x, weights, bias=None):
    y = torch.cat([x @ q.dequantise().T for q in weights], -1)
    return y if bias is None else y + bias


@pytest.mark.parametrize("formats", [["kmeans4-g64"] * 3, ["int4-g64", "int4-g64", "int8-g64"]])
@pytest.mark.parametrize("reverse", [False, True])
def test_tensors_come_in_any_order(formats, reverse):
    weights = [quantise(torch.randn(n, K), f) for n, f in zip(SIZES, formats, strict=True)]
    made = packed_layer(weights)
    owner = nn.Module()
    made.add_parameters(owner)
    names = [name for name, _ in owner.named_parameters()]
    assert names == ["weight.packed", "weight.scale", "weight.codebook"]
    assert owner.weight.device == torch.device("cpu")
    arriving = [
        (shard, name, tensor)
        for shard, q in zip(NAMES, weights, strict=True)
        for name, tensor in stored(q).items()
    ]
    for shard, name, tensor in reversed(arriving) if reverse else arriving:
        assert not made.is_ready
        parameter = owner.get_parameter(name)
        parameter.weight_loader(parameter, tensor, shard)
    assert made.is_ready
    # vLLM counts the elements that loaders write.
    assert all(parameter.data.eq(1).all() for parameter in owner.parameters())
    x, bias = torch.randn(3, K), torch.randn(sum(SIZES))
    torch.testing.assert_close(made.product(x, bias), expected(x, weights, bias))
    assert len(made.product.layouts) == (3 if formats[0].startswith("kmeans") else 2)


def test_missing_tensors_are_named():
    q = quantise(torch.randn(64, K), "int4-g64")
    made = packed_layer([q], parts=[Part(0, 64, 64)])
    made.add("weight.packed", q.packed)
    with pytest.raises(
        ValueError, match=r"qkv: the checkpoint has no q.weight.scale, q.weight.cod"
    ):
        made.finish(is_dummy=False)


def test_16_bit_weights_of_one_layer_share_a_codebook_or_not():
    from dataclasses import replace

    from fdk_formats import Format

    format, weights = Format.parse("kmeans3-g64"), [torch.randn(n, K) for n in SIZES]
    for fuse in (True, False):
        made = layer([unquantised_source(name, torch.float32, format) for name in NAMES])
        made.plan = replace(made.plan, fuse=fuse)
        for index, weight in enumerate(weights):
            made.add("weight", weight, index)
        assert len(made.product.layouts) == (1 if fuse else 3)
        q = quantise(torch.cat(weights), format)
        own = [quantise(weight, format) for weight in weights]
        x = torch.randn(2, K)
        torch.testing.assert_close(made.product(x, None), expected(x, [q] if fuse else own))


def test_a_weight_of_another_shape_is_refused():
    q = quantise(torch.randn(32, K), "int4-g64")
    made = packed_layer([q], parts=[Part(32, 64, 32)])
    *first, (name, last) = stored(q).items()
    for each, tensor in first:
        made.add(each, tensor)
    with pytest.raises(ValueError, match=r"qkv: wanted a weight of at least \[64, 128\], got \[32"):
        made.add(name, last)


def test_permuted_inputs():
    q, order = quantise(torch.randn(64, K), "int4-g64"), torch.randperm(K).int()
    product = Product(
        [Weight(q, order), Weight(q, order), Weight(q)], torch.float32, "auto", "float"
    )
    assert len(product.layouts) == 2
    x = torch.randn(3, K)
    wanted = torch.cat([expected(x[:, order], [q, q]), expected(x, [q])], -1)
    torch.testing.assert_close(product(x, None), wanted)


@pytest.mark.parametrize("rotated", [3, 2])
def test_rotated_inputs(rotated, monkeypatch):
    """Products that all rotate x share one rotation."""
    from fdk_formats import rotated_layout
    from fdk_formats.rotation import rotate
    from fdk_vllm import product

    calls = []
    for module in (product, rotated_layout):
        monkeypatch.setattr(module, "rotate", lambda x: calls.append(x) or rotate(x))
    formats = ["kmeans4-g64-hadamard"] * rotated + ["kmeans4-g64"] * (3 - rotated)
    weights = [quantise(torch.randn(n, K), f) for n, f in zip(SIZES, formats, strict=True)]
    made = product_of(*map(Weight, weights))
    x, bias = torch.randn(3, K), torch.randn(sum(SIZES))
    torch.testing.assert_close(made(x, bias), expected(x, weights, bias))
    assert len(calls) == (1 if rotated == 3 else 2)
    order = torch.randperm(K).int()
    permuted = product_of(Weight(weights[0], order), Weight(weights[1]))
    wanted = torch.cat([expected(x[:, order], weights[:1]), expected(x, weights[1:2])], -1)
    torch.testing.assert_close(permuted(x, None), wanted)


def test_reloaded_weights_must_be_rotated_alike():
    plain, rotated = (quantise(torch.randn(64, K), f"int4-g64{r}") for r in ("", "-hadamard"))
    made = [product_of(Weight(q)) for q in (plain, rotated)]
    made[1].copy_from(product_of(Weight(quantise(torch.randn(64, K), "int4-g64-hadamard"))))
    for a, b in (made, made[::-1]):
        with pytest.raises(ValueError, match="reloaded weights need other kernels"):
            a.copy_from(b)


def test_permuted_inputs_are_not_cut_along_k():
    q, order = quantise(torch.randn(64, 2 * K), "int4-g64"), torch.randperm(2 * K).int()
    made = packed_layer([q], parts=[Part(0, 64, 64, 0, 2)])
    with pytest.raises(ValueError, match=r"act-order\) cannot be cut along k: serve with --tensor"):
        made._cut(Weight(q, order), made.parts[0])


def test_reloaded_values_keep_their_addresses():
    first, second = (quantise(torch.randn(64, K), "kmeans4-g64") for _ in range(2))
    product = product_of(Weight(first))
    before = {name: tensor.data_ptr() for name, tensor in product.buffers().items()}
    product.copy_from(product_of(Weight(second)))
    assert {name: tensor.data_ptr() for name, tensor in product.buffers().items()} == before
    x = torch.randn(2, K)
    torch.testing.assert_close(product(x, None), expected(x, [second]))
    other = Product(
        [Weight(quantise(torch.randn(64, K), "int8-g64"))], torch.float32, "auto", "float"
    )
    with pytest.raises(ValueError, match="reloaded weights need other kernels"):
        product.copy_from(other)
