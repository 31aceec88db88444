"""Quantised experts as a module: quantising, files, copies, moves, training and errors."""

import copy
import io
import logging
from collections import OrderedDict

import pytest
import torch
from mixtures import Experts, Mixture, dequantised
from torch import nn

from fdk_formats import (
    QuantisedExpertLinear,
    QuantisedExperts,
    QuantisedStack,
    calibrate_weights,
    load,
    load_model,
    model_report,
    quantise,
    quantise_model,
    quantise_stack,
    relative_error,
    replace_layers,
    save,
    save_model,
)
from fdk_formats.backends import ExpertLayout
from fdk_formats.compensate import Hessian
from fdk_formats.expert_moments import ExpertMoments, expert_moments
from fdk_formats.experts import ExpertLinear

FORMAT = "kmeans4-g16"


@pytest.fixture(params=[False, True], ids=["mixtral", "gpt-oss"])
def mixture(request):
    return Mixture(transposed=request.param).eval()


def test_a_quantised_model_computes_with_its_dequantised_weights(mixture, backend):
    small = quantise_model(mixture, FORMAT, backend=backend)
    assert isinstance(small.experts, QuantisedExperts)
    x = torch.randn(7, 32)
    torch.testing.assert_close(small(x), dequantised(mixture, small)(x), rtol=1e-5, atol=1e-5)
    assert isinstance(mixture.experts, Experts)  # untouched


def test_in_place_and_as_a_copy_give_the_same(mixture):
    x = torch.randn(7, 32)
    wanted = quantise_model(mixture, FORMAT, backend="reference")(x)
    own = copy.deepcopy(mixture)
    changed = quantise_model(own, FORMAT, backend="reference", inplace=True)
    assert changed is own
    assert torch.equal(own(x), wanted)


def test_experts_alone(mixture):
    experts = mixture.experts
    ids, weights = torch.tensor([[0, 3], [1, 0]]), torch.tensor([[0.25, 0.75], [0.5, 0.5]])
    small = quantise_model(experts, FORMAT, backend="reference")
    assert isinstance(small, QuantisedExperts)
    wanted = dequantised(nn.ModuleDict({"e": experts}), nn.ModuleDict({"e": small}))["e"]
    x = torch.randn(2, 32)
    torch.testing.assert_close(small(x, ids, weights), wanted(x, ids, weights))


def test_each_expert_is_quantised_as_quantise_does(mixture):
    small = quantise_model(mixture, FORMAT, backend="reference")
    weight = mixture.experts.gate_up_proj.detach()
    weight = weight.mT if mixture.experts.is_transposed else weight
    stack = small.experts.gate_up_proj.quantised
    for own, q in zip(weight, stack.matrices(), strict=True):
        for name, tensor in quantise(own, FORMAT).tensors().items():
            assert torch.equal(q.tensors()[name], tensor), name


def test_report_overrides_and_skip(mixture):
    overrides = {r"experts\.down_proj$": "int8-g16"}
    small = quantise_model(mixture, FORMAT, overrides=overrides, backend="reference")
    rows = {row.name: row for row in model_report(small).layers}
    assert list(rows) == ["experts.gate_up_proj", "experts.down_proj", "out_proj"]
    assert rows["experts.gate_up_proj"].shape == (4, 96, 32)
    assert str(rows["experts.down_proj"].format) == "int8-g16"
    stack = small.experts.down_proj.quantised
    weight = mixture.experts.down_proj
    weight = weight.mT if mixture.experts.is_transposed else weight
    assert rows["experts.down_proj"].relative_error == relative_error(weight.detach(), stack)
    both = quantise_model(mixture, FORMAT, skip="experts", backend="reference")
    assert isinstance(both.experts, Experts)


@pytest.mark.parametrize("inplace", [False, True])
def test_one_projection_may_be_skipped(mixture, inplace, tmp_path):
    x = torch.randn(5, 32)
    source = copy.deepcopy(mixture)
    one = quantise_model(source, FORMAT, skip="gate_up", backend="reference", inplace=inplace)
    assert isinstance(one.experts.gate_up_proj, ExpertLinear)
    assert [left.name for left in model_report(one).left][:1] == ["router"]
    torch.testing.assert_close(one(x), dequantised(mixture, one)(x), rtol=1e-5, atol=1e-5)
    save_model(tmp_path / "one.safetensors", one)
    loaded = load_model(tmp_path / "one.safetensors", mixture, "reference")
    assert torch.equal(loaded(x), one(x))
    copied = copy.deepcopy(one)
    source.experts.__dict__["gone"] = True  # the copy does not hold the source
    assert torch.equal(copied(x), one(x))


