"""The kernels with int8 activations on every instruction set, against the reference."""

import pytest
import torch

import fdk_cpu
from fdk_cpu.linear import lut_linear_int8_op
from fdk_formats import Format, QuantisedLinear, quantise
from fdk_formats.int8 import int8_linear
from fdk_formats.testing import Case, cases, nrmse, poisoned, random_quantised

BACKEND = fdk_cpu.CpuBackend()
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Every third case, such that each group size still occurs with each dtype.
CASES = [
    case
    for i, case in enumerate(
        cases(
            group_sizes=(16, 32, 64, 128, 48, 200, None),
            dtypes=DTYPES,
            ms=(7,),  # test_kit runs the last row alone, too
        )
    )
    if i % 3 == i // 3 % 3
]
# Several blocks of stripes; more rows of x than one pass handles.
LARGE = [
    Case(Format("custom", 8, 64), m=17, n=203, k=4096, dtype=torch.bfloat16),
    Case(Format("custom", 4, 64), m=1030, n=9, k=128, dtype=torch.float32),
]
# Half a unit in the last place, except for float32, where the sums themselves round.
MAX_ERROR = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-20}


@pytest.mark.parametrize("case", CASES + LARGE, ids=str)
def test_kit(isa: str, case: Case) -> None:
    q = case.quantised()
    layout = BACKEND.pack(q, dtype=case.dtype, activations="int8")
    x, bias = case.random(case.m, case.k), case.random(case.n)
    with poisoned():
        y = layout(x, bias)
        assert torch.equal(layout(x, bias), y)
        # A single row may use another kernel; its result meets the same bound.
        alone = layout(x[-1:], bias)
    expected = int8_linear(x.float(), q, bias.float())
    assert y.dtype == case.dtype
    assert nrmse(y, expected.double()) <= MAX_ERROR[case.dtype]
    assert nrmse(alone, expected[-1:].double()) <= MAX_ERROR[case.dtype]
    unpacked = layout.unpack()
    for name, tensor in q.tensors().items():
        assert torch.equal(unpacked.tensors()[name], tensor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_codes_of_x(isa: str, dtype: torch.dtype) -> None:
    # Half the largest magnitude lies midway between two codes, and bf16 values often hit it.
    q = random_quantised(Format.parse("affine8-g64"), 3, 128)
    layout = BACKEND.pack(q, dtype=torch.float32, activations="int8")
    x = torch.randn(2000, 128, generator=torch.Generator().manual_seed(0)).to(dtype).float()
    size = x.norm(dim=1, keepdim=True) * q.dequantise().norm(dim=1) + 1e-9
    error = (layout(x) - int8_linear(x, q)).abs() / size
    assert error.max() < 1e-5  # an x code off by one gives 5e-4


@pytest.mark.parametrize("format", ["custom4-g64", "affine8-g16", "custom1-g128", "affine3-g200"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_not_finite(isa: str, format: str, bad: float) -> None:
    q = random_quantised(Format.parse(format), 21, 400 if "200" in format else 384)
    layout = BACKEND.pack(q, dtype=torch.bfloat16, activations="int8")
    x = torch.randn(3, q.shape[1], generator=torch.Generator().manual_seed(0)).bfloat16()
    y = layout(x)
    x[1, 130] = bad
    rows = layout(x)
    assert rows[1].isnan().all()
    assert torch.equal(rows[[0, 2]], y[[0, 2]])
    q.scale[0, 0] = float("nan")
    columns = BACKEND.pack(q, dtype=torch.bfloat16, activations="int8")(x[:1])
    assert columns[0, 0].isnan()
    assert torch.equal(columns[0, 1:], y[0, 1:])


@pytest.mark.parametrize("bits", range(1, 9))
def test_extremes(isa: str, bits: int) -> None:
    # The largest codes times the largest levels must not saturate an integer sum.
    k = 256
    for format in (Format("int", bits, 64), Format("affine", bits, 64, zero_point="int")):
        q = quantise(torch.ones(8, k) * torch.tensor([1.0, -1.0]).repeat(4)[:, None], format)
        layout = BACKEND.pack(q, dtype=torch.float32, activations="int8")
        x = torch.stack(
            [
                torch.ones(k),
                -torch.ones(k),
                torch.ones(k) * torch.tensor([1.0, -1.0]).repeat(k // 2),
                torch.zeros(k),
                torch.full((k,), 2.0**-125),
                torch.full((k,), 1e35),
                torch.eye(1, k)[0] * 1e4,
            ]
        )
        for rows in (x, *x[:, None]):
            expected = int8_linear(rows, q)
            torch.testing.assert_close(layout(rows), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("m", [1, 9])
def test_result_does_not_depend_on_threads(isa: str, m: int) -> None:
    case = Case(Format("custom", 4, 64), m=m, n=1031, k=384, dtype=torch.bfloat16)
    layout = BACKEND.pack(case.quantised(), dtype=case.dtype, activations="int8")
    x = case.random(m, case.k)
    expected = layout(x)
    fdk_cpu.set_num_threads(5)
    try:
        assert torch.equal(layout(x), expected)
    finally:
        fdk_cpu.set_num_threads(None)


def test_layer() -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(96, 40).to(torch.bfloat16)
    layer = QuantisedLinear.from_linear(linear, "nf4-g32", activations="int8")
    assert layer.backend_name == "cpu"
    x = torch.randn(5, 96, dtype=torch.bfloat16, requires_grad=True)
    y = layer(x)
    expected = int8_linear(x.detach().float(), layer.quantised, linear.bias.float())
    assert nrmse(y.detach(), expected.detach().double()) < MAX_ERROR[torch.bfloat16]
    y.sum().backward()
    float_layer = QuantisedLinear.from_linear(linear, "nf4-g32")
    leaf = x.detach().clone().requires_grad_()
    float_layer(leaf).sum().backward()
    assert x.grad is not None
    assert leaf.grad is not None
    assert torch.equal(x.grad, leaf.grad)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), layer(x))


@pytest.mark.parametrize("format", [Format("custom", 3, 16), Format("affine", 4, 64)])
def test_opcheck(format: Format) -> None:
    layout = BACKEND.pack(
        random_quantised(format, 24, 192), dtype=torch.float32, activations="int8"
    )
    x = torch.randn(3, 192, requires_grad=True)
    bias = torch.randn(24, requires_grad=True)
    tensors = (layout.codes, layout.scale, layout.codebook, layout.zero_point)
    sizes = (layout.group_size, format.bits, False)
    table = (layout.levels, layout.step, layout.offset)
    torch.library.opcheck(lut_linear_int8_op.op, (x, *tensors, *sizes, *table, bias, 24, 192))


def test_op_rejects() -> None:
    layout = BACKEND.pack(
        random_quantised(Format("nf", 4), 24, 128), dtype=torch.float32, activations="int8"
    )
    args = (torch.randn(3, 128), layout.codes, layout.scale, layout.codebook, None, 64, 4)
    for levels, message in (
        (layout.levels[:8], "levels must be 16 bytes, got 8"),
        (layout.levels.int(), "levels must be torch.int8, got torch.int32"),
        (None, "levels must be 16 bytes, got 0"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            lut_linear_int8_op(*args, False, levels, 1.0, 0.0, None, 24, 128)
