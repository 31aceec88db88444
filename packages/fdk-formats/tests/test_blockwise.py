import dataclasses
import sys

import pytest
import torch

from fdk_formats import backends
from fdk_formats.blockwise import (
    FP4_CODE,
    NF4_CODE,
    TORCH_KERNELS,
    Kernels,
    dequantise_4bit,
    dequantise_blockwise,
    dynamic_map,
    four_bit_code,
    kernels,
    kernels_for,
    quantise_4bit,
    quantise_blockwise,
    register_kernels,
    torch_kernels,
)
from fdk_formats.testing.blockwise import beside_midpoints, check_kernels


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_dynamic_map():
    signed, unsigned = dynamic_map(), dynamic_map(signed=False)
    assert signed.shape == unsigned.shape == (256,)
    assert torch.all(signed[1:] > signed[:-1])
    assert torch.all(unsigned[1:] > unsigned[:-1])
    # The top decade has 64 steps of 0.9 / 64 signed, 128 unsigned; entries are the middles.
    assert signed[[0, 127, 254, 255]].tolist() == pytest.approx([-0.99296875, 0, 0.99296875, 1])
    assert unsigned[[0, 254, 255]].tolist() == pytest.approx([0, 0.996484375, 1])
    assert signed[128].item() == pytest.approx(0.55e-6)


def test_four_bit_code():
    assert four_bit_code("nf4").tolist() == list(NF4_CODE)
    assert [round(12 * value, 6) for value in FP4_CODE[:8]] == [0, 0.0625, 8, 12, 4, 6, 2, 3]
    assert four_bit_code("fp4")[9:].tolist() == (-four_bit_code("fp4")[1:8]).tolist()


def test_quantise_4bit_by_hand():
    # absmax 2: scaled -1, 1, 0, 0.5, 0.33, -0.52; NF4 codes 0, 15, 7, 12, 11, 2.
    x = torch.tensor([-2.0, 2.0, 0.0, 1.0, 0.66, -1.04])
    q = quantise_4bit(x)
    assert q.packed.tolist() == [[0x0F], [0x7C], [0xB2]]
    assert q.absmax.tolist() == [2.0]
    assert dequantise_4bit(q).tolist() == pytest.approx(
        [-2, 2, 0, 2 * 0.44070982933, 2 * 0.3379152417, 2 * -0.5250730515]
    )


def test_quantise_4bit_fp4_by_hand():
    # absmax 12: table entries in twelfths are exact.
    x = torch.tensor([12.0, 8.0, 6.0, 4.0, 3.0, 2.0, 0.0625, -0.0625, -12.0, -3.0])
    q = quantise_4bit(x, kind="fp4")
    assert q.packed.flatten().tolist() == [0x32, 0x54, 0x76, 0x19, 0xBF]
    assert torch.equal(dequantise_4bit(q), x)


def test_quantise_4bit_of_an_odd_count_ends_in_the_code_of_zero():
    assert quantise_4bit(torch.tensor([3.0])).packed.tolist() == [[0xF7]]
    assert quantise_4bit(torch.tensor([3.0]), kind="fp4").packed.tolist() == [[0x30]]


def test_quantise_blockwise_by_hand():
    code = torch.arange(-128, 128) / 128
    q = quantise_blockwise(torch.tensor([4.0, -4.0, 0.0, 1.0]), code, block_size=64)
    assert q.packed.tolist() == [255, 0, 128, 160]
    assert dequantise_blockwise(q).tolist() == [4 * 127 / 128, -4.0, 0.0, 1.0]


def test_a_tie_goes_to_the_lower_entry():
    code = torch.arange(-128, 128) / 128
    middles = torch.arange(-127, 126) / 128 + 1 / 256
    q = quantise_blockwise(torch.cat((torch.ones(1), middles)), code)
    assert torch.equal(q.packed[1:], torch.arange(1, 254, dtype=torch.uint8))