def test_no_warning_of_experts_any_more(mixture, caplog):
    with caplog.at_level(logging.WARNING):
        quantise_model(mixture, FORMAT, backend="reference")
    assert not caplog.records


def test_files_and_state_dict_bit_for_bit(mixture, tmp_path, backend):
    x = torch.randn(5, 32)
    small = quantise_model(mixture, FORMAT, backend=backend)
    wanted = small(x)  # packed by now
    save_model(tmp_path / "m.safetensors", small)
    stack = load(tmp_path / "m.safetensors")["experts.gate_up_proj.weight"]
    assert isinstance(stack, QuantisedStack)
    for name, tensor in small.experts.gate_up_proj.quantised.tensors().items():
        assert torch.equal(stack.tensors()[name], tensor), name
    loaded = load_model(tmp_path / "m.safetensors", mixture, backend)
    assert torch.equal(loaded(x), wanted)
    state = small.state_dict()
    assert "experts.gate_up_proj.weight_codebook" in state
    is_transposed = mixture.experts.is_transposed
    other = quantise_model(Mixture(transposed=is_transposed), FORMAT, backend=backend)
    other.load_state_dict(state)
    assert torch.equal(other(x), wanted)
    with torch.device("meta"):
        empty = Mixture(transposed=is_transposed)
    plan = quantise_model(empty, FORMAT, backend=backend)
    plan.load_state_dict(state, assign=True)
    assert torch.equal(plan(x), wanted)


def test_files_refuse_what_does_not_fit(mixture, tmp_path):
    small = quantise_model(mixture, FORMAT, backend="reference")
    save_model(tmp_path / "m.safetensors", small)
    other = Mixture(transposed=mixture.experts.is_transposed, experts=3)
    with pytest.raises(ValueError, match=r"experts of weight \[4, 96, 32\], the model has"):
        load_model(tmp_path / "m.safetensors", other)
    stack = quantise_stack(torch.randn(3, 4, 32), FORMAT)
    stack.scale[1, 0, 0] = torch.inf
    with pytest.raises(ValueError, match="scale must be finite"):
        save(tmp_path / "s.safetensors", {"stack": stack})


def test_copies_pickles_and_casts(mixture, backend):
    x = torch.randn(5, 32)
    small = quantise_model(mixture, FORMAT, backend=backend)
    wanted = small(x)
    assert torch.equal(copy.deepcopy(small)(x), wanted)
    stream = io.BytesIO()
    torch.save(small, stream)
    stream.seek(0)
    assert torch.equal(torch.load(stream, weights_only=False)(x), wanted)
    half = copy.deepcopy(small).to(torch.bfloat16)
    assert half(x.bfloat16()).dtype == torch.bfloat16
    assert half.experts.gate_up_proj.weight_codebook.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert small.experts.gate_up_proj(x, torch.zeros(5, 1, dtype=int)).dtype == torch.bfloat16


def test_hooks_and_attributes_stay(mixture):
    seen = []
    mixture.experts.note = "mine"
    mixture.experts.register_forward_hook(lambda *args: seen.append(1))
    small = quantise_model(mixture, FORMAT, backend="reference")
    small(torch.randn(2, 32))
    assert seen == [1]
    assert small.experts.note == "mine"
    assert small.experts.act_fn is not mixture.experts.act_fn


def test_gradients_reach_inputs_router_and_biases(mixture):
    small = quantise_model(mixture, FORMAT, backend="reference")
    plain = dequantised(mixture, small)
    x = torch.randn(6, 32)
    for model in (small, plain):
        model(x).square().sum().backward()
    torch.testing.assert_close(small.router.grad, plain.router.grad, rtol=1e-4, atol=1e-4)
    if mixture.experts.has_bias:
        own, wanted = small.experts.gate_up_proj.bias, plain.experts.gate_up_proj_bias
        torch.testing.assert_close(own.grad, wanted.grad, rtol=1e-4, atol=1e-4)
    assert not small.experts.gate_up_proj.weight_packed.requires_grad


def test_compiled_in_one_graph(mixture, backend):
    small = quantise_model(mixture, FORMAT, backend=backend)
    x = torch.randn(6, 32)
    compiled = torch.compile(small, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), small(x))


class Clamped(Experts):
    """A gate that differs from SwiGLU for large values alone."""

    def _apply_gate(self, gate_up):
        return Experts._apply_gate(self, gate_up.clamp(max=100))


