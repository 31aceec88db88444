"""Private names of transformers that decoding uses. Tested with transformers 5.17 and 5.23.

- ``model._sample``: the loop of greedy search and sampling, which ``generate`` itself calls.
- ``generation_config._pad_token_tensor``: the token of sequences that have ended, on the device.
- ``cache._is_user_defined``: whether a caller gave the cache; versions before 5.20 lack it.
- ``model._can_compile_fullgraph``: whether torch.compile takes the forward pass as one graph.
- ``config._attn_implementation``: the implementation of attention.
- ``module._hf_hook``: accelerate's hook, which moves weights or inputs of a module.
"""

from typing import Any

from torch import Tensor, nn


def transformers_loop(model: Any, input_ids: Tensor, **arguments: Any) -> Any:
    """Decode with transformers' own loop, with the arguments of a ``custom_generate`` function."""
    return model._sample(input_ids, **arguments)


def pad_token(generation_config: Any) -> Tensor | None:
    """Return the token of sequences that have ended, ``[]`` on the device of the prompts."""
    token: Tensor | None = generation_config._pad_token_tensor
    return token


def is_from_caller(cache: Any) -> bool:
    """Return whether a caller gave the cache, or it holds something."""
    return getattr(cache, "_is_user_defined", False) or int(cache.get_seq_length()) > 0


def compiles_whole(model: Any) -> bool:
    """Return whether torch.compile takes the model's forward pass as one graph."""
    return bool(model._can_compile_fullgraph)


def attention_implementation(config: Any) -> str:
    """Return the name of the implementation of attention."""
    return str(config.get_text_config(decoder=True)._attn_implementation)


def hooked_module(model: nn.Module) -> str | None:
    """Return the name of a module with hooks of torch or accelerate, or None."""
    for name, module in model.named_modules():
        hooks = module._forward_hooks or module._forward_pre_hooks
        if hooks or hasattr(module, "_hf_hook"):
            return name or type(module).__name__
    return None
