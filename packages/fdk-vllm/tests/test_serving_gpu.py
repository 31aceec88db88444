"""Models served on GPUs in bf16, compiled and with CUDA graphs, as servers run them.

They need vLLM for CUDA, and two GPUs for some: `python -m pytest -m gpu -W ignore
packages/fdk-vllm/tests`.
"""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest
import serving
import torch
from serving import TINY, packed_folder, prompts, requested

pytest.importorskip("vllm", reason="needs vLLM for CUDA")

pytestmark = pytest.mark.gpu
ON_TWO_GPUS = pytest.mark.skipif(
    torch.cuda.device_count() < 2,
    reason=f"needs two GPUs, torch finds {torch.cuda.device_count()}",
)
PROMPTS = prompts(8, TINY["vocab_size"])
COUNT = 16  # tokens of a prompt
FORMAT = "kmeans4-g64"
# Heads of 64 channels, which FlashAttention has kernels for.
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
EXPERTS = serving.MIXTURES["Qwen3Moe"] | {"head_dim": 64}
# See ``assert_chosen``. In 40 draws of 8 prompts, transformers in bf16 on a CPU has 0.14 and 0.003;
# in 8 with experts, whose choice a rounded logit of the router changes, 0.89 and 0.011.
GAPS = {"gap": 0.5, "mean_gap": 0.006}
GAPS_OF_EXPERTS = {"gap": 2.0, "mean_gap": 0.02}


@pytest.fixture(scope="module", autouse=True)
def processes(environment):
    """Gives each engine a process, which ends with it; a forked one would hang in OpenMP."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
        patch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        patch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # for functions
        yield


def tiny_model(kind="Llama", **changes):
    return serving.tiny_model(kind, **HEADS | changes)


def quantised(model, format, **options):
    """Quantises a model that stays on the CPU, where no kernels are needed."""
    return serving.quantised(model, format, backend="reference", **options)


def engine(folder, **options):
    """Starts vLLM as a server does, with graphs of a few sizes."""
    defaults = {
        "dtype": "bfloat16",
        "enforce_eager": False,
        "gpu_memory_utilization": 0.2,
        "kv_cache_memory_bytes": 1 << 28,  # not what is free, which other processes change
        "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8]},
    }
    return serving.engine(folder, **defaults | options)


def assert_likely(model, token_ids, tokens):
    """Checks that tokens are as likely to a model as those that transformers chooses in bf16."""
    has_experts = hasattr(model.config, "num_experts")
    serving.assert_chosen(
        model, token_ids, tokens, COUNT, **(GAPS_OF_EXPERTS if has_experts else GAPS)
    )


def assert_likely_tokens(model, llm, token_ids, **options):
    """Checks vLLM's greedy tokens; returns them."""
    tokens = serving.generate(llm, token_ids, COUNT, **options)
    assert_likely(model, token_ids, tokens)
    return tokens


def backends_of_first_product(worker):
    return serving.first_product(worker.get_model()).backends


@pytest.mark.parametrize(
    ("kind", "changes", "options", "backends"),
    [
        # One product of q, k and v; three in a row, and a kernel that reads all.
        ("Llama", {}, {"format": FORMAT, "fuse": True}, ["marlin-lut"]),
        ("Llama", {}, {"format": FORMAT}, ["marlin-lut"] * 3),
        ("Llama", {}, {"format": "int1-g64"}, ["marlin"]),
        ("Llama", {}, {"format": "kmeans2-g64-hadamard", "fuse": True}, ["marlin-lut"]),
        ("Llama", {}, {"format": "nf4-g16"}, ["triton"]),
        ("Qwen2", {}, {"format": "int4-g64"}, ["marlin"]),  # has biases
        ("Qwen3Moe", EXPERTS, {"format": FORMAT, "fuse": True}, ["marlin-lut"]),
        ("Llama", {}, {"format": "int8-g64", "skip": None, "include": ["embedding"]}, ["marlin"]),
    ],
    ids=["fused", "separate", "1-bit", "rotated", "triton", "bias", "experts", "head"],
)
def test_graphs_choose_the_tokens_of_transformers(kind, changes, options, backends, tmp_path):
    model = quantised(tiny_model(kind, **changes), **options)
    with engine(packed_folder(tmp_path, model, options["format"])) as llm:
        assert llm.collective_rpc(backends_of_first_product) == [backends]
        assert_likely_tokens(model, llm, PROMPTS)
        alone = [serving.generate(llm, [prompt], COUNT)[0] for prompt in PROMPTS]
        assert_likely(model, PROMPTS, alone)