class Normed(Experts):
    """A gate with a weight, which may be on meta."""

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(96)

    def _apply_gate(self, gate_up):
        return Experts._apply_gate(self, self.norm(gate_up))


def mlp_calls(monkeypatch):
    """Records the calls of ``ExpertLayout.mlp``."""
    calls, mlp = [], ExpertLayout.mlp
    monkeypatch.setattr(ExpertLayout, "mlp", lambda *args: calls.append(args) or mlp(*args))
    return calls


def test_swiglu_is_a_call_of_the_layouts(backend, monkeypatch):
    mixture, x = Mixture().eval(), torch.randn(5, 32)
    small, calls = quantise_model(mixture, FORMAT, backend=backend), mlp_calls(monkeypatch)
    fused = small(x)
    assert len(calls) == 1
    small.experts.is_swiglu = False
    assert torch.equal(small(x), fused)
    assert len(calls) == 1


@pytest.mark.parametrize("make", [lambda: Experts(transposed=True), Clamped, Normed])
def test_other_gates_are_computed_by_their_class(make, monkeypatch):
    experts = make()
    small, calls = quantise_model(experts, FORMAT, backend="reference"), mlp_calls(monkeypatch)
    arguments = torch.randn(2, 32) * 100, torch.tensor([[0], [3]]), torch.ones(2, 1)
    wanted = dequantised(nn.ModuleDict({"e": experts}), nn.ModuleDict({"e": small}))["e"]
    torch.testing.assert_close(small(*arguments), wanted(*arguments), rtol=1e-4, atol=1e-3)
    with torch.device("meta"):
        planned = quantise_model(make(), FORMAT, backend="reference")
    assert not calls
    assert not small.is_swiglu
    assert not planned.is_swiglu


def test_experts_of_transformers_before_norms_after_experts():
    experts = Experts()
    del experts.has_post_expert_norm  # transformers 5.17 to 5.19
    small = quantise_model(experts, FORMAT, backend="reference")
    assert isinstance(small, QuantisedExperts)
    arguments = torch.randn(2, 32), torch.tensor([[0], [3]]), torch.ones(2, 1)
    wanted = dequantised(nn.ModuleDict({"e": experts}), nn.ModuleDict({"e": small}))["e"]
    torch.testing.assert_close(small(*arguments), wanted(*arguments), rtol=1e-5, atol=1e-5)


def test_what_is_on_meta_has_swiglu_too():
    with torch.device("meta"):
        assert quantise_model(Experts(), FORMAT, backend="reference").is_swiglu


def test_projections_with_hooks_or_replaced_weights_are_called(monkeypatch):
    mixture, x, seen = Mixture().eval(), torch.randn(5, 32), []
    small, calls = quantise_model(mixture, FORMAT, backend="reference"), mlp_calls(monkeypatch)
    wanted, down = small(x), small.experts.down_proj
    hook = down.register_forward_pre_hook(lambda *args: seen.append(1))
    assert torch.equal(small(x), wanted)
    hook.remove()
    down.weight_scale = nn.Parameter(down.weight_scale * 2, requires_grad=False)
    assert not torch.equal(small(x), wanted)
    assert (len(seen), len(calls)) == (1, 1)
    small(x)  # the new weight is packed by now
    assert len(calls) == 2


def test_assigned_weights_are_quantised():
    layer = QuantisedExpertLinear(
        3, 32, 8, format="int4-g16", dtype=torch.float32, backend="reference"
    )
    weight = torch.randn(3, 8, 32)
    with pytest.warns(UserWarning, match="quantised again to int4-g16"):
        layer.weight = weight
    assert torch.equal(layer.dequantise(), quantise_stack(weight, "int4-g16").dequantise())
    with pytest.raises(TypeError, match=r"wanted a tensor|must be a tensor \[experts, n, k\]"):
        layer.weight = weight[0]


def test_importance_and_codebooks_by_expert(mixture):
    weight = mixture.experts.down_proj.detach()
    weight = weight.mT if mixture.experts.is_transposed else weight
    importance = torch.rand(4, weight.shape[2]) ** 4
    given = {"experts.down_proj": importance}
    small = quantise_model(mixture, FORMAT, importance=given, backend="reference")
    wanted = quantise_stack(weight, FORMAT, importance)
    assert torch.equal(small.experts.down_proj.weight_packed, wanted.packed)
    tables = {"experts.down_proj": torch.randn(4, 16).sort().values}
    small = quantise_model(mixture, FORMAT, codebook=tables, backend="reference")
    assert torch.equal(small.experts.down_proj.weight_codebook, tables["experts.down_proj"])


