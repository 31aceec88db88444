"""QuantisedEmbedding in the place of nn.Embedding."""

import copy
import pickle

import pytest
import torch
from accelerate import cpu_offload
from torch import nn
from torch.nn.functional import embedding as rows_of

from fdk_formats import (
    QuantisedEmbedding,
    QuantisedLinear,
    load_model,
    quantise,
    quantise_model,
    save_model,
)

FORMATS = (
    "int4-g32",
    "nf4-row",
    "kmeans3-g32",
    "affine4-g64-zint",
    "int8-g64-e8m0",
    "binary1-g16",
    "kmeans3-g32-hadamard",
)


def made(format="int4-g32", dtype=torch.float32, **kwargs):
    torch.manual_seed(0)
    source = nn.Embedding(10, 64, dtype=dtype, **kwargs)
    return source, QuantisedEmbedding.from_embedding(source, format)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("format", FORMATS)
def test_rows_are_those_of_the_dequantised_table(format, dtype):
    source, embedding = made(format, dtype)
    table = quantise(source.weight.detach(), format).dequantise(dtype)
    ids = torch.tensor([[3, 3, 0], [9, 1, 2]])
    y = embedding(ids)
    assert y.dtype == dtype
    assert torch.equal(y, rows_of(ids, table))
    assert torch.equal(embedding.weight, table)
    assert not y.requires_grad


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(), (5,), (0,), (2, 0), (2, 3), (2, 3, 4)])
def test_ids_of_every_shape(shape, dtype):
    source, embedding = made()
    ids = torch.randint(0, 10, shape).to(dtype)
    assert embedding(ids).shape == source(ids).shape
    assert torch.equal(embedding(ids), rows_of(ids, embedding.dequantise()))
    if ids.ndim == 2:
        assert torch.equal(embedding(input=ids.t()), embedding(ids).transpose(0, 1))


@pytest.mark.parametrize("wrong", [10, -1, 2**31 - 1])
def test_ids_out_of_range(wrong):
    source, embedding = made()
    for layer in (source, embedding):
        with pytest.raises(IndexError, match="out of range"):
            layer(torch.tensor([0, wrong]))


@pytest.mark.parametrize(
    ("ids", "got"),
    [(torch.ones(2), "float32"), (torch.ones(2, dtype=torch.bool), "bool"), ([1], "list")],
)
def test_ids_that_are_none(ids, got):
    with pytest.raises(TypeError, match=f"ids must be a tensor of int32 or int64, got .*{got}"):
        made()[1](ids)


def test_attributes_of_nn_embedding():
    source, embedding = made(padding_idx=2)
    assert isinstance(embedding, nn.Embedding)
    assert repr(embedding) == "QuantisedEmbedding(10, 64, padding_idx=2, int4-g32)"
    for name in ("num_embeddings", "embedding_dim", "padding_idx", "max_norm", "sparse"):
        assert getattr(embedding, name) == getattr(source, name)
    assert embedding.weight.shape == (10, 64)
    assert embedding.weight.dtype == torch.float32
    # nn.Embedding keeps the row of padding_idx zero; zeros stay exact.
    assert torch.equal(embedding(torch.tensor(2)), torch.zeros(64))


def test_refused_sources():
    with pytest.raises(ValueError, match="max_norm changes the table at each call"):
        made(max_norm=1.0)
    with pytest.raises(TypeError, match=r"wanted a torch\.nn\.Embedding, got Linear"):
        QuantisedEmbedding.from_embedding(nn.Linear(64, 64), "int4-g32")
    source = nn.Embedding(10, 64)
    source.forward = lambda ids: ids
    with pytest.raises(ValueError, match=r"with the forward of torch\.nn\.Embedding"):
        QuantisedEmbedding.from_embedding(source, "int4-g32")
    with pytest.raises(
        ValueError, match="k must be a positive multiple of 48, got k=64; int4-g32 "
    ):
        made("int4-g48")
    model = nn.Sequential(nn.Embedding(10, 64, max_norm=1.0), nn.Linear(64, 64))
    changes = "layer 0: max_norm changes the table at each call; leave it"
    with pytest.raises(ValueError, match=changes):
        quantised(model)
    assert type(quantised(model, skip="^0$")[0]) is nn.Embedding


class Positions(nn.Embedding):
    """A subclass, which may do more than look up rows."""


def quantised(model, format="int4-g32", **kwargs):
    return quantise_model(
        model, format, backend="reference", include=["embedding"], progress=False, **kwargs
    )


def test_subclasses_are_left(caplog):
    result = quantised(nn.Sequential(Positions(10, 64), nn.Linear(64, 64)))
    assert type(result[0]) is Positions
    assert "Positions (0.weight, 14 %)" in caplog.text  # 640 of 640 + 4096


def test_importance_reaches_the_table():
    source, _ = made()
    importance = torch.zeros(64)
    importance[:8] = 1
    embedding = QuantisedEmbedding.from_embedding(source, "kmeans2-g32", importance=importance)
    expected = quantise(source.weight, "kmeans2-g32", importance)
    assert torch.equal(embedding.weight, expected.dequantise(torch.float32))
    assert not torch.equal(embedding.weight, made("kmeans2-g32")[1].weight)


