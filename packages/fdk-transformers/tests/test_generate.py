"""``generate`` against transformers' own loop: the same tokens, stopping, scores and streams."""

import copy
import gc
import threading
import time
import weakref
from contextlib import nullcontext

import pytest
import torch
from tiny_models import VOCABULARY, inputs, make
from torch import nn
from transformers import DynamicCache, StoppingCriteria, StoppingCriteriaList
from transformers.generation import MaxTimeCriteria

import fdk_transformers
from fdk_formats import quantise_model
from fdk_transformers import cuda_graph, end_check, generate, graph_step, step_cache
from fdk_transformers.decode.llama_ops import TorchOps
from fdk_transformers.decode.llama_step import LlamaStep
from fdk_transformers.end_check import EndCheck
from fdk_transformers.step_cache import kept_step, release_step, step_class
from fdk_transformers.transformers_step import TransformersStep

DECODERS = ("llama", "mistral", "qwen2", "qwen3", "gemma3", "phi", "phi3", "mixtral", "gpt2")
LLAMAS = ("llama", "smollm", "mistral", "qwen2", "qwen3")
MASK = torch.tensor([[1] * 9, [0] * 3 + [1] * 6, [0] * 8 + [1]])
SETTINGS = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2, "min_new_tokens": 4},
    "ends": {"eos_token_id": list(range(20, 32)), "pad_token_id": 1},
    "few ends": {"eos_token_id": [20, 21, 22, 23, 24, 25], "pad_token_id": 1},
    "sampled ends": {"do_sample": True, "eos_token_id": list(range(6, 16)), "pad_token_id": 1},
    "several": {"do_sample": True, "num_return_sequences": 2},
    "chunks": {"prefill_chunk_size": 4},
    "length": {"max_new_tokens": None, "max_length": 14},
    "one": {"max_new_tokens": 1},
}


class LlamaOnCpu(LlamaStep):
    """The step of llamas with the definition of its operations, on a CPU."""

    def __init__(self, model, batch, max_length):
        super().__init__(model, batch, max_length, ops=TorchOps())

    @classmethod
    def supports(cls, model, max_length):
        return cls.reason_unlike(model, max_length)


@pytest.fixture(params=["transformers", "llama", "cpu"])
def step(request, monkeypatch):
    """The steps that decode: with the model's own code, of llamas, and of fdk-cpu."""
    steps = {"transformers": (TransformersStep,), "llama": (LlamaOnCpu,)}
    if request.param == "cpu":
        pytest.importorskip("fdk_cpu")
        from fdk_transformers.cpu_step import CpuStep

        steps["cpu"] = (CpuStep, TransformersStep)
    monkeypatch.setattr(step_cache, "STEPS", steps[request.param])
    return request.param


@pytest.fixture
def captured_step(step):
    """A step that is captured on a GPU."""
    if step == "cpu":
        pytest.skip("the step of fdk-cpu is no graph")
    return step


@pytest.fixture
def any_step(monkeypatch):
    """The step with the model's own code."""
    monkeypatch.setattr(step_cache, "STEPS", (TransformersStep,))


@pytest.fixture
def graphs(monkeypatch):
    """A device whose graphs replay by calling, with results at the same addresses."""
    captured = []

    class Graph(cuda_graph.CallGraph):
        def __init__(self, call, device, counters):
            captured.append(counters)
            super().__init__(call, device, counters)

    def record(call, device):
        before = [counter.clone() for counter in captured[-1]]
        result = call()
        for counter, value in zip(captured[-1], before, strict=True):
            counter.copy_(value)  # a capture runs nothing

        def replay():
            again = call()
            if result is not None:
                result.copy_(again)

        return replay, result

    monkeypatch.setattr(graph_step, "is_captured", lambda device: True)
    monkeypatch.setattr(graph_step, "CallGraph", Graph)
    monkeypatch.setattr(cuda_graph, "record", record)
    return captured


