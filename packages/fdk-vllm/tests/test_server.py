"""The OpenAI server of vLLM, driven by the openai client."""

import pytest
import serving

from fdk_formats import QuantisedExperts

pytest.importorskip("vllm", reason="needs vLLM: nox -s test-vllm")

FORMAT = "int4-g64"
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Quantises SmolLM2, and writes its folder."""
    import torch
    from transformers import AutoModelForCausalLM

    source, folder = serving.example_folder(), tmp_path_factory.mktemp("smollm2")
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    model = serving.quantised(model, FORMAT)
    serving.packed_folder(folder, model, FORMAT)
    serving.copy_tokenizer(source, folder)
    return folder, model


@pytest.fixture(scope="module")
def client(model, tmp_path_factory):
    log = tmp_path_factory.mktemp("log") / "server.log"
    with serving.server(model[0], log, "--max-model-len", "256") as client:
        yield client


# First: the server of the fixture starts after it.
def test_a_mixture_from_from_pretrained_to_serve(tmp_path):
    """Quantises a mixture while transformers reads it, saves and serves it without a flag."""
    from transformers import AutoModelForCausalLM

    from fdk_transformers import FdkConfig

    source, folder = tmp_path / "source", tmp_path / "packed"
    serving.tiny_mixture("Mixtral").save_pretrained(source)
    config = FdkConfig("kmeans4-g32")
    small = AutoModelForCausalLM.from_pretrained(source, quantization_config=config)
    assert [type(layer.mlp.experts) for layer in small.model.layers] == [QuantisedExperts] * 2
    small.save_pretrained(folder)
    serving.copy_tokenizer(serving.example_folder(), folder)
    prompts = serving.prompts(8, serving.TINY["vocab_size"])
    flags = ("--dtype", "float32", "--max-model-len", "128")
    greedy = {"temperature": 0, "max_tokens": 16}
    more = {"ignore_eos": True, "return_token_ids": True}
    with serving.server(folder, tmp_path / "server.log", *flags) as client:
        name = client.models.list().data[0].id
        found = client.completions.create(model=name, prompt=prompts, extra_body=more, **greedy)
    tokens = [choice.token_ids for choice in found.choices]
    assert [len(each) for each in tokens] == [16] * 8
    assert serving.disagreements(small, prompts, tokens) == []


def test_chat(client, model):
    name = client.models.list().data[0].id
    answer = client.chat.completions.create(
        model=name, messages=QUESTION, temperature=0, max_tokens=12
    )
    assert "Paris" in answer.choices[0].message.content
    assert answer.usage.completion_tokens > 0


def test_stream_gives_the_same_text(client):
    name = client.models.list().data[0].id
    asked = {"model": name, "prompt": "The capital of France is", "temperature": 0}
    whole = client.completions.create(max_tokens=16, **asked).choices[0].text
    pieces = client.completions.create(max_tokens=16, stream=True, **asked)
    assert "".join(piece.choices[0].text for piece in pieces) == whole


def test_log_probabilities_are_those_of_the_model(client, model):
    import torch

    name = client.models.list().data[0].id
    prompt = [504, 3575, 282, 4649, 314]
    completion = client.completions.create(
        model=name, prompt=prompt, temperature=0, max_tokens=1, logprobs=5
    )
    (top,) = completion.choices[0].logprobs.top_logprobs
    with torch.no_grad():
        logits = model[1](torch.tensor([prompt])).logits[0, -1].float().log_softmax(-1)
    wanted = sorted(logits.topk(5).values.tolist(), reverse=True)
    # bfloat16: a logit of 16 to 32 is a multiple of 0.125.
    assert sorted(top.values(), reverse=True) == pytest.approx(wanted, abs=0.25)
