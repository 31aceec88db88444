"""accelerate: big-model loading, dispatch and offloading of quantised layers."""

import gc
import weakref

import pytest
import torch
from accelerate import (
    cpu_offload,
    disk_offload,
    dispatch_model,
    infer_auto_device_map,
    init_empty_weights,
    load_checkpoint_and_dispatch,
)
from accelerate.hooks import remove_hook_from_submodules
from accelerate.utils import (
    compute_module_sizes,
    extract_model_from_parallel,
    find_tied_parameters,
    named_module_tensors,
    set_module_tensor_to_device,
)
from mixtures import Mixture
from safetensors.torch import save_file
from torch import nn

from fdk_formats import QuantisedLinear, fuse_layers, quantise_model

FORMATS = ["kmeans4-g32", "affine3-g32", "int4-row", "kmeans4-g32-hadamard"]
SIZES = [(64, 64, True), (64, 64, False), (64, 32, True)]


class Block(nn.Module):
    def __init__(self, k, n, bias):
        super().__init__()
        self.proj = nn.Linear(k, n, bias=bias)
        self.norm = nn.LayerNorm(n)

    def forward(self, x):
        return self.norm(self.proj(x))


def source():
    torch.manual_seed(0)
    return nn.Sequential(*(Block(*size) for size in SIZES))


def model(format="kmeans4-g32"):
    return quantise_model(source(), format, backend="reference", progress=False)


def empty(format="kmeans4-g32"):
    """Returns the model without memory, as code that builds it with quantised layers does."""
    with init_empty_weights():
        made = source()
        for block, (k, n, bias) in zip(made, SIZES, strict=True):
            block.proj = QuantisedLinear(k, n, bias, format=format, backend="reference")
    return made


def x():
    return torch.randn(3, 64, generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=FORMATS)
def format(request):
    return request.param


@pytest.fixture
def wanted(format):
    with torch.no_grad():
        return model(format)(x())


def watch_layouts(made):
    """Calls a model, and returns weak references to its layouts."""
    made(x())
    return [weakref.ref(block.proj.layout) for block in made]


def devices(made):
    return [block.proj.weight_packed.device.type for block in made]


def on_cpu(*_):
    return {"": torch.device("cpu")}


WAYS = {
    "cpu": lambda made, folder: dispatch_model(
        made, {"0": "cpu", "1": "cpu", "2": "cpu"}, force_hooks=True
    ),
    "cpu and disk": lambda made, folder: dispatch_model(
        made,
        {"0": "cpu", "1": "disk", "2": "disk"},
        main_device="cpu",
        offload_dir=folder,
        force_hooks=True,
    ),
    "disk, buffers too": lambda made, folder: dispatch_model(
        made,
        {"0": "cpu", "1": "disk", "2": "disk"},
        main_device="cpu",
        offload_dir=folder,
        offload_buffers=True,
        force_hooks=True,
    ),
    "cpu_offload": lambda made, folder: cpu_offload(made, execution_device=torch.device("cpu")),
    "cpu_offload, buffers too": lambda made, folder: cpu_offload(
        made, execution_device=torch.device("cpu"), offload_buffers=True
    ),
    "disk_offload": lambda made, folder: disk_offload(
        made, folder, execution_device=torch.device("cpu")
    ),
    "disk_offload, buffers too": lambda made, folder: disk_offload(
        made, folder, execution_device=torch.device("cpu"), offload_buffers=True
    ),
}
OFFLOADED = {"cpu": [], "cpu and disk": [1, 2], "disk, buffers too": [1, 2]}