def prompts():
    """Returns prompts of 9, 6 and 1 tokens, padded on the left."""
    ids = torch.randint(6, VOCABULARY, (3, 9), generator=torch.Generator().manual_seed(3))
    return {"input_ids": torch.where(MASK == 1, ids, 0), "attention_mask": MASK}


def lively(name):
    """Returns a model in float32 whose tokens vary."""
    model = make(name, torch.float32)
    torch.manual_seed(5)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(std=0.2)
    return model


def both(model, inputs, seed=1, **settings):
    """Returns what transformers generates, and what we do."""
    settings = {"max_new_tokens": 12} | settings
    found = []
    for custom in (None, generate):
        torch.manual_seed(seed)
        made = model.generate(**inputs, **settings, custom_generate=custom)
        found.append((made, torch.get_rng_state()))
    (expected, state), (ours, our_state) = found
    assert torch.equal(state, our_state)  # the next draws are the same, too
    return expected, ours


@pytest.mark.filterwarnings("error:transformers' own loop")
@pytest.mark.parametrize("name", DECODERS)
def test_tokens_of_models(name, any_step):
    """Mistral's and Gemma's windows are shorter than the sequences."""
    expected, ours = both(lively(name), prompts(), max_new_tokens=20, pad_token_id=0)
    assert torch.equal(ours, expected)
    assert len(expected.unique()) > 10


@pytest.mark.filterwarnings("error:transformers' own loop")
@pytest.mark.parametrize("settings", SETTINGS)
def test_tokens_of_settings(settings, step):
    expected, ours = both(lively("llama"), prompts(), **SETTINGS[settings])
    assert torch.equal(ours, expected)


def test_sequences_end_apart():
    """The case of few ends is one: two sequences are padded, and the loop stops early."""
    settings = SETTINGS["few ends"]
    _, ours = both(lively("llama"), prompts(), max_new_tokens=40, **settings)
    ends = [(row[9:] == 1).nonzero().flatten() for row in ours]
    assert ours.shape[1] < 49
    assert len({len(end) for end in ends}) > 1


@pytest.mark.filterwarnings("error:transformers' own loop")
@pytest.mark.parametrize("name", LLAMAS)
def test_llamas(name, monkeypatch):
    """The step of llamas on other models, without padding, and in a second call."""
    monkeypatch.setattr(step_cache, "STEPS", (LlamaOnCpu,))
    model = lively(name)
    for given in (prompts(), {"input_ids": prompts()["input_ids"][:1]}, prompts()):
        expected, ours = both(model, given, max_new_tokens=7)  # Mistral's window is of 16 tokens
        assert torch.equal(ours, expected)


@pytest.mark.filterwarnings("error:transformers' own loop")
@pytest.mark.parametrize("fuse", [False, True])
def test_rotated_formats(fuse, step):
    """Layers that stay apart rotate the x that they share once, too."""
    model = quantise_model(lively("qwen2"), "kmeans4-g32-hadamard", fuse=fuse, progress=False)
    expected, ours = both(model, prompts())
    assert torch.equal(ours, expected)


@pytest.mark.parametrize("fuse", [False, True])
def test_quantised_llama(fuse, monkeypatch):
    monkeypatch.setattr(step_cache, "STEPS", (LlamaOnCpu,))
    how = {"backend": "reference", "progress": False, "fuse": fuse}
    model = quantise_model(lively("llama"), "int4-g32", **how)
    expected, ours = both(model, prompts())
    assert torch.equal(ours, expected)


def test_prompts_in_parts(monkeypatch):
    """Long prompts are cut; short ones end in other parts than the last."""
    monkeypatch.setattr(step_cache, "STEPS", (LlamaOnCpu,))
    monkeypatch.setattr("fdk_transformers.decode.llama_step.PROMPT_TOKENS", 6)
    expected, ours = both(lively("llama"), prompts())
    assert torch.equal(ours, expected)


@pytest.mark.parametrize("name", ["greedy", "sampling"])
def test_scores_and_logits(name, step):
    wanted = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    expected, ours = both(lively("llama"), prompts(), **wanted, **SETTINGS[name])
    assert type(ours) is type(expected)
    assert torch.equal(ours.sequences, expected.sequences)
    for kind in ("scores", "logits"):
        assert len(ours[kind]) == len(expected[kind]) == 12
        torch.testing.assert_close(
            torch.stack(ours[kind]), torch.stack(expected[kind]), rtol=1e-4, atol=1e-4
        )


