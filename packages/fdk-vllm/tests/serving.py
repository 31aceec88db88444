"""Models for the tests, engines of vLLM in this process, and the comparison with transformers."""

import contextlib
import gc
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import torch

from fdk_formats import QuantisedTensor, load_model, quantise_model, save_model

# One process where one is enough: the tests read the model that vLLM built.
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}
PATIENCE = 300  # seconds: two processes that import vLLM, on busy cores
# Groups of 64 fit every k, also in halves and quarters.
TINY = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "tie_word_embeddings": False,
}

MIXTURES = {
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 128},
    "Qwen3Moe": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
        "head_dim": 32,
    },
    # Grouped top-k of sigmoids with a correction, shared experts, a dense first layer.
    "Glm4Moe": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "head_dim": 32,
    },
    # Weights that are not normalised.
    "DeepseekV2": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 8,
        "q_lora_rank": None,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        # Sizes that vLLM's attention on a CPU takes.
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
    },
    # Biases, and gates that take turns with what they multiply.
    "GptOss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 128,
        "head_dim": 32,
    },
}


def tiny_model(kind="Llama", **changes):
    """Makes a model of random weights, in float32: two tokens seldom tie."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(**TINY | changes)
    torch.manual_seed(1)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    return model


def tiny_mixture(kind):
    """Makes a mixture of random weights, see ``tiny_model``."""
    model = tiny_model(kind, **MIXTURES[kind])
    for name, buffer in model.named_buffers():
        if "correction" in name:  # zero in a new model
            torch.nn.init.normal_(buffer, std=0.1)
    return model


def quantised(model, format, **options):
    """Quantises a model as a user of fdk-formats does."""
    return quantise_model(model, format, progress=False, **options)


def write_config(folder, model, quantization_config=None):
    """Writes config.json of a model."""
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    config.pop("quantization_config", None)
    if quantization_config is not None:
        config["quantization_config"] = quantization_config
    (folder / "config.json").write_text(json.dumps(config))


def packed_folder(folder, model, format, **settings):
    """Writes a packed checkpoint; returns its folder."""
    folder.mkdir(exist_ok=True)
    save_model(folder / "model.safetensors", model)
    write_config(folder, model, {"quant_method": "fdk", "format": format} | settings)
    return folder


def plain_folder(folder, model):
    """Writes a 16-bit checkpoint as transformers does; returns its folder."""
    model.save_pretrained(folder)
    return folder


def two_checkpoints(folder, first, second, format, **options):
    """Packs two models of one architecture, the second's weights rolled by a row.

    Returns:
        The quantised models, and their folders.
    """
    for parameter in second.parameters():
        parameter.data = parameter.data.roll(1, 0)
    models = [quantised(model, format, **options) for model in (first, second)]
    folders = [packed_folder(folder / str(i), model, format) for i, model in enumerate(models)]
    return models, folders


LLAMA_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(folder, base, names=LLAMA_LAYERS):
    """Writes an adapter of random weights, of the layers with these names."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=8, lora_alpha=16, target_modules=list(names), task_type="CAUSAL_LM")
    adapted = get_peft_model(base, config)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    adapted.save_pretrained(folder)
    return folder


def requested(format, **settings):
    """Returns the options of an engine that quantises a 16-bit checkpoint while loading."""
    config = {"quant_method": "fdk", "format": format} | settings
    return {"hf_overrides": {"quantization_config": config}}


def prompts(count, vocabulary, shortest=4, longest=24):
    """Returns lists of token ids."""
    generator = torch.Generator().manual_seed(2)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(3, vocabulary, (n,), generator=generator).tolist() for n in lengths]


@contextlib.contextmanager
def engine(folder, **options):
    """Starts vLLM in this process, and frees it."""
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    defaults = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 128,
        "max_num_seqs": 16,
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
    }
    llm = LLM(model=str(folder), **defaults | options)
    try:
        yield llm
    finally:
        # The caller keeps the object; what it holds would be freed under the next engine.
        llm.llm_engine.engine_core.shutdown()
        vars(llm).clear()
        gc.collect()
        cleanup_dist_env_and_memory()


