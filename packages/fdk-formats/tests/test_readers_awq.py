"""AWQ tensors against a packer written from the layout."""

import json

import pytest
import torch
from reader_oracles import awq_dequantise, import_alone
from safetensors.torch import save_file

from fdk_formats.format import Format
from fdk_formats.readers import load_awq, read_awq

ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def pack_columns(codes):
    """Packs ``[r, n]`` to ``[r, n/8, int32]``: nibble j of a word is output ORDER[j]."""
    rows = []
    for row in codes.tolist():
        words = [
            sum(row[at + output] << 4 * nibble for nibble, output in enumerate(ORDER))
            for at in range(0, len(row), 8)
        ]
        rows.append([word - (1 << 32) if word >> 31 else word for word in words])
    return torch.tensor(rows, dtype=torch.int32)


def make(k=96, n=24, group=32, dtype=torch.float16):
    torch.manual_seed(0)
    codes, zeros = torch.randint(16, (k, n)), torch.randint(16, (k // group, n))
    scales = (torch.rand(k // group, n) + 0.1).to(dtype)
    tensors = {"qweight": pack_columns(codes), "qzeros": pack_columns(zeros), "scales": scales}
    return codes, zeros, tensors


def dequantise(codes, zeros, scales, group):
    groups = torch.arange(len(codes)) // group
    return ((codes - zeros[groups]).to(scales.dtype) * scales[groups]).T


@pytest.mark.parametrize("group", [16, 32, 96])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_read(group, dtype):
    codes, zeros, tensors = make(group=group, dtype=dtype)
    weight = read_awq(**tensors)
    suffix = "-fp16" if dtype == torch.float16 else ""
    assert weight.format == Format.parse(f"affine4-g{group}{suffix}-zint")
    assert torch.equal(weight.codes().long(), codes.T)
    scales = tensors["scales"]
    assert torch.equal(weight.dequantise(dtype), dequantise(codes, zeros, scales, group))
    assert torch.equal(weight.dequantise(), dequantise(codes, zeros, scales.float(), group))


def test_read_by_hand():
    weight = read_awq(
        torch.full((16, 1), 0x75316420, dtype=torch.int32),
        torch.full((1, 1), 0x11111111, dtype=torch.int32),
        torch.full((1, 8), 2.0, dtype=torch.float16),
    )
    assert weight.dequantise()[:, 0].tolist() == [-2, 0, 2, 4, 6, 8, 10, 12]


def save_folder(folder, config):
    codes, zeros, tensors = make()
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    saved = {f"q.{name}": tensor for name, tensor in tensors.items()}
    save_file(saved | {"q.bias": torch.ones(24)}, folder / "model.safetensors")
    return dequantise(codes, zeros, tensors["scales"], 32)


@pytest.mark.parametrize("config", [{}, {"bits": 4, "version": "gemm"}, {"w_bit": 4}])
def test_load_folder(tmp_path, config):
    wanted = save_folder(tmp_path, config)
    loaded = load_awq(tmp_path)
    assert loaded.keys() == {"q.weight", "q.bias"}
    assert torch.equal(loaded["q.weight"].dequantise(torch.float16), wanted)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"bits": 3}, "got 'awq', 3 bits and version gemm"),
        ({"version": "marlin"}, "version gemm, gemv, gemv_fast, got 'awq', 4 bits and version mar"),
        ({"quant_method": "gptq"}, "must be quant_method awq, 4 bits .*, got 'gptq'"),
        ({"zero_point": False}, "must have zero_point true, got false"),
        ({"group_size": 64}, "q: AWQ: group_size is 64, the tensors have 32"),
        ({"q_group_size": -1}, "q: AWQ: group_size is -1, the tensors have 32"),
        ({"group_size": "32"}, "q: AWQ: group_size must be 1 or more, or -1 for k, got '32'"),
        ({"version": "gemv"}, "q: AWQ: version gemv pads its groups and needs group_size"),
        ({"version": "gemv", "group_size": 32}, r"group_size must divide k=24, got 32, for n=96"),
        ({"version": "gemv_fast", "group_size": 32}, r"qweight must be torch\.int16"),
    ],
)
def test_other_configurations(tmp_path, config, message):
    save_folder(tmp_path, config)
    with pytest.raises(ValueError, match=message):
        load_awq(tmp_path)


# Against AutoAWQ


