"""Times decoding on the CPU: the native step, `generate`, and llama.cpp's llama-bench, in turns.

    python packages/fdk-transformers/benchmarks/cpu_decode.py MODEL --format int4-g32 kmeans4-g64 \
        --llama-bench build/bin/llama-bench --gguf SmolLM2-135M-Instruct.Q4_1.gguf
    ... --batch 4 --activations int8

MODEL is a folder of a llama-kind model of transformers; `--quick` takes a tiny random one. Every
round runs each engine once, so that a busy machine slows all of them; a line has the median and the
best round. `floor` is the rate at which the step's weights can be read from memory, from
`fdk_cpu.read_sum` in the same rounds.
llama.cpp rounds activations to 8 bits; the step does so with `--activations int8` only. Needs
fdk-bench and gguf.
"""

import argparse
import json
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from write_llama import make_llama

import fdk_cpu
from fdk_bench.random_llama import SIZES
from fdk_formats import QuantisedLinear, quantise_model
from fdk_transformers.cpu_step import CpuStep

PROMPT = 8
READ_BYTES = 192 << 20


def main() -> None:
    """Reads the command line and measures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--format", nargs="+", default=["int4-g32"])
    parser.add_argument("--head", help="format of lm_head, and of an embedding tied to it")
    parser.add_argument("--activations", choices=("float", "int8"), default="float")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=32, help="tokens per engine and round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--generate", action="store_true", help="time model.generate too")
    parser.add_argument("--llama-bench", type=Path)
    parser.add_argument("--gguf", type=Path, nargs="*", default=[])
    parser.add_argument("--quick", action="store_true", help="a tiny model, one round")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.quick:
        options.rounds = 1
        with tempfile.TemporaryDirectory() as folder:
            options.model = Path(folder)
            make_llama(SIZES["tiny"]).save_pretrained(folder)
            measure(options)
    elif options.model is None:
        parser.error("wanted MODEL, or --quick")
    else:
        measure(options)


def measure(options: argparse.Namespace) -> None:
    """Runs the rounds and prints a line for each engine."""
    engines: dict[str, Callable[[], float]] = {}
    weights: dict[str, int] = {}
    for format in options.format:
        model = make_model(options.model, format, options.head, options.activations)
        name = f"step {format}"
        engines[name] = time_step(model, options.batch, options.tokens)
        weights[name] = weight_bytes(model)
        if options.generate:
            engines[f"generate {format}"] = time_generate(model, options.batch, options.tokens)
    for file in options.gguf:
        engines[f"llama.cpp {file.stem}"] = time_llama_bench(options.llama_bench, file, options)

    rates: dict[str, list[float]] = {name: [] for name in engines}
    bandwidths = []
    for _ in range(options.rounds):
        bandwidths.append(read_bandwidth())
        for name, engine in engines.items():
            rates[name].append(engine())
    for name, found in rates.items():
        row = {
            "engine": name,
            "batch": options.batch,
            "threads": options.threads,
            "activations": "int8" if name.startswith("llama.cpp") else options.activations,
            "tokens_per_s": round(statistics.median(found), 1),
            "best": round(max(found), 1),
        }
        if name in weights:
            floor = statistics.median(bandwidths) / weights[name] * options.batch
            row |= {"weights_mb": round(weights[name] / 1e6, 1), "floor": round(floor, 1)}
        print(json.dumps(row), flush=True)


def make_model(folder: Path, format: str, head: str | None, activations: str) -> torch.nn.Module:
    """Loads a model and quantises it; `none` leaves it as it is."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    if format != "none":
        rules = (
            {"overrides": {"lm_head|embed_tokens": head}, "include": ["embedding"]} if head else {}
        )
        model = quantise_model(model, format, progress=False, fuse=True, **rules)  # type: ignore[arg-type]
    for module in model.modules():
        if isinstance(module, QuantisedLinear):
            module.activations = activations
    return model


def weight_bytes(model: torch.nn.Module) -> int:
    """Returns the bytes that a token reads: all linear layers, the head included."""
    total = 0
    for module in model.modules():
        if isinstance(module, QuantisedLinear):
            total += sum(tensor.nbytes for tensor in module.quantised.tensors().values())
        elif isinstance(module, torch.nn.Linear):
            total += module.weight.nbytes
    return total


def time_step(model: torch.nn.Module, batch: int, count: int) -> Callable[[], float]:
    """Returns a function that decodes greedily and returns tokens per second."""
    step = CpuStep(model, batch, PROMPT + count)
    prompt = torch.arange(100, 100 + PROMPT).repeat(batch, 1)

    def run() -> float:
        step.reset()
        tokens: Tensor = step.prefill(prompt).argmax(-1)
        start = time.perf_counter()
        for _ in range(count):
            tokens = step.decode_greedy(tokens)
        return batch * count / (time.perf_counter() - start)

    return run


def time_generate(model: torch.nn.Module, batch: int, count: int) -> Callable[[], float]:
    """Returns a function that times `model.generate`, less its prompt."""
    prompt = torch.arange(100, 100 + PROMPT).repeat(batch, 1)

    def seconds(new: int) -> float:
        start = time.perf_counter()
        model.generate(prompt, max_new_tokens=new, do_sample=False, eos_token_id=-1)  # type: ignore[operator]
        return time.perf_counter() - start

    return lambda: batch * count / (seconds(count + 1) - seconds(1))


def time_llama_bench(program: Path, file: Path, options: argparse.Namespace) -> Callable[[], float]:
    """Returns a function that runs llama-bench once."""

    def run() -> float:
        command = [program, "-m", file, "-p", "0", "-n", str(options.tokens), "-r", "1"]
        command += ["-t", str(options.threads), "-o", "json"]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True)
        rate: float = json.loads(done.stdout)[0]["avg_ts"]
        return rate

    return run


def read_bandwidth() -> float:
    """Returns the bytes per second of a read from memory, the best of three."""
    data, best = torch.ones(READ_BYTES, dtype=torch.uint8), 0.0
    for _ in range(3):
        start = time.perf_counter()
        fdk_cpu.read_sum(data)
        best = max(best, READ_BYTES / (time.perf_counter() - start))
    return best


if __name__ == "__main__":
    main()
