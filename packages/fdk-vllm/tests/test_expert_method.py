"""The method of vLLM's experts, over a stand-in of vLLM's module of them."""

import types

import pytest
import torch
from torch import nn

from fdk_formats import Format, quantise_stack

pytest.importorskip("vllm", reason="needs vLLM: nox -s test-vllm")

EXPERTS, HIDDEN, INNER = 4, 64, 64


class Experts(nn.Module):
    """Attributes of ``RoutedExperts`` that the method reads."""

    def __init__(self, activation="silu", **changes):
        super().__init__()
        self.activation = types.SimpleNamespace(value=activation)
        self.swiglu_limit = self.swiglu_alpha = self.swiglu_beta = self.expert_map = None
        self.apply_router_weight_on_input, self.top_k = False, 2
        self.global_num_experts, self.others = EXPERTS, []
        for name, value in changes.items():
            setattr(self, name, value)

    def load_weights(self, weights):
        for name, tensor in weights:
            self.others.append(name)
            self.get_parameter(name).data.copy_(tensor)
            yield name


def made(format="int4-g32"):
    stacks = {
        "w13": quantise_stack(torch.randn(EXPERTS, 2 * INNER, HIDDEN) / 8, format),
        "w2": quantise_stack(torch.randn(EXPERTS, HIDDEN, INNER) / 8, format),
    }
    return stacks


def plan_of(stacks):
    from fdk_vllm.expert_weights import ExpertPlan, ExpertSource

    return ExpertPlan(
        {
            name: ExpertSource(q.format, {f: t.dtype for f, t in q.tensors().items()}, q.shape)
            for name, q in stacks.items()
        }
    )


@pytest.fixture
def method(monkeypatch):
    """Makes the method of a layer, with its parameters."""
    from fdk_vllm import expert_method

    versions = expert_method.vllm_versions
    monkeypatch.setattr(versions, "is_dummy_load", lambda: False)
    monkeypatch.setattr(versions, "adapters_reach_experts", lambda: False)

    def make(layer, plan, rank=0, ranks=1, has_bias=False):
        moe = types.SimpleNamespace(tp_rank=rank, tp_size=ranks, has_bias=has_bias)
        made = expert_method.FdkExpertMethod(plan, "layer", moe)
        local = EXPERTS if layer.expert_map is None else int((layer.expert_map >= 0).sum())
        sizes = local, HIDDEN, INNER // ranks, torch.float32
        made.create_weights(layer, *sizes, weight_loader=None)
        return made

    return make


def load(layer, stacks, **others):
    names = {
        f"routed_experts.{projection}_{field}": tensor
        for projection, stack in stacks.items()
        for field, tensor in stack.tensors().items()
    }
    return set(layer.load_weights((names | others).items()))


def exact(stacks, x, ids, weights, bias=0, down_bias=0):
    first, down = (stack.dequantise()[ids] for stack in stacks.values())
    gate, up = (torch.einsum("tk,tjnk->tjn", x, first) + bias).chunk(2, -1)
    y = torch.einsum("tjk,tjnk->tjn", nn.functional.silu(gate) * up, down) + down_bias
    return (y * weights[..., None]).sum(1)


def test_weights_and_biases(method):
    stacks, layer = made(), Experts()
    own = method(layer, plan_of(stacks), has_bias=True)
    biases = torch.randn(EXPERTS, 2 * INNER), torch.randn(EXPERTS, HIDDEN)
    loaded = load(layer, stacks, w13_bias=biases[0], w2_bias=biases[1])
    assert loaded == {name for name, _ in layer.named_parameters()}
    assert layer.others == ["w13_bias", "w2_bias"]
    own.process_weights_after_loading(layer)
    x, ids, weights = (
        torch.randn(3, HIDDEN),
        torch.tensor([[0, 3], [2, 1], [3, 0]]),
        torch.rand(3, 2),
    )
    wanted = exact(stacks, x, ids, weights, *(bias[ids] for bias in biases))
    torch.testing.assert_close(own.apply(layer, x, weights, ids), wanted, rtol=1e-4, atol=1e-4)


def test_processes_add_up_with_one_bias(method):
    stacks, total = made(), 0
    biases = torch.randn(EXPERTS, 2 * INNER), torch.randn(EXPERTS, HIDDEN)
    x, ids, weights = (
        torch.randn(3, HIDDEN),
        torch.tensor([[0, 3], [2, 1], [3, 0]]),
        torch.rand(3, 2),
    )
    for rank in range(2):
        layer = Experts()
        own = method(layer, plan_of(stacks), rank, 2, has_bias=True)
        part = biases[0].view(EXPERTS, 2, 2, -1)[:, :, rank].reshape(EXPERTS, -1)
        load(layer, stacks, w13_bias=part, w2_bias=biases[1])
        own.process_weights_after_loading(layer)
        total = total + own.apply(layer, x, weights, ids)
    wanted = exact(stacks, x, ids, weights, *(bias[ids] for bias in biases))
    torch.testing.assert_close(total, wanted, rtol=1e-4, atol=1e-4)


def test_experts_of_a_process_in_its_own_order(method):
    stacks, layer = made("kmeans4-g32"), Experts(expert_map=torch.tensor([1, -1, -1, 0]))
    own = method(layer, plan_of(stacks))
    load(layer, stacks)
    assert own.weights.part.experts == (3, 0)
    x, ids, weights = torch.randn(2, HIDDEN), torch.tensor([[0, 1], [2, 3]]), torch.rand(2, 2)
    here = weights * (layer.expert_map[ids] >= 0)
    wanted = exact(stacks, x, ids, here)
    torch.testing.assert_close(own.apply(layer, x, weights, ids), wanted, rtol=1e-4, atol=1e-4)


def test_routing_weights_on_inputs(method):
    stacks, layer = made(), Experts(apply_router_weight_on_input=True, top_k=1)
    own = method(layer, plan_of(stacks))
    load(layer, stacks)
    x, ids, weights = torch.randn(2, HIDDEN), torch.tensor([[0], [2]]), torch.rand(2, 1)
    wanted = exact(stacks, x * weights, ids, torch.ones(2, 1))
    torch.testing.assert_close(own.apply(layer, x, weights, ids), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "ranks", "message"),
    [
        ({"activation": "situ"}, 1, "fdk computes experts with silu, .* got situ"),
        ({"apply_router_weight_on_input": True}, 1, "of one expert for each token, got 2"),
        (
            {},
            4,
            r"int4-g32 of k=64 cannot be cut into 4 .*--enable-expert-parallel.* int4-g16 fits",
        ),
    ],
)
def test_refusals(changes, ranks, message, method):
    with pytest.raises(ValueError, match=f"layer: .*{message}"):
        method(Experts(**changes), plan_of(made()), ranks=ranks)


def test_adapters_of_experts_are_refused(method, monkeypatch):
    from fdk_vllm import vllm_versions

    monkeypatch.setattr(vllm_versions, "adapters_reach_experts", lambda: True)
    with pytest.raises(ValueError, match=r"layer: adapters .* --lora-target-modules q_proj"):
        method(Experts(), plan_of(made()))


def test_interleaved_gates_are_not_quantised_while_loading(method):
    from fdk_vllm.expert_weights import ExpertPlan, ExpertSource

    source = ExpertSource(Format.parse("int4-g32"), {"weight": torch.bfloat16})
    plan = ExpertPlan({"w1": source, "w3": source, "w2": source})
    with pytest.raises(ValueError, match="layer: experts with interleaved gates are not quantised"):
        method(Experts("swigluoai"), plan)