def test_each_block_has_its_own_absmax_and_the_tail_too():
    x = torch.cat((torch.full((64,), 3.0), torch.full((64,), -5.0), torch.full((7,), 0.5)))
    for q in (quantise_4bit(x), quantise_blockwise(x, block_size=64)):
        assert q.absmax.tolist() == [3.0, 5.0, 0.5]


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("size", [64, 100, 4096 + 3])
def test_zeros_come_back_as_zeros(size, nested):
    x = torch.zeros(size)
    # nf4 has code 7 for zero, the dynamic map 127.
    q4, q8 = quantise_4bit(x, nested=nested), quantise_blockwise(x, nested=nested)
    assert set(q4.packed.flatten().tolist()) == {0x77}
    assert set(q8.packed.tolist()) == {127}
    assert not dequantise_4bit(q4).any()
    assert not dequantise_4bit(quantise_4bit(x, kind="fp4", nested=nested)).any()
    assert not dequantise_blockwise(q8).any()


@pytest.mark.parametrize("block_size", [1, 7, 1000, 20_000, 30_000, 1 << 62])
def test_any_block_size_at_8_bits(block_size, monkeypatch):
    x = normal(20_001)
    wanted = quantise_blockwise(x, None, block_size)
    back = dequantise_blockwise(wanted)
    assert (back - x).norm() < 0.02 * x.norm()
    blocks = x.split(min(block_size, len(x)))
    assert torch.equal(wanted.absmax, torch.stack([block.abs().max() for block in blocks]))
    monkeypatch.setattr(torch_kernels, "CHUNK", 1500)
    got = quantise_blockwise(x, None, block_size)
    assert torch.equal(got.packed, wanted.packed)
    assert torch.equal(got.absmax, wanted.absmax)
    assert torch.equal(dequantise_blockwise(got), back)


def test_a_block_of_zeros_among_others():
    x = normal(256)
    x[64:128] = 0
    back = dequantise_4bit(quantise_4bit(x))
    assert not back[64:128].any()
    assert back[:64].any()
    assert back[128:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (5, 7), (2, 3, 129)])
