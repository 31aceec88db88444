"""``generate``: greedy search and sampling with captured steps, for ``custom_generate``.

transformers prepares the arguments, logits processors and stopping criteria, and calls it in the
place of its own loop. Tokens and stopping are those of that loop.
"""

import warnings
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
)
from transformers.generation.utils import GenerateDecoderOnlyOutput

from fdk_transformers.decode.next_token import MOST_ENDS
from fdk_transformers.end_check import EndCheck
from fdk_transformers.graph_step import GraphStep, Step
from fdk_transformers.step_cache import step_class, step_of
from fdk_transformers.transformers_internals import (
    hooked_module,
    is_from_caller,
    pad_token,
    transformers_loop,
)
from fdk_transformers.transformers_step import TransformersStep

# Arguments of a forward pass that steps know. Others of value None are ignored.
KNOWN = ("attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep")
CACHES = (None, "dynamic", "static")  # kinds of caches that a static one stands for
# Criteria that the device or the host can decide without the tokens of all steps.
SIMPLE_CRITERIA = (EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria)


def generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    synced_gpus: bool = False,
    streamer: Any = None,
    token_streamer: Any = None,
    **model_kwargs: Any,
) -> GenerateDecoderOnlyOutput | Tensor:
    """Decode greedily or by sampling, as ``model.generate(..., custom_generate=generate)``.

    The cache is static. On a GPU each step is one CUDA graph, and the host does not wait for the
    device: up to ``AHEAD`` tokens beyond the end are computed and discarded. The step stays with
    the model for the next call, see ``release_step``.

    A prompt that no step can decode (embeddings, images, a cache of its own, an encoder-decoder
    model) is decoded by transformers' own loop, with a warning.

    Args:
        model: a causal language model of transformers.
        input_ids: prompts, ``[b, t]``, padded on the left.
        logits_processor, stopping_criteria, generation_config: as prepared by transformers.
        synced_gpus: see ``generate`` of transformers.
        streamer: as ``token_streamer``, if the prompt was put to it already. transformers keeps
            its argument of this name from custom functions.
        token_streamer: streamer of transformers, such as ``TextStreamer``.
        model_kwargs: arguments of a forward pass.

    Returns:
        Token ids ``[b, length]``, or with ``return_dict_in_generate`` an output that has them, and
        scores and logits if asked for. Its ``past_key_values`` is None.

    Raises:
        ValueError: for another search, such as beams.

    Example:
        >>> model.generate(**inputs, max_new_tokens=64, custom_generate=fdk_transformers.generate)
    """
    check_mode(generation_config)
    if token_streamer is not None:
        token_streamer.put(input_ids.cpu())
        streamer = token_streamer
    reason = "GPUs are synchronised" if synced_gpus else None
    reason = reason or reason_to_delegate(
        model, input_ids, stopping_criteria, generation_config, model_kwargs
    )
    if reason is not None:
        warnings.warn(f"transformers' own loop decodes: {reason}", stacklevel=2)
        output: GenerateDecoderOnlyOutput | Tensor = transformers_loop(
            model,
            input_ids,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            generation_config=generation_config,
            synced_gpus=synced_gpus,
            streamer=streamer,
            **model_kwargs,
        )
        return output
    length = limit_of(stopping_criteria, generation_config, input_ids)
    with step_of(model, input_ids.shape[0], length) as step:
        configure(step, generation_config)
        step.reset()
        with torch.inference_mode():
            logits = step.prefill(input_ids, model_kwargs.get("attention_mask"))
        end = EndCheck(input_ids.shape[0], input_ids.device, streamer)
        if isinstance(step, GraphStep) and chooses_on_device(
            logits_processor, stopping_criteria, generation_config
        ):
            ids = decode_greedily(
                step, input_ids, logits, stopping_criteria, generation_config, end
            )
            made = GenerateDecoderOnlyOutput(sequences=ids)  # type: ignore[arg-type]
        else:
            made = decode(
                step, input_ids, logits, logits_processor, stopping_criteria, generation_config, end
            )
    if streamer is not None:
        streamer.end()
    return made if generation_config.return_dict_in_generate else made.sequences


def check_mode(generation_config: GenerationConfig) -> None:
    """Raise ValueError for a search that is neither greedy nor sampling."""
    mode = generation_config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise ValueError(
            f"fdk_transformers.generate: wanted greedy search or sampling, got "
            f"{mode.value.replace('_', ' ')}: leave out custom_generate"
        )


def reason_to_delegate(
    model: Any,
    input_ids: Tensor,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
) -> str | None:
    """Return the reason why no step can decode with these arguments, or None."""
    config, cache = generation_config, model_kwargs.get("past_key_values")
    unknown = [k for k, value in model_kwargs.items() if k not in KNOWN and value is not None]
    if model.config.is_encoder_decoder:
        return "the model has an encoder"
    if unknown:
        return f"the model is called with {', '.join(unknown)}"
    if config.return_dict_in_generate and (config.output_attentions or config.output_hidden_states):
        return "attentions or hidden states are wanted"
    if cache is not None and is_from_caller(cache):
        return "a cache was given"
    if config.cache_implementation not in CACHES:
        return f"the cache is {config.cache_implementation}"
    if not model_kwargs.get("use_cache", True):
        return "use_cache is False"
    if model.training:
        return "the model is in training mode; call model.eval()"
    if model.device != input_ids.device:
        return f"the model is on {model.device}, and input_ids on {input_ids.device}"
    if (name := hooked_module(model)) is not None:
        return f"{name} has hooks, which captured steps would not call"
    if (reason := reason_of_prompt(input_ids, model_kwargs)) is not None:
        return reason
    try:
        length = limit_of(stopping_criteria, config, input_ids)
        step_class(model, length)
    except ValueError as error:
        return str(error)
    return None


