"""Times decoding and prefill of a model of random weights in vLLM: fdk beside its own kernels.

    python packages/fdk-vllm/benchmarks/serving.py --out out/vllm.jsonl
    python packages/fdk-vllm/benchmarks/serving.py bf16 fdk:int1-g64 marlin:64 --shape 70b --tp 2
    python packages/fdk-vllm/benchmarks/serving.py --shape qwen3-30b-a3b

Each contender runs in a process of its own, in turns on one machine, and writes one line of JSON.
Contenders: `bf16`; `fdk:FORMAT`, or `fdk:FORMAT+FORMAT` with a format for the head; of 4 bits
`machete:GROUP`, `marlin:GROUP` and `humming:GROUP` over GPTQ's layout, and `bitsandbytes`. A row
names the kernel that ran: vLLM may choose another than was asked for. One that fails gives a row
with its error. Shapes are llamas, and a mixture of experts, whose router and head stay in 16 bits.

`--checkpoint FOLDER` names 16-bit weights of the shape, such as `loading.py` writes, for
bitsandbytes, which has no random ones.

With `--profile` a row has, for each number of sequences, the microseconds of the kernels of a step
(of ops on a CPU), and the milliseconds of a replay of its CUDA graph: all layers, without the host
and the head. Otherwise the engine has a process of its own.

Decoding: (time of 272 tokens - time of 16) / 256, the best of three each, by number of sequences.
Prefill: 16 prompts of 2048 tokens. Weights are random: their values do not change the time.

Needs vLLM. `--quick` runs a tiny llama and a tiny mixture, on a CPU too; without vLLM it does
nothing.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

CONTENDERS = (
    "bf16",
    "fdk:kmeans4-g64",
    "fdk:int4-g64",
    "fdk:kmeans3-g64",
    "fdk:kmeans2-g64",
    "fdk:int1-g64",
    "fdk:kmeans4-g64+int8-g64",
    "machete:128",
    "marlin:64",
    "humming:128",
    "bitsandbytes",
)
MIXTURE_CONTENDERS = (
    "bf16",
    "fdk:kmeans4-g64",
    "fdk:int4-g64",
    "fdk:kmeans3-g64",
    "marlin:64",
    "marlin:128",
)
QUICK_CONTENDERS = ("bf16", "fdk:kmeans4-g64", "fdk:int4-g64+int8-g64")
# Kernels that vLLM would choose over Marlin for GPTQ of 4 bits.
OVER_MARLIN = "MacheteLinearKernel,CutlassW4A8LinearKernel,AllSparkLinearKernel"
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TIMEOUT = 900
PROFILED, PROFILED_STEPS = 20, 64  # kernels of a row, and the steps that their times are means of
REPLAYS = 100
TOKENS = ("tok_s_1", "tok_s_16", "tok_s_64", "prefill_tok_s")
COLUMNS = ("shape", *TOKENS, "ms_step_1", "start_s", "kernel", "experts")


@dataclass(frozen=True)
class Shape:
    """Sizes of a llama, or of a Qwen3-MoE, whose experts have ``intermediate`` inputs."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    head: int | None = None
    experts: int = 0
    top_k: int = 0


SHAPES = {
    "8b": Shape(4096, 14336, 32, 32, 8, 128256),
    "70b": Shape(8192, 28672, 80, 64, 8, 128256),
    "qwen3-30b-a3b": Shape(2048, 768, 48, 32, 4, 151936, head=128, experts=128, top_k=8),
    "tiny": Shape(256, 512, 2, 4, 2, 2048),
    "tiny-moe": Shape(256, 128, 2, 4, 2, 2048, head=64, experts=8, top_k=2),
}
QUICK_SHAPES = ("tiny", "tiny-moe")


@dataclass(frozen=True)
class Load:
    """The timed work: numbers of sequences, tokens, and the prefill."""

    sequences: tuple[int, ...] = (1, 16, 64)
    prompt: int = 128
    short: int = 16
    long: int = 272
    prefill: tuple[int, int] = (16, 2048)
    repeats: int = 3


QUICK_LOAD = Load((1, 4), 16, 2, 6, (2, 64), 1)