def test_shape_and_dtype_come_back(shape, dtype):
    x = normal(*shape).to(dtype)
    for nested in (False, True):
        q8, q4 = quantise_blockwise(x, nested=nested), quantise_4bit(x, nested=nested)
        assert q8.shape == q4.shape == x.shape
        assert q8.packed.shape == x.shape
        assert q4.packed.shape == ((x.numel() + 1) // 2, 1)
        for back in (dequantise_blockwise(q8), dequantise_4bit(q4)):
            assert back.shape == x.shape
            assert back.dtype == dtype
            assert torch.all(torch.isfinite(back))
        assert dequantise_4bit(q4, torch.float32).dtype == torch.float32
        assert dequantise_blockwise(q8, torch.float16).dtype == torch.float16


def test_error_of_normal_values():
    # A standard normal in blocks of 64: NF4 near 0.0955, 8 bits near 0.0098.
    x = normal(1 << 18)

    def error(back):
        return ((back - x).norm() / x.norm()).item()

    assert 0.090 < error(dequantise_4bit(quantise_4bit(x))) < 0.097
    assert 0.008 < error(dequantise_blockwise(quantise_blockwise(x, block_size=64))) < 0.011
    nested = error(dequantise_4bit(quantise_4bit(x, nested=True)))
    assert nested < 1.01 * error(dequantise_4bit(quantise_4bit(x)))


def test_not_contiguous_is_read_in_row_major_order():
    x = normal(96, 70)
    for view in (x.t(), x[::2, 1:], x[0].expand(5, 70)):
        copy = view.clone(memory_format=torch.contiguous_format)
        assert torch.equal(quantise_4bit(view).packed, quantise_4bit(copy).packed)
        assert torch.equal(quantise_blockwise(view).packed, quantise_blockwise(copy).packed)
    for size in (0, 1):  # torch calls these contiguous with any stride
        view = torch.ones(2 * size)[::2]
        assert torch.equal(dequantise_blockwise(quantise_blockwise(view)), view)


def test_input_is_left_alone_and_needs_no_gradient():
    x = normal(3, 100).requires_grad_()
    before = x.detach().clone()
    back = dequantise_4bit(quantise_4bit(x))
    assert torch.equal(x, before)
    assert not back.requires_grad


def test_results_do_not_depend_on_the_chunk(monkeypatch):
    x = normal(20_001)
    x[64:200] = 0
    wanted = quantise_4bit(x, nested=True), quantise_blockwise(x, block_size=64)
    backs = dequantise_4bit(wanted[0]), dequantise_blockwise(wanted[1])
    monkeypatch.setattr(torch_kernels, "CHUNK", 4096)
    got = quantise_4bit(x, nested=True), quantise_blockwise(x, block_size=64)
    for one, other in zip(wanted, got, strict=True):
        assert torch.equal(one.packed, other.packed)
        assert torch.equal(one.absmax, other.absmax)
    assert torch.equal(dequantise_4bit(got[0]), backs[0])
    assert torch.equal(dequantise_blockwise(got[1]), backs[1])


def test_the_default_device_does_not_matter():
    x = normal(3, 100)
    wanted = [quantise_4bit(x), quantise_4bit(x, kind="fp4"), quantise_blockwise(x, nested=True)]
    for table in (dynamic_map, four_bit_code, torch_kernels._cpu_search):
        table.cache_clear()
    with torch.device("meta"):  # tables are built and cached here
        got = [quantise_4bit(x), quantise_4bit(x, kind="fp4"), quantise_blockwise(x, nested=True)]
        backs = [dequantise_4bit(got[0]), dequantise_4bit(got[1]), dequantise_blockwise(got[2])]
    for one, other in zip(wanted, got, strict=True):
        assert torch.equal(one.packed, other.packed)
        assert torch.equal(one.code, other.code)
    assert torch.equal(dequantise_4bit(wanted[0]), backs[0])
    assert torch.equal(dequantise_4bit(wanted[1]), backs[1])
    assert torch.equal(dequantise_blockwise(wanted[2]), backs[2])


def test_the_shared_tables_cannot_be_changed_through_a_result():
    before = dynamic_map().clone()
    quantise_blockwise(normal(10)).code.zero_()
    quantise_4bit(normal(10)).code.zero_()
    quantise_4bit(normal(10), nested=True).nested.code.zero_()
    assert torch.equal(dynamic_map(), before)
    assert four_bit_code("nf4")[0] == -1


def repeated_code():
    """Returns a table with repeated entries and midpoints that share a search key."""
    spread, close = torch.linspace(-1, 1, 200), 0.5 + torch.arange(46) * 2.0**-12
    return torch.cat((spread, close, torch.zeros(10))).sort().values


@pytest.mark.parametrize(
    ("code", "by_key"),
    [
        (dynamic_map(), True),
        (dynamic_map(signed=False), True),
        (torch.cat((torch.zeros(100), torch.linspace(0, 1, 156))), True),
        (torch.linspace(-3, 2, 256), True),
        (torch.linspace(-1, 1, 256) ** 3 * 1e-4 + 1e-6, False),
        (repeated_code(), False),
    ],
)
def test_search_counts_midpoints(code, by_key):
    order = tuple(range(256))
    search = torch_kernels._cpu_search(tuple(code.tolist()), order)
    assert isinstance(search, torch_kernels._Search) == by_key
    values = torch.cat((beside_midpoints(code), normal(50_000).clamp(-1, 1), torch.zeros(1)))
    wanted = torch.bucketize(values, (code[:-1] + code[1:]) / 2).to(torch.uint8)
    for any_search in (search, torch_kernels._binary_search(code, order)):
        got = torch.empty_like(wanted)
        any_search(values, out=got)
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_binary_search_of_other_devices_gives_the_same_codes(kind):
    code, order = four_bit_code(kind), torch_kernels.ascending_codes(kind)
    values = torch.cat((beside_midpoints(code.sort().values), normal(50_000).clamp(-1, 1)))
    by_key = torch_kernels._cpu_search(tuple(code.tolist()), order)
    assert isinstance(by_key, torch_kernels._Search)
    one, other = (torch.empty_like(values, dtype=torch.uint8) for _ in range(2))
    by_key(values, out=one)
    torch_kernels._binary_search(code, order)(values, out=other)
    assert torch.equal(one, other)


def test_torch_kernels_pass_their_own_check():
    check_kernels(TORCH_KERNELS)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Kernels)])
def test_check_kernels_sees_one_wrong_bit(field):
    right = getattr(TORCH_KERNELS, field)

    def wrong(*arguments):
        result = right(*arguments)
        first = result[0] if isinstance(result, tuple) else result
        if len(first) == 4097:
            first.view(torch.uint8)[-1] ^= 1
        if field == "quantise_4bit" and len(first) == 2049:
            first[-1] ^= 1
        return result

    with pytest.raises(AssertionError, match=rf"{field} n4097-b32-float32"):
        check_kernels(dataclasses.replace(TORCH_KERNELS, **{field: wrong}))