class StopsAtToken(StoppingCriteria):
    """Ends a sequence whose token is one of a range, and counts its calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, input_ids, scores, **kwargs):
        self.calls += 1
        return input_ids[:, -1] > 80


def test_other_criteria(step):
    model = lively("llama")
    expected, ours = both(
        model, prompts(), stopping_criteria=StoppingCriteriaList([StopsAtToken()])
    )
    assert torch.equal(ours, expected)
    assert ours.shape[1] < 21


def test_time_limit(step, monkeypatch):
    """The token at which the time is over is the last."""
    clock = iter(range(100))
    monkeypatch.setattr(time, "time", lambda: next(clock))
    model = lively("llama")
    ours = model.generate(**prompts(), max_new_tokens=50, max_time=5.5, custom_generate=generate)
    assert ours.shape[1] == 9 + 6


class Recorder:
    """A streamer that keeps what it is given."""

    def __init__(self):
        self.given, self.ended = [], 0

    def put(self, value):
        self.given.append(value.tolist())

    def end(self):
        self.ended += 1


@pytest.mark.parametrize("settings", ["greedy", "ends", "sampled ends"])
def test_streamer(settings, step):
    model, expected, ours = lively("llama"), Recorder(), Recorder()
    given = {name: value[:1] for name, value in prompts().items()}
    how = {"max_new_tokens": 12, **SETTINGS[settings]}
    torch.manual_seed(2)
    model.generate(**given, **how, streamer=expected)
    torch.manual_seed(2)
    model.generate(**given, **how, token_streamer=ours, custom_generate=generate)
    assert ours.given == expected.given
    assert ours.ended == expected.ended == 1


# The loop that does not wait


@pytest.mark.parametrize("settings", ["greedy", "ends", "few ends", "length", "sampled ends"])
@pytest.mark.parametrize("ahead", [1, 2, 7])
def test_tokens_beyond_the_end_are_discarded(ahead, settings, step, monkeypatch):
    class Late(EndCheck):
        def __init__(self, *arguments):
            super().__init__(*arguments, ahead=ahead)

    monkeypatch.setattr("fdk_transformers.generation.EndCheck", Late)
    model, streams = lively("llama"), Recorder()
    how = {"max_new_tokens": 12, **SETTINGS[settings], "return_dict_in_generate": True}
    torch.manual_seed(1)
    expected = model.generate(**prompts(), **how, output_scores=True)
    torch.manual_seed(1)
    ours = model.generate(
        **prompts(), **how, output_scores=True, custom_generate=generate, token_streamer=streams
    )
    assert torch.equal(ours.sequences, expected.sequences)
    assert len(ours.scores) == len(expected.scores)
    assert torch.tensor(streams.given[1:]).T.tolist() == expected.sequences[:, 9:].tolist()
    torch.manual_seed(1)
    again = model.generate(**prompts(), **how, custom_generate=generate)  # chosen on the device
    assert torch.equal(again.sequences, expected.sequences)


@pytest.mark.parametrize("settings", ["greedy", "few ends", "sampling"])
def test_graphs(settings, captured_step, graphs):
    """Warm calls before a capture leave no trace, and a second call captures nothing."""
    model = lively("llama")
    for _ in range(2):
        expected, ours = both(model, prompts(), **SETTINGS[settings])
        assert torch.equal(ours, expected)
    assert len(graphs) == 1
    assert kept_step(model).is_graph


def test_padding_is_a_graph_of_its_own(graphs, any_step):
    model, given = lively("llama"), prompts()
    for one in ({"input_ids": given["input_ids"]}, given, {"input_ids": given["input_ids"]}):
        expected, ours = both(model, one, pad_token_id=0)
        assert torch.equal(ours, expected)
    assert 1 <= len(graphs) <= 2


def test_a_step_that_cannot_be_captured(captured_step, graphs, monkeypatch, caplog):
    def refuse(call, device):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(cuda_graph, "record", refuse)
    model = lively("llama")
    expected, ours = both(model, prompts())
    assert torch.equal(ours, expected)
    assert "not permitted when stream is capturing" in caplog.text
    assert not kept_step(model).is_graph


# The step that a model keeps


def test_second_call_uses_the_step(step):
    model = lively("llama")
    first = model.generate(**prompts(), max_new_tokens=4, custom_generate=generate)
    kept = kept_step(model)
    again = model.generate(**prompts(), max_new_tokens=9, custom_generate=generate)
    assert kept_step(model) is kept
    assert torch.equal(again[:, :13], first)
    model.generate(**prompts(), max_new_tokens=600, custom_generate=generate)  # too long for it
    assert kept_step(model) is not kept
    release_step(model)
    assert kept_step(model) is None


def replace_weight(model):
    model.lm_head = nn.Linear(64, VOCABULARY, bias=False)


CHANGES = {
    "dtype": lambda model: model.to(torch.float64),
    "weight": replace_weight,
    "attention": lambda model: model.set_attn_implementation("eager"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_models_get_new_steps(change, step):
    model = lively("llama")
    model.generate(**prompts(), max_new_tokens=4, custom_generate=generate)
    kept = kept_step(model)
    CHANGES[change](model)
    expected, ours = both(model, prompts())
    assert torch.equal(ours, expected)
    assert kept_step(model) is not kept


def test_trained_weights(step):
    """Steps that read weights where they are go on; one with copies is made again."""
    model = lively("llama")
    model.generate(**prompts(), max_new_tokens=4, custom_generate=generate)
    kept = kept_step(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.3)
    expected, ours = both(model, prompts())
    assert torch.equal(ours, expected)
    assert (kept_step(model) is kept) == (step != "cpu")  # which has copies


def test_adapters_that_are_switched(step):
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    model = peft.get_peft_model(lively("llama"), settings).eval()
    with_adapter, ours = both(model, prompts())
    assert torch.equal(ours, with_adapter)
    with model.disable_adapter():
        without, ours = both(model, prompts())
        assert torch.equal(ours, without)
    assert not torch.equal(with_adapter, without)
    release_step(model)
    assert kept_step(model.get_base_model()) is None


def test_a_step_ends_with_its_model(step):
    model = lively("llama")
    model.generate(**prompts(), max_new_tokens=4, custom_generate=generate)
    kept = weakref.ref(kept_step(model))
    assert kept_step(copy.deepcopy(model)) is None
    gc.collect()
    gc.disable()
    try:
        del model.__dict__[step_cache.HOLDER]
        assert kept() is None  # no cycle waits for the garbage collector
    finally:
        gc.enable()


def test_threads(step):
    """Calls at the same time do not share a cache."""
    model = lively("llama")
    expected = model.generate(**prompts(), max_new_tokens=12)
    found = []

    def call():
        found.append(model.generate(**prompts(), max_new_tokens=12, custom_generate=generate))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [torch.equal(each, expected) for each in found] == [True] * 4


def test_inference_mode_and_back(step):
    model = lively("llama")
    expected = model.generate(**prompts(), max_new_tokens=8)
    for mode in (torch.inference_mode(), nullcontext(), torch.inference_mode(), torch.no_grad()):
        with mode:
            ours = model.generate(**prompts(), max_new_tokens=8, custom_generate=generate)
        assert torch.equal(ours, expected)
    assert not ours.is_inference()


# Calls that are left to transformers, and those that are refused

OTHERS = {
    "encoder": ("t5", {}, "has an encoder"),
    "images": ("llava", {}, "called with (pixel_values|mm_encoder_outputs)"),
    "hidden states": (
        "llama",
        {"return_dict_in_generate": True, "output_hidden_states": True},
        "hidden.states",
    ),
    "no cache": ("llama", {"use_cache": False}, "use_cache is False"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_left_to_transformers(case):
    name, settings, said = OTHERS[case]
    settings = {"max_new_tokens": 4, "pad_token_id": 0} | settings
    model = make(name, torch.float32)
    given = {k: v for k, v in inputs(name, torch.float32).items() if not k.startswith("decoder")}
    expected = model.generate(**given, **settings)
    with pytest.warns(UserWarning, match=said):
        ours = model.generate(**given, **settings, custom_generate=generate)
    if settings.get("return_dict_in_generate"):
        expected, ours = expected.sequences, ours.sequences
    assert torch.equal(ours, expected)


def test_a_cache_of_the_caller(step):
    model, given = lively("llama"), prompts()["input_ids"][:1]
    expected = model.generate(given, max_new_tokens=6)
    cache = DynamicCache(config=model.config)
    with pytest.warns(UserWarning, match="a cache was given"):
        first = model.generate(
            given, max_new_tokens=3, past_key_values=cache, custom_generate=generate
        )
    with pytest.warns(UserWarning, match="a cache was given"):
        ours = model.generate(
            first, max_new_tokens=3, past_key_values=cache, custom_generate=generate
        )
    assert torch.equal(ours, expected)


def test_embeddings(step):
    model = lively("llama")
    embedded = model.get_input_embeddings()(prompts()["input_ids"])
    expected = model.generate(inputs_embeds=embedded, max_new_tokens=5)
    with pytest.warns(UserWarning, match="inputs_embeds"):
        ours = model.generate(inputs_embeds=embedded, max_new_tokens=5, custom_generate=generate)
    assert torch.equal(ours, expected)


def test_hooks_are_called(step):
    model, calls = lively("llama"), []
    model.model.layers[1].mlp.register_forward_hook(lambda *of: calls.append(of))
    with pytest.warns(UserWarning, match=r"model.layers.1.mlp has hooks"):
        model.generate(**prompts(), max_new_tokens=5, custom_generate=generate)
    assert len(calls) == 5


def test_positions_and_padding_of_the_caller(step):
    model, given = lively("llama"), prompts()
    places = torch.arange(9).expand(3, -1) + 2
    right = {"input_ids": given["input_ids"], "attention_mask": given["attention_mask"].flip(1)}
    inside = given["attention_mask"].clone()
    inside[0, 3:5] = 0
    for one, said in (
        (given | {"position_ids": places}, "not successive"),
        (right, "tokens come before padding"),
        (given | {"attention_mask": inside}, "tokens come before padding"),
    ):
        expected = model.generate(**one, max_new_tokens=5)
        with pytest.warns(UserWarning, match=said):
            ours = model.generate(**one, max_new_tokens=5, custom_generate=generate)
        assert torch.equal(ours, expected)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_beams": 2}, "got beam search"),
        ({"prompt_lookup_num_tokens": 2}, "got assisted generation"),
    ],
)
def test_other_searches_are_refused(settings, said):
    settings = {"max_new_tokens": 4, "custom_generate": generate} | settings
    with pytest.raises(ValueError, match=f"{said}: leave out custom_generate"):
        lively("llama").generate(**prompts(), **settings)


def test_reasons_of_steps(monkeypatch):
    """The step of llamas says what it cannot do, and another does it."""
    monkeypatch.setattr(step_cache, "STEPS", (LlamaStep, TransformersStep))
    assert "longer than the window of 16" in LlamaOnCpu.supports(lively("mistral"), 17)
    assert LlamaOnCpu.supports(lively("mistral"), 16) is None
    assert "Gemma3ForCausalLM is none of" in LlamaOnCpu.supports(lively("gemma3"), 8)
    assert "need a GPU" in LlamaStep.supports(lively("llama"), 8)
    assert step_class(lively("llama"), 8) is TransformersStep
    model = lively("llama")
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="attention is 'flash_attention_2'"):
        step_class(model, 8)


def test_public_names():
    assert fdk_transformers.generate is generate
    assert fdk_transformers.release_step is release_step
    assert end_check.AHEAD > 0
    assert MaxTimeCriteria(1.0).max_time == 1.0