def config_of(shape: Shape, contender: str) -> dict[str, Any]:
    """Returns config.json of the model for a contender."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "rope_theta": 500000.0,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    if shape.experts:
        config |= {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "head_dim": shape.head,
            "num_experts": shape.experts,
            "num_experts_per_tok": shape.top_k,
            "moe_intermediate_size": shape.intermediate,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    kind, _, argument = contender.partition(":")
    if kind == "fdk":
        format, _, head = argument.partition("+")
        config["quantization_config"] = {"quant_method": "fdk", "format": format}
        if head:
            config["quantization_config"]["overrides"] = {r"lm_head$": head}
    elif kind in ("machete", "marlin", "humming"):
        config["quantization_config"] = {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": int(argument),
            "desc_act": False,
            "sym": True,
            "lm_head": False,
            # Without it, vLLM looks for a checkpoint, finds none and quantises nothing.
            "modules_in_block_to_quantize": [
                f"{'self_attn' if name[0] in 'qkvo' else 'mlp'}.{name}" for name in LAYERS
            ],
        }
    elif kind not in ("bf16", "bitsandbytes"):
        raise SystemExit(f"serving: no contender {contender}; there are {', '.join(CONTENDERS)}")
    return config


def kernels_of(model: Any) -> dict[str, str]:
    """Returns the kernels of the first queries, keys and values, and of the first experts."""
    layer = model.model.layers[0]
    found = {"kernel": kernel_of(layer.self_attn.qkv_proj.quant_method)}
    for module in layer.modules():
        if type(module).__name__ == "RoutedExperts":
            found["experts"] = kernel_of(module.quant_method)
    return found


def kernel_of(method: Any) -> str:
    """Returns the name of the kernel of a method of vLLM."""
    product = getattr(getattr(method, "weights", None), "product", None)
    if product is not None:
        return "+".join(product.backends)
    moe = getattr(method, "moe_kernel", None)
    kernel = getattr(method, "kernel", None) if moe is None else moe.fused_experts
    return type(method if kernel is None else kernel).__name__


def kernel_times(work: Callable[[], Any]) -> Counter[str]:
    """Returns the microseconds of each kernel that work in this process starts; of ops on a CPU."""
    import torch

    kind = torch.profiler.ProfilerActivity
    on_gpu = torch.cuda.is_available()
    with torch.profiler.profile(activities=[kind.CUDA if on_gpu else kind.CPU]) as profile:
        work()
    name = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    return Counter({event.key: getattr(event, name) for event in profile.key_averages()})


def ms_of_graph(llm: Any, sequences: int) -> float | None:
    """Returns the milliseconds of a replay of a step's graph; None where vLLM has made none."""
    import torch

    runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
    graphs = getattr(getattr(runner, "cudagraph_manager", None), "graphs", {})
    for step, graph in graphs.items():
        if step.num_tokens == sequences and step.cg_mode.name == "FULL":
            graph.replay()
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            events[0].record()
            for _ in range(REPLAYS):
                graph.replay()
            events[1].record()
            torch.cuda.synchronize()
            return float(events[0].elapsed_time(events[1])) / REPLAYS
    return None


def measure(arguments: argparse.Namespace, load: Load) -> dict[str, Any]:
    """Starts vLLM and times it; returns a row."""
    contender, shape, tensor_parallel = arguments.one, arguments.shape, arguments.tp
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # apply_model sends a function
    if arguments.profile:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    kind = contender.partition(":")[0]
    if kind == "marlin":
        os.environ["VLLM_DISABLED_KERNELS"] = OVER_MARLIN
    began = time.perf_counter()
    import serving as importable  # processes of vLLM find functions by the name of their module
    import torch
    import vllm
    from vllm import LLM, SamplingParams

    on_gpu = torch.cuda.is_available()
    options: dict[str, Any] = {"tensor_parallel_size": tensor_parallel}
    if kind in ("humming", "bitsandbytes"):
        options["quantization"] = kind
    if on_gpu:
        sizes = [1, 2, 4, 8, 16, 32, 64]
        options["compilation_config"] = {"cudagraph_capture_sizes": sizes}
        options["gpu_memory_utilization"] = 0.85
    else:
        options["enforce_eager"] = True
    batch, length = load.prefill
    profiled = load.short + PROFILED_STEPS  # tokens
    with tempfile.TemporaryDirectory() as folder:
        config = json.dumps(config_of(SHAPES[shape], contender))
        (Path(folder) / "config.json").write_text(config)
        is_stored = kind == "bitsandbytes" and arguments.checkpoint
        llm = LLM(
            model=str(arguments.checkpoint) if is_stored else folder,
            load_format="bitsandbytes" if is_stored else "dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=max(length, load.prompt + max(load.long, profiled)) + 16,
            max_num_seqs=max(load.sequences),
            enable_prefix_caching=False,
            **options,
        )
    row: dict[str, Any] = {
        "contender": contender,
        "shape": shape,
        "tp": tensor_parallel,
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "start_s": round(time.perf_counter() - began, 1),
    } | llm.apply_model(importable.kernels_of)[0]
    numbers = random.Random(0)

    def run(sequences: int, new: int, prompt: int) -> float:
        prompts = [
            {"prompt_token_ids": [numbers.randrange(10, 2000) for _ in range(prompt)]}
            for _ in range(sequences)
        ]
        greedy = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        llm.generate(prompts, greedy, use_tqdm=False)
        return time.perf_counter() - start

    for sequences in load.sequences:
        run(sequences, load.short, load.prompt)
        steps = load.long - load.short
        times = [
            [run(sequences, new, load.prompt) for new in (load.long, load.short)]
            for _ in range(load.repeats)
        ]
        seconds = min(long for long, _ in times) - min(short for _, short in times)
        row[f"ms_step_{sequences}"] = round(seconds / steps * 1e3, 3)
        row[f"tok_s_{sequences}"] = round(sequences * steps / seconds, 1)
    run(batch, 1, length)
    seconds = min(run(batch, 1, length) for _ in range(load.repeats))
    row["prefill_tok_s"] = round(batch * length / seconds)
    for sequences in load.sequences if arguments.profile else ():
        long, short = (
            kernel_times(partial(run, sequences, new, load.prompt))
            for new in (profiled, load.short)
        )
        long.subtract(short)
        row[f"kernels_us_step_{sequences}"] = {
            name[:80]: round(us / PROFILED_STEPS, 1) for name, us in long.most_common(PROFILED)
        }
        row[f"busy_us_step_{sequences}"] = round(long.total() / PROFILED_STEPS, 1)
        # Its inputs are those of the last step.
        if (milliseconds := ms_of_graph(llm, sequences)) is not None:
            row[f"ms_graph_{sequences}"] = round(milliseconds, 3)
    return row