@pytest.mark.parametrize("field", ["quantise_8bit", "quantise_4bit"])
def test_check_kernels_requires_nan_in_the_absmax(field):
    right = getattr(TORCH_KERNELS, field)

    def wrong(*arguments):
        packed, absmax = right(*arguments)
        return packed, absmax.nan_to_num(nan=1.0)

    with pytest.raises(AssertionError, match="must show in the absmax"):
        check_kernels(dataclasses.replace(TORCH_KERNELS, **{field: wrong}))


def test_registered_kernels_are_used():
    calls = []

    def logged(name):
        def call(*arguments):
            calls.append(name)
            return getattr(TORCH_KERNELS, name)(*arguments)

        return call

    names = [field.name for field in dataclasses.fields(Kernels)]
    logging = Kernels(**{name: logged(name) for name in names})
    x = normal(2, 100)
    register_kernels("cpu", logging)
    try:
        assert kernels_for(torch.device("cpu")) is logging
        assert kernels_for(torch.device("cuda")) is TORCH_KERNELS
        dequantise_4bit(quantise_4bit(x, nested=True))
        dequantise_blockwise(quantise_blockwise(x))
    finally:
        register_kernels("cpu", TORCH_KERNELS)
    assert calls == [
        "quantise_4bit",
        "quantise_8bit",
        "dequantise_8bit",
        "dequantise_4bit",
        "quantise_8bit",
        "dequantise_8bit",
    ]


