from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fdk_formats import (
    QuantisedLinear,
    load,
    load_model,
    parameters_on_meta,
    quantise,
    quantise_model,
    save,
    save_model,
)


class Net(nn.Module):
    """Two linear layers that share a weight, a head tied to the embedding, a buffer."""

    def __init__(self, k: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, k)
        self.first = nn.Linear(k, k)
        self.second = nn.Linear(k, k, bias=False)
        self.second.weight = self.first.weight
        self.lm_head = nn.Linear(k, 20, bias=False)
        self.lm_head.weight = self.embed.weight
        self.register_buffer("steps", torch.tensor([3]))

    def forward(self, ids: Tensor) -> Tensor:
        y: Tensor = self.lm_head(self.second(torch.relu(self.first(self.embed(ids)))))
        return y


IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])


def net(seed: int = 0, k: int = 32) -> Net:
    torch.manual_seed(seed)
    return Net(k)


def quantised(model: nn.Module) -> nn.Module:
    return quantise_model(model, "kmeans4-g32", backend="reference", progress=False)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_model(tmp_path / "net.safetensors", quantised(net()), metadata={"made": "here"})
    return tmp_path / "net.safetensors"


def test_the_file_is_canonical(path: Path) -> None:
    tensors = load(path)
    expected = ["embed.weight", "first.bias", "first.weight", "lm_head.weight", "second.weight"]
    assert sorted(tensors) == [*expected, "steps"]
    q = quantise(net().first.weight, "kmeans4-g32")
    assert torch.equal(tensors["first.weight"].packed, q.packed)
    assert tensors["first.weight"] is tensors["second.weight"]
    assert tensors["embed.weight"] is tensors["lm_head.weight"]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_load_model(path: Path, device: str) -> None:
    with torch.device(device):
        skeleton = net(seed=1)
    model = load_model(path, skeleton, backend="reference")
    assert torch.equal(model(IDS), quantised(net())(IDS))
    assert isinstance(model.first, QuantisedLinear)
    assert model.first.weight is model.second.weight
    assert model.lm_head.weight is model.embed.weight
    assert model.steps.tolist() == [3]
    assert type(skeleton.first) is nn.Linear
    assert skeleton.embed.weight.device.type == device


def test_a_single_layer(tmp_path: Path) -> None:
    source = QuantisedLinear.from_linear(nn.Linear(32, 8), "nf4-g16", backend="reference")
    save_model(tmp_path / "layer", source)
    layer = load_model(tmp_path / "layer", nn.Linear(32, 8), backend="reference")
    x = torch.randn(3, 32)
    assert torch.equal(layer(x), source(x))


def test_what_is_no_module_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="model must be a module, got Tensor"):
        save_model(tmp_path / "x", torch.ones(3))  # type: ignore[arg-type]


def test_what_does_not_fit_is_named(path: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"needs a Linear of weight \[32, 32\], .*\[64, 64\]"):
        load_model(path, net(k=64), backend="reference")
    with pytest.raises(ValueError, match=r"first\.weight: the model has no layer 'first'"):
        load_model(path, nn.Module(), backend="reference")
    other = net()
    other.extra = nn.Linear(3, 3)
    with pytest.raises(ValueError, match=r"missing extra\.weight, extra\.bias; unexpected nothing"):
        load_model(path, other, backend="reference")
    save(tmp_path / "more", load(path) | {"surplus": torch.ones(1)})
    with pytest.raises(ValueError, match="missing nothing; unexpected surplus"):
        load_model(tmp_path / "more", net(), backend="reference")
    save(tmp_path / "steps", load(path) | {"steps": torch.ones(2)})
    with pytest.raises(ValueError, match=r"(?s)does not fit the model: .*size mismatch for steps"):
        load_model(tmp_path / "steps", net(), backend="reference")


def test_buffers_that_state_dict_leaves_out_are_kept(tmp_path: Path) -> None:
    source = net()
    source.register_buffer("inv_freq", torch.tensor([1.0, 0.5]), persistent=False)
    save_model(tmp_path / "net", quantised(source))
    with torch.device("meta"):
        skeleton = net()
        skeleton.register_buffer("inv_freq", torch.ones(2), persistent=False)
    model = load_model(tmp_path / "net", skeleton, backend="reference")
    assert model.inv_freq.tolist() == [1.0, 0.5]
    assert "inv_freq" not in model.state_dict()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_result_has_the_dtype_of_the_model(tmp_path: Path, dtype: torch.dtype) -> None:
    save_model(tmp_path / "net", quantised(net().to(torch.bfloat16)))
    model = load_model(tmp_path / "net", net().to(dtype), backend="reference")
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert model(IDS).dtype == dtype


def test_a_buffer_that_no_file_holds_cannot_come_from_meta(path: Path) -> None:
    with torch.device("meta"):
        skeleton = net()
        skeleton.register_buffer("inv_freq", torch.ones(2), persistent=False)
    with pytest.raises(ValueError, match="holds no inv_freq, which the model has on the meta"):
        load_model(path, skeleton, backend="reference")