def reason_of_prompt(input_ids: Tensor, model_kwargs: dict[str, Any]) -> str | None:
    """Return how prompts differ from successive tokens that are padded on the left, or None."""
    mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    if input_ids.ndim != 2 or input_ids.shape[1] == 0:
        return f"wanted input_ids [b, t], got {list(input_ids.shape)}"
    if mask is None:
        mask = torch.ones_like(input_ids)
    if mask.shape != input_ids.shape:
        return f"wanted an attention_mask {list(input_ids.shape)}, got {list(mask.shape)}"
    kept = mask != 0
    if not (kept[:, -1].all() and (kept.int().diff(dim=1) >= 0).all()):
        return "tokens come before padding; padding_side='left' is right"
    successive = kept.cumsum(-1) - 1
    if positions is not None and not torch.where(kept, positions == successive, True).all():
        return "positions are not successive"
    return None


def limit_of(
    stopping_criteria: StoppingCriteriaList, generation_config: GenerationConfig, input_ids: Tensor
) -> int:
    """Return the number of tokens at which sequences end at the latest, at least one new one."""
    limits = [c.max_length for c in stopping_criteria if isinstance(c, MaxLengthCriteria)]
    limit = min(limits, default=generation_config.max_length)
    return max(int(limit), input_ids.shape[1] + 1)


def configure(step: Step, generation_config: GenerationConfig) -> None:
    """Apply the settings of a call to a step."""
    if isinstance(step, GraphStep):
        step.prompt_chunk = generation_config.prefill_chunk_size
    if isinstance(step, TransformersStep):
        step.compiled = step.compiles and not generation_config.disable_compile


def chooses_on_device(
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
) -> bool:
    """Return whether the next tokens are the largest logits, until a token, a length or a time."""
    config = generation_config
    wants_scores = config.return_dict_in_generate and (config.output_scores or config.output_logits)
    if config.do_sample or logits_processor or wants_scores:
        return False
    ends = end_tokens(stopping_criteria)
    return all(type(criterion) in SIMPLE_CRITERIA for criterion in stopping_criteria) and (
        ends is None or ends.numel() <= MOST_ENDS
    )


def end_tokens(stopping_criteria: StoppingCriteriaList) -> Tensor | None:
    """Return the tokens that end a sequence, ``[n]``, or None."""
    tokens = [c.eos_token_id.flatten() for c in stopping_criteria if hasattr(c, "eos_token_id")]
    return torch.cat(tokens) if tokens else None


def decode_greedily(
    step: GraphStep,
    input_ids: Tensor,
    logits: Tensor,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    end: EndCheck,
) -> Tensor:
    """Return prompts and their greedy continuations, ``[b, length]``; see ``chooses_on_device``."""
    count = limit_of(stopping_criteria, generation_config, input_ids) - input_ids.shape[1]
    timers = [c for c in stopping_criteria if isinstance(c, MaxTimeCriteria)]
    nothing = torch.empty(1, 0, dtype=torch.int64)
    sequences, made = step.sequences, 1
    step.begin_greedy(logits, end_tokens(stopping_criteria), pad_token(generation_config))
    while not end.add(sequences.unfinished, sequences.tokens[:, 0]):
        if made == count or any(timer(nothing, None) for timer in timers):
            break
        step.decode_greedy()
        made += 1
    made -= end.finish()
    return torch.cat([input_ids, sequences.ids[:, :made]], dim=1)


def decode(
    step: Step,
    input_ids: Tensor,
    logits: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    end: EndCheck,
) -> GenerateDecoderOnlyOutput:
    """Decode with any processors and criteria, and return sequences, scores and logits."""
    config, ids = generation_config, input_ids
    limit, pad = limit_of(stopping_criteria, config, input_ids), pad_token(config)
    has_ends = end_tokens(stopping_criteria) is not None
    all_scores: tuple[Tensor, ...] | None = () if config.output_scores else None
    all_logits: tuple[Tensor, ...] | None = () if config.output_logits else None
    unfinished = torch.ones(len(ids), dtype=torch.int64, device=ids.device)
    while True:
        found = logits.to(torch.float32, copy=True)  # the step writes to it again
        scores = logits_processor(ids, found)  # type: ignore[arg-type]
        if all_scores is not None:
            all_scores += (scores,)
        if all_logits is not None:
            all_logits += (found,)
        if config.do_sample:
            tokens = torch.multinomial(scores.softmax(-1), num_samples=1)[:, 0]
        else:
            tokens = scores.argmax(-1)
        if has_ends and pad is not None:
            tokens = tokens * unfinished + pad * (1 - unfinished)
        ids = torch.cat([ids, tokens[:, None]], dim=1)
        unfinished = unfinished & ~stopping_criteria(ids, all_scores)
        if end.add(unfinished, tokens) or ids.shape[1] == limit:
            break
        with torch.inference_mode():
            logits = step.decode(tokens)
    excess = end.finish()
    last = ids.shape[1] - excess
    made = last - input_ids.shape[1]
    return GenerateDecoderOnlyOutput(
        sequences=ids[:, :last],  # type: ignore[arg-type]
        scores=None if all_scores is None else all_scores[:made],  # type: ignore[arg-type]
        logits=None if all_logits is None else all_logits[:made],  # type: ignore[arg-type]
    )