def test_quantised_while_loading(tmp_path):
    model = tiny_model()
    with engine(serving.plain_folder(tmp_path, model), **requested(FORMAT)) as llm:
        assert_likely_tokens(quantised(model, FORMAT, fuse=True), llm, PROMPTS)


@pytest.mark.parametrize("format", [FORMAT, "nf4-g64-hadamard"])
def test_sleep(format, tmp_path):
    """Level 1 keeps weights on the host; level 2 drops them, and constants of the same pool."""
    model = tiny_model()
    folder = serving.plain_folder(tmp_path, model)
    model = quantised(model, format, fuse=True)
    with engine(folder, enable_sleep_mode=True, **requested(format)) as llm:
        assert_likely_tokens(model, llm, PROMPTS)
        llm.sleep(level=1)
        llm.wake_up()
        assert_likely_tokens(model, llm, PROMPTS)
        llm.sleep(level=2)
        llm.wake_up(tags=["weights"])
        llm.collective_rpc("reload_weights")
        llm.wake_up(tags=["kv_cache"])
        assert_likely_tokens(model, llm, PROMPTS)


def test_reloaded_weights_are_what_graphs_read(tmp_path):
    models, folders = serving.two_checkpoints(
        tmp_path, tiny_model(), tiny_model(), "int4-g64", backend="reference"
    )
    with engine(folders[0]) as llm:
        assert_likely_tokens(models[0], llm, PROMPTS)
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folders[1])})
        assert llm.reset_prefix_cache()
        assert_likely_tokens(models[1], llm, PROMPTS)


def test_adapter_over_quantised_layers(tmp_path):
    from peft import PeftModel
    from vllm.lora.request import LoRARequest

    base = quantised(tiny_model(), FORMAT)
    folder = packed_folder(tmp_path / "base", base, FORMAT)
    adapter = str(serving.write_adapter(tmp_path / "adapter", tiny_model()))
    model = PeftModel.from_pretrained(base, adapter).eval()
    with engine(folder, enable_lora=True, max_lora_rank=8) as llm:
        request = LoRARequest("adapter", 1, adapter)
        adapted = assert_likely_tokens(model, llm, PROMPTS, lora_request=request)
        with model.disable_adapter():
            assert assert_likely_tokens(model, llm, PROMPTS) != adapted


@pytest.mark.parametrize(
    "options",
    [
        {"enable_prefix_caching": True},
        {
            "speculative_config": {
                "method": "ngram",
                "num_speculative_tokens": 3,
                "prompt_lookup_max": 2,
            }
        },
    ],
    ids=["prefixes", "speculator"],
)
def test_what_vllm_does_around_the_layers(options, tmp_path):
    model = quantised(tiny_model(), "int4-g64")
    repeated = [prompt * 3 for prompt in PROMPTS]
    with engine(packed_folder(tmp_path, model, "int4-g64"), **options) as llm:
        for _ in range(2):
            assert_likely_tokens(model, llm, repeated)


@ON_TWO_GPUS
@pytest.mark.parametrize("split", ["tensor_parallel_size", "pipeline_parallel_size"])
@pytest.mark.parametrize("kind", ["Llama", "Qwen3Moe"])
def test_two_gpus(kind, split, tmp_path):
    model = quantised(tiny_model(kind, **(EXPERTS if kind == "Qwen3Moe" else {})), FORMAT)
    options = {split: 2, "distributed_executor_backend": "mp"}
    with engine(packed_folder(tmp_path, model, FORMAT), **options) as llm:
        assert_likely_tokens(model, llm, PROMPTS)


def log_probabilities(folder):
    """Returns those of each prompt's next tokens, of prompts together and of each alone."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=8, logprobs=1, detokenize=False)

    def ask(llm, token_ids):
        inputs = [{"prompt_token_ids": ids} for ids in token_ids]
        found = llm.generate(inputs, sampling, use_tqdm=False)
        return [output.outputs[0].cumulative_logprob for output in found]

    with engine(folder) as llm:
        return ask(llm, PROMPTS), [ask(llm, [prompt])[0] for prompt in PROMPTS]


def test_batch_invariance(tmp_path, monkeypatch):
    """A request's answer does not depend on the others, to the last bit."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")  # read once by a process
    folder = packed_folder(tmp_path, quantised(tiny_model(), FORMAT, fuse=True), FORMAT)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        together, alone = process.submit(log_probabilities, folder).result()
    assert together == alone
