"""The parameters of a quantised layer: one copy of the weight, whoever reads or moves it."""

import copy
import gc
import io
import mmap
import pickle

import pytest
import torch
from torch import Tensor, nn

from fdk_formats import QuantisedLinear, load_model, quantise_model, save_model
from fdk_formats.stored_weight import StoredTensor

FORMATS = ["kmeans4-g32", "affine3-g16", "nf4-row", "kmeans4-g32-hadamard"]


def layer(format="kmeans4-g32", n=24, k=64, backend="reference", bias=True):
    torch.manual_seed(0)
    return QuantisedLinear.from_linear(nn.Linear(k, n, bias=bias), format, backend=backend)


def bytes_alive():
    """Returns the bytes of all storages of tensors on the CPU that Python can reach."""
    storages = {}
    for found in gc.get_objects():
        # Tracers leave fake tensors, which have no memory.
        if type(found) not in (Tensor, nn.Parameter) or torch._is_functional_tensor(found):
            continue
        if found.device.type != "cpu":
            continue
        try:
            storage = found.untyped_storage()
        except NotImplementedError:  # sparse tensors and those of vmap, which other tests leave
            continue
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@pytest.mark.parametrize("format", ["nf4-g32", "affine4-g64", "int8-g64", "affine2-row"])
@torch.no_grad()
def test_one_copy_of_the_weight(format, backend):
    torch.manual_seed(0)
    source = nn.Linear(1024, 1024)
    QuantisedLinear.from_linear(source, format, backend=backend)(
        torch.zeros(1, 1024)
    )  # fills caches
    gc.collect()
    before = bytes_alive()
    quantised = QuantisedLinear.from_linear(source, format, backend=backend)
    canonical = bytes_alive() - before
    assert canonical == sum(p.nbytes for p in quantised.parameters())
    x = torch.randn(1, 1024)
    before += x.nbytes
    y = quantised(x)
    before += y.nbytes
    packed = bytes_alive() - before
    layout = sum(b.untyped_storage().nbytes() for b in quantised.layout.buffers())
    assert packed == layout + quantised.bias.nbytes
    assert packed < 1.3 * canonical
    for read in (quantised.state_dict, lambda: quantised.weight_packed.sum(), quantised.dequantise):
        read()
        assert bytes_alive() - before == packed
    quantised.weight_packed.data_ptr()  # needs memory of its own: back to canonical tensors
    assert bytes_alive() - before == canonical
    assert torch.equal(quantised(x), y)


@pytest.mark.parametrize("name", ["weight_packed", "weight_scale", "weight_codebook"])
@pytest.mark.parametrize("was_called", [False, True])
@torch.no_grad()
def test_nothing_gets_the_address_of_a_packed_parameter(name, was_called, backend):
    quantised, x = layer("kmeans4-g32", 2048, 2048, backend=backend), torch.randn(1, 2048)
    wanted = quantised(x) if was_called else None
    parameter = quantised.get_parameter(name)
    address = parameter.data_ptr()
    values = torch.empty(0).set_(parameter.untyped_storage())
    assert values.data_ptr() == address
    del values
    packed = quantised(x)
    assert wanted is None or torch.equal(packed, wanted)
    others = [torch.empty_like(parameter) for _ in range(64)]
    assert address not in [other.data_ptr() for other in others]
    if address not in [buffer.data_ptr() for buffer in quantised.layout.buffers()]:
        assert pages_in_memory(address, parameter.nbytes) == 0
    assert parameter.data_ptr() == address
    assert torch.equal(quantised(x), packed)


