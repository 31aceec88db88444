"""Writes a llama of random weights for `cpu_decode.py`: a folder of transformers and a GGUF file.

    python packages/fdk-transformers/benchmarks/write_llama.py 1b FOLDER

The file is FOLDER/SIZE.Q4_1.gguf. Its linear layers are Q4_1 and its embedding, the output head
too, is Q8_0, as in llama.cpp's own files of that type. `--quick` writes a tiny one, and deletes it.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType, quants
from torch import Tensor
from transformers import LlamaForCausalLM

from fdk_bench.random_llama import NORM_EPS, ROTARY_BASE, SIZES, LlamaSize, llama_config

POSITIONS = 4096
PERIOD = 1 << 20  # weights repeat after so many random ones: quick, and no matter for speed
LAYERS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}


def main() -> None:
    """Reads the command line and writes both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("size", nargs="?", choices=SIZES)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--quick", action="store_true", help="a tiny model, in a temporary folder")
    options = parser.parse_args()
    if options.quick:
        with tempfile.TemporaryDirectory() as folder:
            write("tiny", Path(folder))
    elif options.folder is None:
        parser.error("wanted SIZE and FOLDER, or --quick")
    else:
        write(options.size, options.folder)


def write(name: str, folder: Path) -> None:
    """Writes the folder of a size, and the GGUF file into it."""
    model = make_llama(SIZES[name])
    model.save_pretrained(folder)
    write_gguf(model, SIZES[name], folder / f"{name}.Q4_1.gguf")


def make_llama(size: LlamaSize) -> LlamaForCausalLM:
    """Returns a llama in bfloat16 whose head is tied to its embedding."""
    config = llama_config(size, max_position_embeddings=POSITIONS, tie_word_embeddings=True)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model.to_empty(device="cpu").bfloat16()
    model.tie_weights()
    values = torch.randn(PERIOD, generator=torch.Generator().manual_seed(0)) * 0.02
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.fill_(1.0)
        else:
            repeats = -(-parameter.numel() // PERIOD)
            parameter.data.copy_(values.repeat(repeats)[: parameter.numel()].view_as(parameter))
    return model


def write_gguf(model: LlamaForCausalLM, size: LlamaSize, path: Path) -> None:
    """Writes the weights of a llama, without a vocabulary."""
    writer = GGUFWriter(path, "llama")
    writer.add_file_type(LlamaFileType.MOSTLY_Q4_1)
    writer.add_context_length(POSITIONS)
    writer.add_embedding_length(size.dim)
    writer.add_block_count(size.layers)
    writer.add_feed_forward_length(size.ffn)
    writer.add_head_count(size.heads)
    writer.add_head_count_kv(size.kv_heads)
    writer.add_layer_norm_rms_eps(NORM_EPS)
    writer.add_rope_dimension_count(size.head_dim)
    writer.add_rope_freq_base(ROTARY_BASE)
    writer.add_vocab_size(size.vocabulary)
    writer.add_tokenizer_model("no_vocab")

    def add(name: str, weight: Tensor, type: GGMLQuantizationType) -> None:
        data = quants.quantize(weight.detach().float().numpy(), type)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=type)

    types = GGMLQuantizationType
    add("token_embd", model.model.embed_tokens.weight, types.Q8_0)
    add("output_norm", model.model.norm.weight, types.F32)
    for index, block in enumerate(model.model.layers):
        for name, source in NORMS.items():
            add(f"blk.{index}.{name}", block.get_submodule(source).weight, types.F32)
        for name, source in LAYERS.items():
            add(f"blk.{index}.{name}", block.get_submodule(source).weight, types.Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