@contextlib.contextmanager
def server(folder, log, *flags):
    """Starts the OpenAI server of vLLM as a user does, without a flag of fdk's; gives a client.

    Args:
        folder: the model and its tokenizer.
        log: file for the output of the server.
        flags: of ``vllm serve``.
    """
    from openai import OpenAI

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    # The module that `vllm serve` runs: the command asks for the version of a distribution called
    # vllm, which vllm-cpu is not.
    serve = (sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder))
    command = (*serve, "--port", str(port), "--enforce-eager", *flags)
    environment = os.environ | ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
    try:
        deadline = time.monotonic() + PATIENCE
        while not answers(client):
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(1)
        yield client
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(60)


def answers(client):
    from openai import APIConnectionError

    try:
        return client.models.list().data
    except APIConnectionError:
        return None


def model_of(llm):
    """Returns the model that vLLM built in this process."""
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner.model


def first_product(model):
    """Returns the product of queries, keys and values in the first layer of vLLM's model."""
    return model.model.layers[0].self_attn.qkv_proj.quant_method.weights.product


def generate(llm, token_ids, count=16, **options):
    """Returns the tokens that vLLM chooses greedily, for each prompt."""
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
    inputs = [{"prompt_token_ids": ids} for ids in token_ids]
    found = llm.generate(inputs, greedy, use_tqdm=False, **options)
    return [list(output.outputs[0].token_ids) for output in found]


@torch.no_grad()
def disagreements(model, token_ids, chosen):
    """Returns where greedy decoding of a model differs from tokens that were chosen.

    The model is asked for the next token after every prefix of prompt and chosen tokens. If it
    agrees everywhere, its own greedy decoding gives the same tokens.

    Returns:
        For each difference: prompt, position, the token of the model, the one chosen, and by how
        much the logit of the former is higher.
    """
    found = []
    for index, (prompt, tokens) in enumerate(zip(token_ids, chosen, strict=True)):
        logits = model(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :].float()
        for position, (row, token) in enumerate(zip(logits, tokens, strict=True)):
            best = int(row.argmax())
            if best != token:
                found.append((index, position, best, token, float(row[best] - row[token])))
    return found


def assert_same_tokens(model, llm, token_ids, count=16, **options):
    """Checks that vLLM's greedy tokens are those of a model; returns them."""
    tokens = generate(llm, token_ids, count, **options)
    assert_chosen(model, token_ids, tokens, count)
    return tokens


def assert_chosen(model, token_ids, tokens, count, gap=0.0, mean_gap=0.0):
    """Checks that tokens are those that a model chooses, or nearly as likely.

    With activations of 8 or 16 bits, a sum that another kernel rounds otherwise can move an
    activation to the next value, and another token is chosen where two are nearly as likely.
    transformers' own decoding, one token at a time, then differs from its product over the whole
    prompt, too.

    Args:
        count: number of tokens of each prompt.
        gap: by how much the logit of the model's own choice may be higher, for any token. Logits of
            one token spread over more than 1.
        mean_gap: the same in the mean of all tokens.
    """
    assert [len(each) for each in tokens] == [count] * len(token_ids)
    found = disagreements(model, token_ids, tokens)
    gaps = [each[-1] for each in found]
    mean = sum(gaps) / (count * len(token_ids))
    assert max(gaps, default=0) <= gap, found
    assert mean <= mean_gap, (mean, found)


def example_folder():
    """Returns SmolLM2-135M-Instruct as transformers reads it; the session writes it."""
    return Path(os.environ["FDK_EXAMPLE_MODEL"]) / "HuggingFaceTB" / "SmolLM2-135M-Instruct"


def copy_tokenizer(source, folder):
    """Copies all but weights and config.json."""
    for path in source.iterdir():
        if path.suffix != ".safetensors" and path.name not in ("config.json",):
            shutil.copy(path, folder / path.name)


def loaded(model, tensors):
    """Returns a copy of a model with quantised weights by name."""
    assert any(isinstance(value, QuantisedTensor) for value in tensors.values())
    return load_model(tensors, model)