def quantised(n, k, group, dtype=torch.float16):
    """Returns a linear layer, scales and zeros ``[n, k/G]`` for AutoAWQ's packers."""
    torch.manual_seed(0)
    size = k if group == -1 else group
    linear = torch.nn.Linear(k, n, bias=False, dtype=torch.float32)
    scales = (torch.rand(n, k // size) * 0.01 + 0.005).to(dtype)
    zeros = torch.randint(16, (n, k // size))
    # The packers do not clamp: codes must be in range already.
    codes = torch.randint(16, (n, k))
    wide = [t.repeat_interleave(size, 1).float() for t in (scales, zeros)]
    linear.weight.data = (codes - wide[1]) * wide[0]
    return linear, codes, scales, zeros


def test_equals_autoawq():
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        _, _, tensors = make(dtype=dtype)
        assert torch.equal(read_awq(**tensors).dequantise(dtype), awq_dequantise(tensors))


@pytest.mark.parametrize(("version", "layer"), [("gemv", "GEMV"), ("gemv_fast", "GEMVFast")])
@pytest.mark.parametrize("group", [32, 64, 128, -1])
def test_other_versions_equal_gemm(tmp_path, version, layer, group):
    """AutoAWQ packs the same weight for three kernels; the result is the same."""
    n, k = 16, 384
    linear, codes, scales, zeros = quantised(n, k, group)
    module = import_alone(f"awq.modules.linear.{version}")
    packer = getattr(module, f"WQLinear_{layer}")
    size = k if group == -1 else group  # the packers do not know -1
    packed = packer.from_linear(linear, 4, size, scales=scales, zeros=zeros)
    tensors = {name: getattr(packed, name) for name in ("qweight", "qzeros", "scales")}
    weight = read_awq(**tensors, version=version, group_size=group)
    gemm = {
        "qweight": pack_columns(codes.T),
        "qzeros": pack_columns(zeros.T),
        "scales": scales.T.contiguous(),
    }
    assert torch.equal(weight.dequantise(torch.float16), awq_dequantise(gemm))
    wanted = read_awq(**gemm)
    assert weight.format == wanted.format
    for name, tensor in wanted.tensors().items():
        assert torch.equal(getattr(weight, name), tensor)
    save_file({f"q.{name}": t for name, t in tensors.items()}, tmp_path / "model.safetensors")
    config = {"w_bit": 4, "version": version.upper(), "q_group_size": group, "zero_point": True}
    (tmp_path / "quant_config.json").write_text(json.dumps(config))
    assert torch.equal(load_awq(tmp_path)["q.weight"].packed, wanted.packed)


def gemv_fast():
    linear, _, scales, zeros = quantised(16, 384, 128)
    packer = import_alone("awq.modules.linear.gemv_fast").WQLinear_GEMVFast
    packed = packer.from_linear(linear, 4, 128, scales=scales, zeros=zeros)
    return {name: getattr(packed, name) for name in ("qweight", "qzeros", "scales")}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"group_size": None}, "version gemv_fast pads its groups and needs group_size, got None"),
        ({"group_size": 100}, "group_size must divide k=384, got 100"),
        ({"group_size": 96}, "group_size must be 32, 64 or from 128 on, got 96"),
        ({"group_size": 0}, "group_size must be 1 or more, or -1 for k, got 0"),
        ({"group_size": 64}, r"scales must be \[16, 16\], got \[8, 16\]"),
        ({"qweight": torch.zeros(4, 100).short()}, "a multiple of 64 columns, got 100"),
        ({"qweight": torch.zeros(0, 384).short()}, "must divide k=384, got 128, for n=0 outputs"),
        ({"qweight": torch.zeros(4, 384)}, r"qweight must be torch\.int16, got torch\.float32"),
        ({"qzeros": torch.ones(8, 16).half()}, "zero of 0 to 15, got 48 that are not"),
        ({"qzeros": torch.ones(8, 16)}, r"qzeros must be torch\.float16, got torch\.float32"),
        ({"version": "exllama"}, "version must be gemm, gemv, gemv_fast, got 'exllama'"),
    ],
)
def test_bad_gemv_fast(change, message):
    arguments = {**gemv_fast(), "version": "gemv_fast", "group_size": 128}
    with pytest.raises((TypeError, ValueError), match=message):
        read_awq(**arguments | change)


def test_gemv_fast_without_a_scale():
    tensors = gemv_fast()
    for name in ("scales", "qzeros"):
        tensors[name][0] = 0
    weight = read_awq(**tensors, version="gemv_fast", group_size=128)
    assert (weight.dequantise()[:, :128] == 0).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scales": torch.ones(3, 20)}, r"scales must be \[k/G, a multiple of 8\], got \[3, 20\]"),
        ({"scales": torch.ones(5, 24)}, r"qzeros must be \[5, 3\], got \[3, 3\]"),
        ({"scales": torch.full((3, 24), torch.nan)}, "AWQ: scale must be finite, got 72"),
        ({"qweight": torch.zeros(96, 3)}, r"qweight must be torch\.int32, got torch\.float32"),
        ({"qweight": torch.zeros(95, 3).int()}, "qweight has k=95 rows, which 3 groups do not"),
    ],
)
def test_bad_tensors(change, message):
    _, _, tensors = make()
    with pytest.raises((TypeError, ValueError), match=message):
        read_awq(**tensors | change)