@pytest.mark.parametrize("is_called", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_offloaded_layers_compute_the_same(way, is_called, format, wanted, tmp_path):
    made = model(format)
    layouts = watch_layouts(made) if is_called else []
    placed = WAYS[way](made, str(tmp_path))
    offloaded = OFFLOADED.get(way, [0, 1, 2])
    for _ in range(3):
        with torch.no_grad():
            assert torch.equal(placed(x()), wanted)
        assert devices(placed) == ["meta" if i in offloaded else "cpu" for i in range(3)]
    gc.collect()
    assert [layout() for layout in layouts] == [None] * len(layouts)  # accelerate moved all
    for i in offloaded:
        assert placed[i].proj.stored.layout is None
        assert placed[i].proj.weight.is_meta
        assert placed[i].proj.weight.shape == (SIZES[i][1], SIZES[i][0])


@pytest.mark.parametrize("way", WAYS)
def test_gradients_of_offloaded_layers(way, tmp_path):
    plain, placed = model(), WAYS[way](model(), str(tmp_path))
    given = [x().requires_grad_() for _ in range(2)]
    for made, own in zip((plain, placed), given, strict=True):
        made(own).square().sum().backward()
    assert torch.equal(given[0].grad, given[1].grad)


def test_hooks_can_be_removed(format, wanted):
    placed = cpu_offload(model(format), execution_device=torch.device("cpu"))
    placed(x())
    remove_hook_from_submodules(placed)
    assert devices(placed) == ["cpu"] * 3
    assert torch.equal(placed(x()), wanted)


def test_state_dict_of_a_dispatched_model(format, wanted):
    made = model(format)
    placed = WAYS["cpu"](made, None)
    placed(x())
    other = model(format)
    for block in other:
        block.proj.weight_scale.zero_()
    assert list(placed.state_dict()) == list(other.state_dict())
    other.load_state_dict(placed.state_dict())
    assert torch.equal(other(x()), wanted)
    assert extract_model_from_parallel(placed) is placed


@pytest.mark.parametrize("include_buffers", [False, True])
def test_init_empty_weights(include_buffers, format, wanted):
    with init_empty_weights(include_buffers=include_buffers):
        layer = QuantisedLinear(64, 24, format=format)
        linear = nn.Linear(64, 24)
    assert {p.device.type for p in layer.parameters()} == {"meta"}
    assert linear.weight.device == layer.weight.device
    names = list(model(format).state_dict())
    assert list(empty(format).state_dict()) == names
    made = empty(format)
    made.load_state_dict(model(format).state_dict(), assign=True)
    assert torch.equal(made(x()), wanted)


MAPS = {
    "cpu": {"0": "cpu", "1": "cpu", "2": "cpu"},
    "disk": {"0": "cpu", "1": "disk", "2": "disk"},
    "by tensors of a layer": {"0.norm": "cpu", "0.proj": "disk", "1": "cpu", "2": "cpu"},
    "auto": "auto",
    "sequential": "sequential",
}


@pytest.mark.parametrize("kind", MAPS)
@pytest.mark.parametrize("is_sharded", [False, True])
def test_load_checkpoint_and_dispatch(kind, is_sharded, format, wanted, tmp_path):
    state = {name: t.contiguous() for name, t in model(format).state_dict().items()}
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    if is_sharded:
        import json

        names, where = list(state), {}
        for i, part in enumerate((names[::2], names[1::2])):
            file = f"model-0000{i + 1}-of-00002.safetensors"
            save_file({name: state[name] for name in part}, checkpoint / file)
            where |= dict.fromkeys(part, file)
        index = {"metadata": {"total_size": 0}, "weight_map": where}
        (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        save_file(state, checkpoint / "model.safetensors")
    placed = load_checkpoint_and_dispatch(
        empty(format),
        str(checkpoint),
        device_map=MAPS[kind],
        offload_folder=str(tmp_path / "offload"),
        offload_buffers=True,
        force_hooks=True,
    )
    for _ in range(2):
        with torch.no_grad():
            assert torch.equal(placed(x()), wanted)


def test_loading_one_tensor(format, wanted):
    """``set_module_tensor_to_device``, with which transformers and diffusers load."""
    made = empty(format)
    for name, tensor in model(format).state_dict().items():
        set_module_tensor_to_device(made, name, "cpu", value=tensor)
        assert torch.equal(made.get_parameter(name), tensor)
    assert torch.equal(made(x()), wanted)


def test_names_can_be_walked(format):
    made = model(format)
    for name, tensor in named_module_tensors(made, include_buffers=True, recurse=True):
        found = made
        for part in name.split("."):
            found = getattr(found, part)
        assert found is tensor


def tied():
    made = model()
    made[1].proj = model()[0].proj
    made[1].proj.tie_weight(made[0].proj)
    return made


@pytest.mark.parametrize("way", WAYS)
def test_tied_weights_stay_tied(way, tmp_path):
    made = tied()
    wanted = made(x())
    groups = find_tied_parameters(made)
    names = ("weight_packed", "weight_scale", "weight_codebook")
    assert sorted(map(sorted, groups)) == sorted(
        [f"0.proj.{name}", f"1.proj.{name}"] for name in names
    )
    placed = WAYS[way](made, str(tmp_path))
    for _ in range(2):
        assert torch.equal(placed(x()), wanted)
    if way == "cpu":
        assert placed[0].proj.weight_packed is placed[1].proj.weight_packed


def test_sizes_are_those_of_the_stored_bytes(format):
    made = model(format)
    sizes = compute_module_sizes(made)
    for i, block in enumerate(made):
        stored = block.proj.quantised.nbytes
        bias = 0 if block.proj.bias is None else block.proj.bias.nbytes
        assert sizes[f"{i}.proj"] == stored + bias
        assert sizes[f"{i}.proj.weight_packed"] == block.proj.quantised.packed.nbytes
    made(x())
    assert compute_module_sizes(made) == sizes
    assert compute_module_sizes(empty(format)) == sizes
    # A limit that the two first blocks fill: in float32 they would not fit.
    limit = sizes["0"] + sizes["1"] + 2 * max(sizes["0"], sizes["1"], sizes["2"])
    found = infer_auto_device_map(
        made, max_memory={"cpu": limit}, no_split_module_classes=["Block"]
    )
    assert found == {"": "cpu"}
    assert limit < compute_module_sizes(source())[""]


def test_fused_layers_can_be_offloaded(tmp_path):
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_proj, self.up_proj = nn.Linear(64, 32), nn.Linear(64, 32)

        def forward(self, x):
            return nn.functional.silu(self.gate_proj(x)) * self.up_proj(x)

    torch.manual_seed(0)
    made = quantise_model(Gated(), "int4-g32", backend="reference", progress=False)
    wanted = made(x())
    assert fuse_layers(made) == [("gate_proj", "up_proj")]
    torch.testing.assert_close(made(x()), wanted)
    placed = cpu_offload(made, execution_device=torch.device("cpu"))
    for _ in range(2):
        torch.testing.assert_close(placed(x()), wanted)
    assert placed.gate_proj.weight_packed.is_meta


def mixture(source=None):
    torch.manual_seed(0)
    source = Mixture() if source is None else source
    return quantise_model(source, "kmeans4-g16", backend="reference", progress=False)


@pytest.mark.parametrize("way", ["cpu", "disk"])
def test_offloaded_experts_compute_the_same(way, tmp_path):
    made, given = mixture(), torch.randn(6, 32)
    with torch.no_grad():
        wanted = made(given)
        if way == "cpu":
            cpu_offload(made, execution_device=torch.device("cpu"))
        else:
            disk_offload(made, str(tmp_path), execution_device=torch.device("cpu"))
        projections = made.experts.gate_up_proj, made.experts.down_proj
        for _ in range(2):
            assert all(each.weight_packed.is_meta for each in projections)
            assert torch.equal(made(given), wanted)


@pytest.mark.parametrize("inside", [False, True])
def test_experts_made_empty_are_loaded(inside):
    source = mixture()
    with init_empty_weights():
        made = Mixture()
        if inside:
            made = mixture(made)
    if not inside:
        made = mixture(made)
    assert made.experts.gate_up_proj.weight_packed.is_meta
    for name, tensor in source.state_dict().items():
        set_module_tensor_to_device(made, name, "cpu", value=tensor)
    given = torch.randn(6, 32)
    with torch.no_grad():
        assert torch.equal(made(given), source(given))