def test_kernels_of_installed_packages_are_found(tmp_path, monkeypatch):
    (tmp_path / "fdk_test_kernels.py").write_text(
        "import dataclasses\n"
        "from fdk_formats.blockwise import TORCH_KERNELS, register_kernels\n"
        "KERNELS = dataclasses.replace(TORCH_KERNELS)\n"
        "register_kernels('cpu', KERNELS, default=True)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(backends, "KNOWN_PACKAGES", ("fdk_test_kernels",))
    monkeypatch.setattr(backends, "ENTRY_POINT_GROUP", "fdk_formats.no_such_group")
    monkeypatch.setattr(kernels, "_REGISTERED", {})
    cpu = torch.device("cpu")
    backends._discover.cache_clear()
    try:
        found = kernels_for(cpu)
    finally:
        backends._discover.cache_clear()
    assert found is sys.modules.pop("fdk_test_kernels").KERNELS
    register_kernels("cpu", TORCH_KERNELS)
    assert kernels_for(cpu) is TORCH_KERNELS
    register_kernels("cpu", found, default=True)
    assert kernels_for(cpu) is TORCH_KERNELS


def test_register_kernels_checks_its_arguments():
    with pytest.raises(TypeError, match="wanted a Kernels, got int"):
        register_kernels("cpu", 3)
    with pytest.raises(RuntimeError, match="nothing"):
        register_kernels("nothing", TORCH_KERNELS)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(("at", "elements"), [(70, "64 to 127"), (131, "128 to 191")])
def test_not_finite(value, at, elements):
    x = normal(140)
    x[at] = value
    for quantise in (quantise_4bit, quantise_blockwise):
        with pytest.raises(ValueError, match=f"{quantise.__name__}: .* elements {elements}"):
            quantise(x, block_size=64)


@pytest.mark.parametrize("block_size", [0, -64, 64.0, True, None])
def test_block_size_is_checked(block_size):
    wanted = f"quantise_blockwise: block_size must be a positive integer, got {block_size}"
    with pytest.raises(ValueError, match=wanted):
        quantise_blockwise(normal(10), block_size=block_size)


@pytest.mark.parametrize("block_size", [0, -64, 16, 96, 8192, 64.0, True, None])
def test_block_size_is_checked_at_4_bits(block_size):
    wanted = f"quantise_4bit: block_size must be one of 32, 64.*, got {block_size}"
    with pytest.raises(ValueError, match=wanted):
        quantise_4bit(normal(10), block_size=block_size)


def test_tensor_type_is_checked():
    for quantise in (quantise_4bit, quantise_blockwise):
        for dtype in (torch.float64, torch.int8, torch.complex64):
            with pytest.raises(TypeError, match=f"float32, float16 or bfloat16, got {dtype}"):
                quantise(torch.zeros(4, dtype=dtype))
        with pytest.raises(TypeError, match="wanted a tensor, got list"):
            quantise([1.0])


def test_tensor_on_meta():
    for quantise in (quantise_4bit, quantise_blockwise):
        message = f"{quantise.__name__}: needs values, got a tensor on meta"
        with pytest.raises(ValueError, match=message):
            quantise(torch.empty(64, device="meta"))


@pytest.mark.parametrize(
    ("code", "error", "match"),
    [
        ([0.0] * 256, TypeError, "floats, got list"),
        (torch.arange(256), TypeError, r"floats, got torch\.int64"),
        (torch.linspace(-1, 1, 255), ValueError, r"\[256\], got \[255\]"),
        (torch.zeros(1, 256), ValueError, r"\[256\], got \[1, 256\]"),
        (torch.full((256,), float("nan")), ValueError, "finite"),
        (torch.linspace(1, -1, 256), ValueError, r"ascending, got 1\.0 before 0\.99.* at 0"),
    ],
)
def test_code_is_checked(code, error, match):
    with pytest.raises(error, match=f"quantise_blockwise: code must be .*{match}"):
        quantise_blockwise(normal(10), code)


def test_kind_is_checked():
    with pytest.raises(ValueError, match="nf4, fp4, got 'int4'"):
        quantise_4bit(normal(10), kind="int4")


def test_dequantise_checks_its_input():
    q8, q4 = quantise_blockwise(normal(10)), quantise_4bit(normal(10))
    with pytest.raises(ValueError, match="dequantise_blockwise: kind must be 8bit, got nf4"):
        dequantise_blockwise(q4)
    with pytest.raises(ValueError, match="dequantise_4bit: kind must be nf4 or fp4, got 8bit"):
        dequantise_4bit(q8)
    with pytest.raises(TypeError, match="wanted a QuantisedBlocks, got Tensor"):
        dequantise_4bit(q4.packed)
    with pytest.raises(TypeError, match=r"bfloat16, got torch\.int32"):
        dequantise_4bit(q4, torch.int32)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"kind": "int4"}, ValueError, "kind must be one of"),
        ({"block_size": 48}, ValueError, "block_size must be one of"),
        ({"dtype": torch.float64}, TypeError, "dtype must be"),
        (
            {"packed": torch.zeros(49, 1, dtype=torch.uint8)},
            ValueError,
            r"\[50, 1\], got \[49, 1\]",
        ),
        ({"packed": torch.zeros(50, 1)}, TypeError, r"packed must be torch\.uint8"),
        ({"absmax": torch.zeros(3)}, ValueError, r"absmax .* must be \[2\], got \[3\]"),
        (
            {"absmax": torch.zeros(2, dtype=torch.uint8)},
            TypeError,
            r"absmax must be torch\.float32",
        ),
        ({"absmax": None}, TypeError, "got NoneType"),
        ({"code": torch.zeros(256)}, ValueError, r"code .* must be \[16\]"),
        ({"code": torch.zeros(16, device="meta")}, ValueError, "must be on cpu, got meta"),
    ],
)
def test_quantised_blocks_checks_its_tensors(change, error, match):
    with pytest.raises(error, match=match):
        dataclasses.replace(quantise_4bit(normal(99)), **change)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"block_size": 0}, "nested: block_size must be a positive integer"),
        ({"absmax": torch.zeros(2)}, r"nested\.absmax .* must be \[1\]"),
        ({"code": torch.zeros(16)}, r"nested\.code .* must be \[256\]"),
        ({"offset": torch.zeros(1)}, r"nested\.offset .* must be \[\]"),
    ],
)
def test_quantised_blocks_checks_nested_tensors(change, match):
    q = quantise_4bit(normal(99), nested=True)
    with pytest.raises(ValueError, match=match):
        dataclasses.replace(q, nested=dataclasses.replace(q.nested, **change))


def test_quantised_blocks_counts_its_bytes():
    x = normal(1000)
    assert quantise_4bit(x).nbytes == 500 + 16 * 4 + 16 * 4
    assert quantise_4bit(x, nested=True).nbytes == 500 + 16 + 16 * 4 + (1 + 256 + 1) * 4
    assert quantise_blockwise(x).nbytes == 1000 + 4 + 1024


def test_quantised_blocks_moves():
    moved = quantise_4bit(normal(99), nested=True).to("meta")
    tensors = (moved.packed, moved.absmax, moved.code, moved.nested.absmax, moved.nested.offset)
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert quantise_blockwise(normal(9)).to("meta").packed.device.type == "meta"