def pages_in_memory(address, nbytes):
    """Returns how many pages of a range that begins a page are in memory, asked of Linux."""
    pages = -(-nbytes // mmap.PAGESIZE)
    with open("/proc/self/pagemap", "rb") as file:
        file.seek(address // mmap.PAGESIZE * 8)
        entries = memoryview(file.read(pages * 8)).cast("Q")
    return sum(entry >> 63 for entry in entries)


def test_parameters_are_frozen_and_named():
    for format, table in (("kmeans4-g32", "weight_codebook"), ("affine4-g32", "weight_zero_point")):
        quantised = layer(format)
        names = ["weight_packed", "weight_scale", table]
        assert [name for name, _ in quantised.named_parameters()] == [*names, "bias"]
        assert list(quantised.state_dict()) == [*names, "bias"]
        assert list(quantised.buffers()) == []
        assert list(quantised.children()) == []
        first = next(quantised.parameters())
        assert first is quantised.weight_packed is quantised.get_parameter("weight_packed")
        assert first.device.type == "cpu"
        assert all(isinstance(p, nn.Parameter) for p in quantised.parameters())


def test_training_a_whole_model_leaves_the_weight_frozen():
    model, x = nn.Sequential(layer(n=64), layer()), torch.randn(3, 64)
    wanted = model(x)
    model.requires_grad_(True)
    for parameter in model.parameters():
        parameter.requires_grad = True
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained == ["0.bias", "1.bias"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    codes = model[0].quantised.packed.clone()
    model(x).sum().backward()
    optimizer.step()
    assert not torch.equal(model(x), wanted)
    assert torch.equal(model[0].quantised.packed, codes)
    model.train().eval().zero_grad()
    model.requires_grad_(False)
    assert not model(x).requires_grad


@pytest.mark.parametrize("is_called", [False, True])
@pytest.mark.parametrize("format", FORMATS[:3])  # compared with a dense product, bit for bit
@pytest.mark.parametrize(
    "cast",
    [
        nn.Module.half,
        nn.Module.bfloat16,
        nn.Module.double,
        lambda model: model.to(torch.bfloat16),
        lambda model: model.to(device="cpu", dtype=torch.float16, non_blocking=True),
        lambda model: model.half().float(),
    ],
)
def test_casts_keep_the_stored_values(cast, format, is_called):
    model = nn.Sequential(layer(format))
    if is_called:
        model(torch.zeros(1, 64))
    before = model[0].quantised
    assert cast(model) is model
    after = model[0].quantised
    for name, tensor in before.tensors().items():
        assert torch.equal(after.tensors()[name], tensor)
        assert after.tensors()[name].dtype == tensor.dtype
    dtype = model[0].dtype
    assert model[0].bias.dtype == model[0].weight.dtype == dtype
    x = torch.randn(3, 64, dtype=dtype)
    wanted = nn.functional.linear(x, before.dequantise(dtype), model[0].bias)
    assert torch.equal(model(x), wanted)


@pytest.mark.parametrize("is_called", [False, True])
@pytest.mark.parametrize("format", FORMATS)
def test_casting_parameters_one_by_one(format, is_called):
    """``p.data = p.data.to(float32)`` and the like: scales keep the format's dtype."""
    quantised, x = layer(format), torch.randn(3, 64)
    wanted = layer(format)(x)
    if is_called:
        quantised(x)
    dtypes = {name: p.dtype for name, p in quantised.named_parameters()}
    for parameter in quantised.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(torch.float64)
            parameter.data = parameter.data.to(torch.float32)
    assert {name: p.dtype for name, p in quantised.named_parameters()} == dtypes
    assert torch.equal(quantised(x), wanted)


@pytest.mark.parametrize("write", ["data", "copy_", "mul_", "setitem"])
def test_writing_to_a_parameter_changes_the_weight(write):
    quantised, x = layer(bias=False), torch.randn(3, 64)
    y = quantised(x)
    scale = quantised.weight_scale
    doubled = 2 * scale
    if write == "data":
        scale.data = doubled
    elif write == "copy_":
        scale.copy_(doubled)
    elif write == "mul_":
        scale.mul_(2)
    else:
        scale[:] = doubled
    assert torch.equal(quantised.weight_scale, doubled)
    torch.testing.assert_close(quantised(x), 2 * y)


def test_copies_are_independent():
    model, x = nn.Sequential(layer()), torch.randn(3, 64)
    wanted = model(x)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.copy(model)):
        assert torch.equal(copied(x), wanted)
    copied = copy.deepcopy(model)
    copied[0].weight_scale.zero_()
    assert torch.equal(copied(x), copied[0].bias.expand(3, 24))
    assert torch.equal(model(x), wanted)


@pytest.mark.parametrize("is_called", [False, True])
@pytest.mark.parametrize("format", FORMATS)
def test_deepcopy_pickle_and_torch_save(format, is_called):
    model, x = nn.Sequential(layer(format), nn.ReLU()), torch.randn(3, 64)
    wanted = nn.Sequential(layer(format), nn.ReLU())(x)
    if is_called:
        model(x)
    saved = io.BytesIO()
    torch.save(model, saved)
    saved.seek(0)
    for other in (
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(saved, weights_only=False),
    ):
        assert torch.equal(other(x), wanted)
        assert isinstance(other[0].weight_packed, StoredTensor)
        assert list(other.state_dict()) == list(model.state_dict())


def test_deepcopy_keeps_ties():
    model = nn.ModuleDict({"a": layer(), "b": layer(), "c": layer()})
    model["b"].tie_weight(model["a"])
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other["a"].weight_packed is other["b"].weight_packed
        assert other["a"].weight_packed is not other["c"].weight_packed
        assert len(list(other.parameters())) == 9  # two weights of 3, three biases


@pytest.mark.parametrize("is_called", [False, True])
def test_saving_a_state_dict(is_called, tmp_path):
    from safetensors.torch import load_file, load_model, save_file, save_model

    model, x = nn.Sequential(layer(), nn.ReLU()), torch.randn(3, 64)
    wanted = nn.Sequential(layer(), nn.ReLU())(x)
    if is_called:
        model(x)

    def other():
        torch.manual_seed(5)
        return quantise_model(
            nn.Sequential(nn.Linear(64, 24), nn.ReLU()),
            "kmeans4-g32",
            backend="reference",
            progress=False,
        )

    save_file(model.state_dict(), tmp_path / "a.safetensors")
    torch.save(model.state_dict(), tmp_path / "a.pt")
    for state in (
        load_file(tmp_path / "a.safetensors"),
        torch.load(tmp_path / "a.pt", weights_only=True),
        model.state_dict(keep_vars=True),
    ):
        loaded = other()
        loaded(x)
        assert loaded.load_state_dict(state) == ([], [])
        assert torch.equal(loaded(x), wanted)
    save_model(model, str(tmp_path / "b.safetensors"))
    loaded = other()
    assert load_model(loaded, str(tmp_path / "b.safetensors")) == (set(), [])
    assert torch.equal(loaded(x), wanted)


def test_names_of_0_1_still_load():
    quantised, x = layer(), torch.randn(3, 64)
    state = {name.replace("weight_", "weight."): t for name, t in quantised.state_dict().items()}
    assert list(state) == ["weight.packed", "weight.scale", "weight.codebook", "bias"]
    loaded = layer()
    loaded.weight_scale.zero_()
    loaded.load_state_dict(state)
    assert torch.equal(loaded(x), quantised(x))


def test_files_are_unchanged(tmp_path):
    from safetensors import safe_open

    model = nn.Sequential(layer())
    save_model(tmp_path / "m.safetensors", model)
    with safe_open(tmp_path / "m.safetensors", "pt") as file:
        assert sorted(file.keys()) == [
            "0.bias",
            "0.weight.codebook",
            "0.weight.packed",
            "0.weight.scale",
        ]
    source = nn.Sequential(nn.Linear(64, 24))
    loaded = load_model(tmp_path / "m.safetensors", source, "reference")
    x = torch.randn(3, 64)
    torch.testing.assert_close(loaded(x), model(x))


def test_operations_on_a_parameter():
    """A parameter acts as a plain tensor of its values, also while a layout holds them."""
    quantised = layer()
    quantised(torch.zeros(1, 64))
    q = quantised.quantised
    for name, wanted in q.tensors().items():
        found = getattr(quantised, f"weight_{name}")
        assert (found.shape, found.dtype, found.device) == (
            wanted.shape,
            wanted.dtype,
            wanted.device,
        )
        for read in (
            Tensor.clone,
            lambda t: t[0],
            lambda t: t[None],
            lambda t: t.float() + 1,
            lambda t: torch.cat([t, t]),
            lambda t: t.to("cpu", copy=True),
            lambda t: torch.from_numpy(t.view(torch.uint8).numpy()),
            lambda t: torch.tensor(t.tolist()),
            lambda t: torch.zeros_like(t),
            lambda t: torch.empty_like(t).copy_(t),
            torch.sum,
        ):
            assert torch.equal(read(found), read(wanted))
            assert not isinstance(read(found), StoredTensor)
        assert "StoredTensor" in repr(found)


@pytest.mark.parametrize("is_called", [False, True])
def test_share_memory(is_called):
    quantised, x = layer(), torch.randn(3, 64)
    wanted = layer()(x)
    if is_called:
        quantised(x)
        assert quantised.share_memory() is quantised
        assert all(b.is_shared() for b in quantised.layout.buffers())
    else:
        assert quantised.share_memory() is quantised
        assert all(p.is_shared() for p in quantised.parameters())
    assert torch.equal(quantised(x), wanted)


def test_a_replaced_parameter():
    quantised, x = layer(bias=False), torch.randn(3, 64)
    y = quantised(x)
    quantised.weight_scale = nn.Parameter(2 * quantised.weight_scale, requires_grad=False)
    torch.testing.assert_close(quantised(x), 2 * y)
    assert isinstance(quantised.weight_scale, StoredTensor)
    state = quantised.state_dict()
    torch.testing.assert_close(torch.func.functional_call(quantised, state, x), 2 * y)
    halved = state | {"weight_scale": state["weight_scale"] / 4}
    torch.testing.assert_close(torch.func.functional_call(quantised, halved, x), y / 2)
    torch.testing.assert_close(quantised(x), 2 * y)