# Inductor asks about torch.jit, which warns.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile(backend):
    _, embedding = made("nf4-g32", torch.bfloat16)
    compiled = torch.compile(embedding, fullgraph=True, backend=backend)
    for ids in (torch.tensor([[1, 2]]), torch.tensor([[3, 4], [5, 6]]), torch.tensor([7]).int()):
        assert torch.equal(compiled(ids), embedding(ids))


def test_export():
    _, embedding = made()
    ids = torch.tensor([[1, 2, 3]])
    batch = torch.export.Dim("batch")
    exported = torch.export.export(embedding, (ids.repeat(2, 1),), dynamic_shapes=({0: batch},))
    assert torch.equal(exported.module()(ids.repeat(4, 1)), embedding(ids.repeat(4, 1)))


def test_autocast_leaves_rows_as_they_are():
    source, embedding = made()
    with torch.autocast("cpu", torch.bfloat16):
        assert source(torch.tensor([1])).dtype == torch.float32
        assert embedding(torch.tensor([1])).dtype == torch.float32


def test_a_cast_changes_rows_only():
    _, embedding = made("int4-g32-fp32")
    ids, q = torch.tensor([1, 2]), embedding.quantised
    embedding.to(torch.bfloat16)
    assert torch.equal(embedding(ids), q.dequantise(torch.bfloat16)[ids])
    assert embedding.quantised.scale.dtype == torch.float32
    assert torch.equal(embedding.float()(ids), q.dequantise(torch.float32)[ids])


def test_state_dict_and_copies():
    _, embedding = made("affine4-g32")
    ids = torch.arange(10)
    names = {"weight_packed", "weight_scale", "weight_zero_point"}
    assert embedding.state_dict().keys() == names
    other = QuantisedEmbedding(10, 64, format="affine4-g32")
    assert torch.equal(other(ids), torch.zeros(10, 64))
    other.load_state_dict(embedding.state_dict())
    for copied in (other, copy.deepcopy(embedding), pickle.loads(pickle.dumps(embedding))):
        assert torch.equal(copied(ids), embedding(ids))
    meta = QuantisedEmbedding(10, 64, device="meta", format="affine4-g32")
    assert meta(ids.to("meta")).shape == (10, 64)
    meta.load_state_dict(embedding.state_dict(), assign=True)
    assert torch.equal(meta(ids), embedding(ids))


def test_cpu_offload():
    model = nn.Sequential(nn.Embedding(10, 64), nn.Linear(64, 64))
    result, ids = quantised(model), torch.tensor([[1, 2]])
    y = result(ids)
    cpu_offload(result, torch.device("cpu"))
    assert result[0].weight_packed.device.type == "meta"
    for _ in range(2):
        assert torch.equal(result(ids), y)


class Language(nn.Module):
    """An embedding and a head, tied or not."""

    def __init__(self, *, tied):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.up = nn.Embedding(20, 64, padding_idx=0), nn.Linear(64, 64)
        self.lm_head = nn.Linear(64, 20, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, ids):
        return self.lm_head(self.up(self.embed(ids)))


@pytest.mark.parametrize("on_meta", [False, True])
@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_round_trip_through_a_file(tied, head, on_meta, tmp_path):
    result = quantised(Language(tied=tied), default_skip=not head)
    assert isinstance(result.embed, QuantisedEmbedding) == (head or not tied)
    assert isinstance(result.lm_head, QuantisedLinear) == head
    save_model(tmp_path / "m", result)
    with torch.device("meta" if on_meta else "cpu"):
        source = Language(tied=tied)
    loaded = load_model(tmp_path / "m", source, backend="reference")
    ids = torch.tensor([[0, 1, 19]])
    assert torch.equal(loaded(ids), result(ids))
    assert loaded.embed.padding_idx == 0
    assert (loaded.embed.weight is loaded.lm_head.weight) == (tied and not head)
    assert type(loaded.embed) is type(result.embed)
    if head and tied:
        assert torch.equal(loaded.embed.weight, loaded.lm_head.weight)


def test_a_head_takes_the_weight_of_the_table_as_it_is(recwarn):
    """`head.weight = embedding.weight` ties layers in PyTorch; quantising again loses precision."""
    embedding = QuantisedEmbedding.from_embedding(nn.Embedding(24, 64), "kmeans3-g32")
    head = QuantisedLinear(64, 24, bias=False, format="kmeans3-g32", backend="reference")
    head.weight = embedding.weight
    assert torch.equal(head.dequantise(), embedding.dequantise())
    assert head.stored is not embedding.stored
    other = QuantisedLinear(64, 24, bias=False, format="kmeans3-g32", backend="reference")
    other.weight = head.weight
    assert other.stored is head.stored
    head.weight = head.weight
    assert not recwarn
    wider = QuantisedLinear(64, 24, bias=False, format="int8-g32", backend="reference")
    with pytest.warns(UserWarning, match="quantised again"):
        wider.weight = head.weight
