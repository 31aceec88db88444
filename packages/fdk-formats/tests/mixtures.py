"""A small mixture of experts, described as ``use_experts_implementation`` of transformers does."""

import torch
from torch import nn


class Experts(nn.Module):
    """Experts as those of Mixtral, or (``transposed``) as those of gpt-oss."""

    def __init__(self, experts=4, k=32, n=48, *, transposed=False):
        super().__init__()
        self.num_experts = experts
        self.has_gate, self.has_bias, self.has_post_expert_norm = True, transposed, False
        self.is_transposed, self.is_concatenated = transposed, not transposed
        self._is_expert_parallel = False
        up, down = (experts, 2 * n, k), (experts, k, n)
        shapes = [(e, b, a) if transposed else (e, a, b) for e, a, b in (up, down)]
        self.gate_up_proj = nn.Parameter(torch.randn(shapes[0]) / k**0.5)
        self.down_proj = nn.Parameter(torch.randn(shapes[1]) / n**0.5)
        if transposed:
            self.gate_up_proj_bias = nn.Parameter(torch.randn(experts, 2 * n))
            self.down_proj_bias = nn.Parameter(torch.randn(experts, k))
        self.act_fn = nn.SiLU()

    def _apply_gate(self, gate_up):
        if self.is_concatenated:
            gate, up = gate_up.chunk(2, dim=-1)
        else:
            gate, up = gate_up[..., ::2], gate_up[..., 1::2] + 1
        return self.act_fn(gate) * up

    def forward(self, hidden_states, top_k_index, top_k_weights):
        turn = self.gate_up_proj.mT if self.is_transposed else self.gate_up_proj
        back = self.down_proj.mT if self.is_transposed else self.down_proj
        rows = []
        for x, ids, weights in zip(hidden_states, top_k_index, top_k_weights, strict=True):
            y = 0
            for expert, weight in zip(ids.tolist(), weights, strict=True):
                gate_up, down = turn[expert] @ x, back[expert]
                if self.has_bias:
                    gate_up = gate_up + self.gate_up_proj_bias[expert]
                out = down @ self._apply_gate(gate_up)
                if self.has_bias:
                    out = out + self.down_proj_bias[expert]
                y = y + weight * out
            rows.append(y)
        return torch.stack(rows)


class Mixture(nn.Module):
    """A router of two experts for each token, and a linear layer after them."""

    def __init__(self, **sizes):
        super().__init__()
        self.experts = Experts(**sizes)
        self.router = nn.Parameter(torch.randn(self.experts.num_experts, 32))
        self.out_proj = nn.Linear(32, 32)

    def forward(self, x):
        weights, ids = (x @ self.router.T).softmax(-1).topk(2)
        return self.out_proj(x + self.experts(x, ids, weights))


def dequantised(model, quantised):
    """Returns a copy of a model with the weights of a quantised one."""
    import copy

    from fdk_formats.quantised_module import QuantisedModule

    copied = copy.deepcopy(model)
    for name, layer in quantised.named_modules():
        if isinstance(layer, QuantisedModule):
            weight = layer.dequantise()
            parent, _, own = name.rpartition(".")
            module = copied.get_submodule(parent)
            if isinstance(module, Experts):
                weight = weight.mT if module.is_transposed else weight
                module._parameters[own].data.copy_(weight)
            else:
                module._modules[own].weight.data.copy_(weight)
    return copied