def test_codebooks_of_a_stack():
    weight = torch.randn(3, 8, 32)
    assert quantise_stack(weight, "nf4-g16").codebook.shape == (1, 16)
    assert quantise_stack(weight, FORMAT).codebook.shape == (3, 16)
    shared = quantise_stack(weight, FORMAT, shared_codebook=True)
    assert shared.codebook.shape == (1, 16)
    whole = quantise(weight.view(24, 32), FORMAT)
    assert torch.equal(shared.codebook[0], whole.codebook)
    assert torch.equal(shared.packed.view(24, -1), whole.packed)
    assert quantise_stack(weight, "affine4-g16-zint").zero_point.shape == (3, 8, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.randn(8, 32), FORMAT), r"weight must be \[experts, n, k\], got \[8, 32\]"),
        ((torch.randn(3, 8, 32), FORMAT, torch.rand(8, 32)), r"importance must be \[32\], \[3, 32"),
    ],
)
def test_quantise_stack_checks_its_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        quantise_stack(*arguments)


def test_stacks_of_tensors():
    made = [quantise(torch.randn(4, 32), "int4-g16") for _ in range(2)]
    stack = QuantisedStack.of(made)
    assert len(stack) == 2
    assert torch.equal(stack[-1].packed, made[1].packed)
    assert stack[0].packed.data_ptr() == stack.packed.data_ptr()
    with pytest.raises(IndexError, match="wanted an expert of 2, got 2"):
        stack[2]
    with pytest.raises(ValueError, match="one format, shape and device, got int4-g16"):
        QuantisedStack.of([made[0], quantise(torch.randn(5, 32), "int4-g16")])
    with pytest.raises(ValueError, match=r"codebook of a .* must be \[1, 16\] or \[2, 16\]"):
        QuantisedStack(stack.format, stack.shape, stack.packed, stack.scale, torch.zeros(16))


@pytest.mark.parametrize("format", ["nf4-g16", FORMAT, "affine4-g16", "kmeans4-g16-hadamard"])
def test_parts_of_a_stack_compute_parts_of_the_sum(format):
    """Expert parallelism: ids of experts elsewhere are -1, and the sums of all parts add up."""
    stack = quantise_stack(torch.randn(6, 8, 32), format)
    x, weights = torch.randn(5, 32), torch.rand(5, 2)
    ids = torch.rand(5, 6).topk(2).indices

    def product(part, own_ids):
        settings = {"backend": "reference", "dtype": torch.float32}
        return QuantisedExpertLinear.from_quantised(part, **settings)(x, own_ids, weights)

    total = 0
    for start, stop in ((0, 2), (2, 5), (5, 6)):
        part = stack.experts(start, stop)
        assert part.packed.data_ptr() == stack.packed[start].data_ptr()
        here = (ids >= start) & (ids < stop)
        total = total + product(part, (ids - start).where(here, -1))
    torch.testing.assert_close(total, product(stack, ids))
    with pytest.raises(IndexError, match="experts of 6, got 5 to 7"):
        stack.experts(5, 7)


@pytest.mark.parametrize("says_so", [True, False], ids=["parallel", "transformers-5.17"])
def test_experts_of_other_processes_add_nothing(says_so, backend):
    """transformers gives them the id ``num_experts``; 5.17 does not say whether there are any."""
    experts = quantise_model(Mixture(), FORMAT, backend=backend).experts
    x, ids, weights = torch.randn(5, 32), torch.randint(4, (5, 2)), torch.rand(5, 2)
    away = torch.rand(5, 2) < 0.5
    wanted = experts(x, ids, weights.masked_fill(away, 0))
    if says_so:
        experts._is_expert_parallel = True
    else:
        del experts._is_expert_parallel
    torch.testing.assert_close(experts(x, ids.masked_fill(away, 4), weights), wanted)


def test_overrides_name_the_projections(mixture):
    with pytest.raises(ValueError, match=r"fits no .*experts\.gate_up_proj"):
        quantise_model(mixture, FORMAT, overrides={"nothing": None})


def test_experts_in_a_sequence_keep_their_names():
    model = nn.Sequential(OrderedDict(a=Experts(), b=Experts()))
    small = quantise_model(model, FORMAT, backend="reference")
    names = [row.name for row in model_report(small).layers]
    assert names == [f"{e}.{p}" for e in "ab" for p in ("gate_up_proj", "down_proj")]


