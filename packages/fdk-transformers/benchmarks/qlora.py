"""Times QLoRA steps of a llama of random weights: fdk beside bitsandbytes and 16 bits.

    python packages/fdk-transformers/benchmarks/qlora.py --out out/qlora.jsonl
    python packages/fdk-transformers/benchmarks/qlora.py kmeans4-g64 bf16 --quick

A step is forward, backward and AdamW of LoRA adapters on all linear layers (rank 16, bf16), with
gradient checkpointing, for one sequence of 2048 tokens. Contenders take turns; each is built anew
for its turn, so that its peak memory is its own. Weights are random: their values do not change
the time. `--quick` takes a tiny llama and 64 tokens. Needs fdk-bench, peft and, for its contender,
bitsandbytes.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch import Tensor

from fdk_bench.cases import BITSANDBYTES, DTYPES
from fdk_bench.machine import default_device
from fdk_bench.models import ModelCase
from fdk_bench.random_llama import SIZES, build_llama

CONTENDERS = ("kmeans4-g64", BITSANDBYTES, "int4-g64", "bf16")
WARM_STEPS = 2


@dataclass(frozen=True)
class Run:
    """Settings of a run.

    Attributes:
        size: a size of ``SIZES``.
        device: ``cpu`` or ``cuda``.
        rank: rank of the adapters.
        batch, sequence: sequences of a step and their tokens.
        steps: steps timed in a turn.
        rounds: turns of each contender.
        compile: whether torch.compile compiles the decoder layers.
    """

    size: str
    device: str
    rank: int
    batch: int
    sequence: int
    steps: int
    rounds: int
    compile: bool


def model_of(contender: str, run: Run) -> Any:
    """Return a model with adapters, ready to train; the first ``lora_B`` are zeros."""
    case = ModelCase(
        run.size, 1, contender, "auto", "bf16", run.device, "lm_head", 1, 1, False, fused=False
    )
    if contender in DTYPES or contender == BITSANDBYTES:
        case = ModelCase(**asdict(case) | {"backend": "torch"})
    base = build_llama(case, [1]).model
    # PEFT turns checkpointing on only for models that say this of themselves, as loaded ones do.
    base.is_loaded_in_4bit = True
    base = prepare_model_for_kbit_training(
        base, gradient_checkpointing_kwargs={"use_reentrant": False}
    )
    if not base.is_gradient_checkpointing:
        raise RuntimeError(f"{contender}: PEFT left gradient checkpointing off")
    settings = LoraConfig(r=run.rank, lora_alpha=2 * run.rank, target_modules="all-linear")
    model = get_peft_model(base, settings).train()
    if run.compile:
        for layer in base.model.layers:
            layer.compile()
    return model


def step_seconds(model: Any, ids: Tensor, steps: int) -> list[float]:
    """Time training steps after ``WARM_STEPS`` that are not timed.

    Args:
        model: from ``model_of``.
        ids: ``[b, t]``, on the device.
        steps: number of steps.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimiser = torch.optim.AdamW(trained, lr=1e-4)
    times = []
    for _ in range(WARM_STEPS + steps):
        synchronise(ids.device)
        start = time.perf_counter()
        with torch.autocast(ids.device.type, torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        synchronise(ids.device)
        times.append(time.perf_counter() - start)
    if not loss.isfinite():
        raise RuntimeError(f"wanted a finite loss, got {loss.item()}")
    return times[WARM_STEPS:]


def synchronise(device: torch.device) -> None:
    """Wait for a GPU; nothing for a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def turn(contender: str, run: Run) -> tuple[list[float], int | None]:
    """Return the seconds of each step, and the peak of allocated bytes on a GPU."""
    gc.collect()
    on_gpu = run.device == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
    torch.manual_seed(0)
    model = model_of(contender, run)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    ids = torch.randint(SIZES[run.size].vocabulary, (run.batch, run.sequence), device=run.device)
    times = step_seconds(model, ids, run.steps)
    return times, torch.cuda.max_memory_allocated() if on_gpu else None


def measure(contenders: Sequence[str], run: Run) -> Iterator[dict[str, Any]]:
    """Yield a row for each contender: its fastest turn's median step, and its peak memory."""
    medians: dict[str, list[float]] = {name: [] for name in contenders}
    peaks: dict[str, int | None] = {}
    errors: dict[str, str] = {}
    for _ in range(run.rounds):
        for name in contenders:
            if name in errors:
                continue
            start = time.perf_counter()
            try:
                times, peaks[name] = turn(name, run)
            except Exception as error:  # the others go on
                errors[name] = f"{type(error).__name__}: {error}"
                continue
            medians[name].append(statistics.median(times))
            whole = time.perf_counter() - start
            said = f"{name}: {medians[name][-1]:.3f} s a step, {whole:.0f} s with the model"
            print(said, file=sys.stderr, flush=True)
    for name in contenders:
        row: dict[str, Any] = {"contender": name, **asdict(run), "error": errors.get(name)}
        if name not in errors:
            row |= {"step_seconds": min(medians[name]), "turns": medians[name]}
            row |= {"peak_bytes": peaks[name], "torch": torch.__version__}
            row["tokens_per_second"] = run.batch * run.sequence / row["step_seconds"]
        yield row


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print a line of JSON for each contender."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("contenders", nargs="*", default=CONTENDERS)
    parser.add_argument("--size", default="8b", choices=SIZES)
    parser.add_argument("--device", default=default_device(), choices=("cpu", "cuda"))
    for name, default in (("rank", 16), ("batch", 1), ("sequence", 2048)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--compile", action="store_true", help="compile the decoder layers")
    parser.add_argument("--quick", action="store_true", help="a tiny llama, one step")
    parser.add_argument("--out", type=Path, help="append the rows to a file")
    asked = vars(parser.parse_args(arguments))
    out, contenders = asked.pop("out"), asked.pop("contenders")
    if asked.pop("quick"):
        asked |= {"size": "tiny", "sequence": 64, "steps": 1, "rounds": 1}
    for row in measure(contenders, Run(**asked)):
        line = json.dumps(row)
        print(line)
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            with out.open("a", encoding="utf-8") as file:
                file.write(f"{line}\n")


if __name__ == "__main__":
    main()