def run_apart(contender: str, shape: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measures a contender in a process of its own, which leaves no memory behind."""
    command = [sys.executable, __file__, "--one", contender, "--shape", shape]
    command += ["--tp", str(arguments.tp), *(["--quick"] if arguments.quick else [])]
    command += ["--profile"] if arguments.profile else []
    command += ["--checkpoint", str(arguments.checkpoint)] if arguments.checkpoint else []
    return {"contender": contender, "shape": shape, "tp": arguments.tp} | result_of(command)


def result_of(command: list[str]) -> dict[str, Any]:
    """Runs a command that calls ``report``, in a process of its own, which leaves no memory in use.

    Returns:
        What it reports, or its ``error``.
    """
    # A session: vLLM's processes outlive one that fails.
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    timer = threading.Timer(TIMEOUT, os.killpg, (process.pid, signal.SIGKILL))
    timer.start()
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line.strip())
        if line.startswith(("RESULT ", "FAILED")):
            break
    timer.cancel()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if lines and lines[-1].startswith("RESULT "):
        result: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
        return result
    return {"error": first_error(lines)}


def report(work: Callable[[], dict[str, Any]]) -> None:
    """Prints the result of work, or its error, for ``result_of``, which then ends this process."""
    try:
        print(f"\nRESULT {json.dumps(work())}", flush=True)
    except Exception:
        traceback.print_exc(file=sys.stdout)
        print("FAILED", flush=True)
    time.sleep(TIMEOUT)


def record(row: dict[str, Any], out: Path | None) -> None:
    """Prints a row, and adds it to a file."""
    print(json.dumps(row), flush=True)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")


def first_error(lines: list[str]) -> str:
    """Returns the first exception in the output of a process: later ones only follow from it."""
    found = [line for line in lines if re.search(r"\b\w*(Error|Exception): \S", line)]
    return (found or [line for line in reversed(lines) if line] or ["no output"])[0][-300:]


def table(rows: list[dict[str, Any]]) -> str:
    """Returns rows as a Markdown table."""
    columns = [column for column in COLUMNS if any(column in row for row in rows)]
    lines = [f"| contender | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for row in rows:
        cells = [str(row.get(column, "")) for column in columns]
        if "error" in row:
            cells[-1] = row["error"]
        lines.append(f"| {row['contender']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measures the contenders named, or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("contenders", nargs="*")
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--tp", type=int, default=1, help="GPUs")
    parser.add_argument("--out", type=Path, help="file that rows are added to")
    parser.add_argument("--checkpoint", type=Path, help="16-bit weights, for bitsandbytes")
    parser.add_argument("--quick", action="store_true", help="tiny models, a few tokens")
    parser.add_argument("--profile", action="store_true", help="add the kernels of a step, --tp 1")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.profile and arguments.tp > 1:
        parser.error(f"--profile sees kernels of one GPU: wanted --tp 1, got {arguments.tp}")
    if arguments.checkpoint and {arguments.one, *arguments.contenders} - {None, "bitsandbytes"}:
        parser.error("--checkpoint is for bitsandbytes alone: the others have random weights")
    if importlib.util.find_spec("vllm") is None:
        print("serving: vLLM is not installed here: nothing was measured")
        return
    load = QUICK_LOAD if arguments.quick else Load()
    if arguments.quick:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    if arguments.one:
        report(lambda: measure(arguments, load))
    rows = []
    for shape in QUICK_SHAPES if arguments.quick else (arguments.shape,):
        usual = MIXTURE_CONTENDERS if SHAPES[shape].experts else CONTENDERS
        for contender in arguments.contenders or (QUICK_CONTENDERS if arguments.quick else usual):
            rows.append(run_apart(contender, shape, arguments))
            record(rows[-1], arguments.out)
    print(table(rows))


if __name__ == "__main__":
    main()