def test_moments_of_what_experts_receive(mixture):
    """By hand: the mean of x x^T over the tokens of each expert, and of what down_proj gets."""
    model, x = mixture, torch.randn(20, 32)
    ids = (x @ model.router.T).softmax(-1).topk(2).indices
    owner = model.experts
    first, second = (ExpertLinear(owner, name) for name in ("gate_up_proj", "down_proj"))
    with expert_moments([first, second]) as moments, torch.no_grad():
        model(x)
    middle = owner._apply_gate(first(x, ids))
    for expert in range(4):
        tokens, places = (ids == expert).nonzero(as_tuple=True)
        for own, rows in zip(moments, (x[tokens], middle[tokens, places]), strict=True):
            wanted = rows.T @ rows
            torch.testing.assert_close(own.total[expert], wanted, rtol=1e-4, atol=1e-4)
            assert own.count[expert] == len(tokens)


def test_experts_without_tokens_get_the_moments_of_all():
    moments = ExpertMoments(ExpertLinear(Experts(), "gate_up_proj"))
    assert moments.hessians() is None
    x = torch.randn(2, 2, 32)
    moments.add(x, torch.tensor([[0, 1], [1, 0]]))
    rows = x.view(-1, 32)
    found, pooled = moments.hessians(), Hessian(rows.T @ rows / 4)
    torch.testing.assert_close(found[2].matrix, pooled.matrix)
    torch.testing.assert_close(found[0].matrix, Hessian(rows[[0, 3]].T @ rows[[0, 3]] / 2).matrix)


def test_calibration_compensates_errors_of_experts(mixture):
    """Each expert is what quantise gives with its own moments, and outputs change less."""
    x = torch.randn(200, 32) @ torch.randn(32, 32)  # inputs that depend on each other
    settings = {"epochs": 0, "progress": False, "backend": "reference"}
    calibrated = quantise_model(mixture, "kmeans2-g16", calibration=[(x,)], **settings)
    source = ExpertLinear(mixture.experts, "gate_up_proj")
    with expert_moments([source]) as (moments,), torch.no_grad():
        mixture(x)
    stack, hessians = calibrated.experts.gate_up_proj.quantised, moments.hessians()
    for own, weight, hessian in zip(stack.matrices(), source.stack(), hessians, strict=True):
        wanted = quantise(weight, "kmeans2-g16", hessian=hessian)
        assert torch.equal(own.packed, wanted.packed)
        assert torch.equal(own.scale, wanted.scale)
    plain = quantise_stack(source.stack(), "kmeans2-g16")
    weight = source.stack().detach()
    assert moments.output_error(weight, stack) < 0.7 * moments.output_error(weight, plain)
    error = relative_error(weight, stack)
    assert calibrated.experts.gate_up_proj.relative_error == error


def test_output_error_of_a_stack(mixture):
    """By hand, from the outputs of all pairs of tokens and experts."""
    x, source = torch.randn(50, 32), ExpertLinear(mixture.experts, "gate_up_proj")
    q = quantise_stack(source.stack().detach(), "int2-g16")
    ids = torch.rand(50, 4).topk(2).indices
    moments = ExpertMoments(source)
    moments.add(x[:, None].expand(-1, 2, -1), ids)
    W, W_hat = source.stack().detach()[ids], q.dequantise()[ids]  # [t, top_k, n, k]
    y, y_hat = (torch.einsum("tjnk,tk->tjn", each, x) for each in (W, W_hat))
    wanted = (y - y_hat).square().sum().sqrt() / y.square().sum().sqrt()
    assert moments.output_error(source.stack().detach(), q) == pytest.approx(
        float(wanted), rel=1e-4
    )


def test_calibrated_experts_replace_those_of_a_model(mixture):
    names = [f"experts.{name}" for name in ("gate_up_proj", "down_proj")]
    model, x = copy.deepcopy(mixture), torch.randn(40, 32)
    found = calibrate_weights(model, dict.fromkeys(names, "int3-g16"), [(x,)], progress=False)
    expected = model(x)  # its weights are the values of the quantised ones
    replace_layers(model, {n: each.quantised for n, each in found.items()}, backend="reference")
    assert type(model.experts).__name__ == "QuantisedExperts"
    torch.testing.assert_close(model(x), expected)
    with pytest.raises(AttributeError, match=r"no layer 'experts\.other'"):
        replace_layers(model, {"experts.other": found[names[0]].quantised})
