"""Times vLLM's loading of a model from files: in 16 bits, packed by fdk, and quantised by it.

    python packages/fdk-vllm/benchmarks/loading.py --folder FOLDER --out out/loading.jsonl

FOLDER gets a llama of random weights, once in 16 bits and once packed (22 GB for 8B); a second run
finds them there. Without --folder they are temporary. Each contender, in turns, runs in a process
of its own, and files are in the page cache: what is timed is the work, not the disk. Seconds are
those of `BaseModelLoader.load_model`: the model is made, read and packed. Engines are eager: graphs
are captured after loading.

Needs vLLM and transformers. `--quick` loads a tiny model, on a CPU too.
"""

import argparse
import importlib.util
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from serving import SHAPES, config_of, record, report, result_of

CONTENDERS = ("bf16", "packed", "quantised")


def write_checkpoints(folder: Path, shape: str, format: str) -> None:
    """Writes the 16-bit and the packed checkpoint."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from fdk_formats import quantise_model, save_model

    for name, contender in (("bf16", "bf16"), ("packed", f"fdk:{format}")):
        (folder / name).mkdir(parents=True, exist_ok=True)
        config = json.dumps(config_of(SHAPES[shape], contender))
        (folder / name / "config.json").write_text(config)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        config = AutoConfig.from_pretrained(folder / "bf16")
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder / "bf16")
    model = quantise_model(model, format, fuse=True, inplace=True, progress=False)
    save_model(folder / "packed" / "model.safetensors", model)


def load(folder: Path, contender: str, format: str) -> float:
    """Starts an engine in this process; returns the seconds that its model took to load."""
    from vllm import LLM
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    seconds = 0.0
    original = BaseModelLoader.load_model

    def timed_load(self: Any, *args: Any, **named: Any) -> Any:
        nonlocal seconds
        start = time.perf_counter()
        model = original(self, *args, **named)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        return model

    BaseModelLoader.load_model = timed_load
    options: dict[str, Any] = {}
    if contender == "quantised":
        settings = {"quant_method": "fdk", "format": format}
        options["hf_overrides"] = {"quantization_config": settings}
    LLM(
        model=str(folder / ("packed" if contender == "packed" else "bf16")),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=64,
        max_num_seqs=1,
        enforce_eager=True,
        **options,
    )
    return seconds


def work(arguments: argparse.Namespace) -> dict[str, Any]:
    """Does the task of a process: writes the checkpoints, or loads one and times it."""
    if arguments.task == "write":
        write_checkpoints(arguments.folder, arguments.shape, arguments.format)
        return {}
    return {"s": round(load(arguments.folder, arguments.task, arguments.format), 2)}


def measure(folder: Path, arguments: argparse.Namespace) -> None:
    """Measures the contenders in turns."""
    folder = folder / f"{arguments.shape}-{arguments.format}"
    command = [sys.executable, __file__, "--folder", str(folder)]
    command += ["--shape", arguments.shape, "--format", arguments.format, "--task"]
    if not (folder / "packed" / "model.safetensors").exists():
        written = result_of([*command, "write"])
        if "error" in written:
            raise SystemExit(f"loading: no checkpoints in {folder}: {written['error']}")
    for path in folder.glob("*/*.safetensors"):
        with path.open("rb") as opened:
            while opened.read(1 << 24):
                pass
    for contender in CONTENDERS * arguments.rounds:
        row = {"contender": contender, "shape": arguments.shape, "format": arguments.format}
        record(row | result_of([*command, contender]), arguments.out)


def main() -> None:
    """Measures each contender a few times."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, help="where the checkpoints are, or are to be")
    parser.add_argument("--shape", choices=SHAPES, help="default: 8b, or tiny with --quick")
    parser.add_argument("--format", default="kmeans4-g64")
    parser.add_argument("--rounds", type=int, help="default: 2, or 1 with --quick")
    parser.add_argument("--out", type=Path, help="file that rows are added to")
    parser.add_argument("--quick", action="store_true", help="a tiny model, one round")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.shape = arguments.shape or ("tiny" if arguments.quick else "8b")
    arguments.rounds = arguments.rounds or (1 if arguments.quick else 2)
    if arguments.task:
        report(lambda: work(arguments))
    if importlib.util.find_spec("vllm") is None:
        print("loading: vLLM is not installed here: nothing was measured")
        return
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the model is loaded where it is timed
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    if arguments.quick:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    with tempfile.TemporaryDirectory() as temporary:
        measure(arguments.folder or Path(temporary), arguments)


if __name__ == "__main__":
    main()