class Counter(nn.Module):
    """A module whose state is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.count)

    def set_extra_state(self, state: Tensor) -> None:
        self.count = int(state)


def test_extra_state_is_stored(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 4), Counter())
    model[1].count = 7
    small = quantise_model(model, "int4-g64", backend="reference", progress=False)
    save_model(tmp_path / "m.safetensors", small)
    model[1].count = 0
    again = load_model(tmp_path / "m.safetensors", model, backend="reference")
    assert again[1].count == 7


class Normed(nn.Module):
    """A layer, and buffers that ``state_dict`` holds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.norm = nn.BatchNorm1d(32)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.linear(x))
        return y


def test_buffers_have_the_dtype_of_the_model(tmp_path: Path) -> None:
    model = Normed()
    model.norm.running_mean += 1.5  # type: ignore[operator]
    save_model(tmp_path / "m.safetensors", quantise_model(model, "int4-g32", backend="reference"))
    loaded = load_model(tmp_path / "m.safetensors", Normed().bfloat16().eval(), "reference")
    assert isinstance(loaded, Normed)
    assert loaded.norm.running_mean is not None
    assert loaded.norm.running_mean.dtype == torch.bfloat16
    assert loaded.norm.running_mean.tolist() == [1.5] * 32
    assert loaded.norm.num_batches_tracked is not None
    assert loaded.norm.num_batches_tracked.dtype == torch.int64
    assert loaded(torch.ones(2, 32, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_what_the_file_ties_and_the_model_does_not(path: Path) -> None:
    apart = net()
    apart.lm_head.weight = nn.Parameter(apart.lm_head.weight.detach().clone())
    loaded = load_model(path, apart, "reference")
    assert isinstance(loaded, Net)
    assert torch.equal(loaded.lm_head.weight, loaded.embed.weight)
    loaded.embed.weight.data.zero_()
    assert loaded.lm_head.weight.abs().max() > 0
    tied = load_model(path, net(), "reference")
    assert isinstance(tied, Net)
    assert tied.lm_head.weight is tied.embed.weight


def test_a_shared_bias_stays_shared(tmp_path: Path) -> None:
    def model() -> nn.Sequential:
        layers = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
        layers[1].bias = layers[0].bias
        return layers

    save_model(tmp_path / "m.safetensors", quantise_model(model(), "int4-g32", backend="reference"))
    loaded = load_model(tmp_path / "m.safetensors", model(), "reference")
    assert isinstance(loaded, nn.Sequential)
    assert loaded[0].bias is loaded[1].bias


def test_buffers_that_are_not_persistent_have_the_dtype_of_the_model(tmp_path: Path) -> None:
    class Placed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 32)
            self.register_buffer("place", torch.ones(32), persistent=False)
            self.register_buffer("count", torch.tensor([2]))

    path = tmp_path / "m.safetensors"
    save_model(path, quantise_model(Placed(), "int4-g32", backend="reference"))
    loaded = load_model(path, Placed().bfloat16(), "reference")
    dtypes = {name: buffer.dtype for name, buffer in loaded.named_buffers() if "." not in name}
    assert dtypes == {"place": torch.bfloat16, "count": torch.int64}


def test_tensors_by_name_in_place_of_a_file(path: Path) -> None:
    tensors = load(path)
    loaded = load_model(tensors, net(seed=1), backend="reference")
    assert torch.equal(loaded(IDS), quantised(net())(IDS))
    assert loaded.first.weight is loaded.second.weight
    assert loaded.lm_head.weight is loaded.embed.weight
    loaded.embed.weight.data.zero_()
    assert tensors["embed.weight"].abs().max() > 0
    with pytest.raises(ValueError, match=r"load_model: does not fit .* unexpected surplus"):
        load_model(tensors | {"surplus": torch.ones(1)}, net(), backend="reference")
    with pytest.raises(TypeError, match=r"first\.bias must be a QuantisedTensor or .*, got list"):
        load_model(tensors | {"first.bias": [1.0]}, net(), backend="reference")
    with pytest.raises(TypeError, match="load_model: model must be a module, got NoneType"):
        load_model(tensors, None)  # type: ignore[arg-type]


def test_one_name_of_a_tied_parameter_is_enough(path: Path) -> None:
    tensors = load(path)
    del tensors["lm_head.weight"]
    loaded = load_model(tensors, net(seed=1), backend="reference")
    assert torch.equal(loaded(IDS), quantised(net())(IDS))
    assert loaded.lm_head.weight is loaded.embed.weight


def test_parameters_on_meta() -> None:
    with parameters_on_meta():
        skeleton = net()
        frozen = nn.Module()
        frozen.scale = nn.Parameter(torch.ones(3), requires_grad=False)
        lazy = nn.LazyLinear(3)
    assert {p.device.type for p in skeleton.parameters()} == {"meta"}
    assert skeleton.lm_head.weight is skeleton.embed.weight
    assert skeleton.second.weight is skeleton.first.weight
    assert skeleton.steps.tolist() == [3]
    assert not frozen.scale.requires_grad
    assert isinstance(lazy.weight, nn.UninitializedParameter)
    assert nn.Linear(2, 2).weight.device.type == "cpu"
