"""Tiny random models of transformers: their configurations, inputs, and how they are made."""

import torch
import transformers

VOCABULARY = 128
DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
VISION = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
}

# Configuration, its arguments, and arguments of FdkConfig.
MODELS = {
    "llama": ("Llama", DECODER, {}),
    "smollm": ("Llama", DECODER | {"tie_word_embeddings": True}, {}),
    "mistral": ("Mistral", DECODER | {"sliding_window": 16}, {}),
    "qwen2": ("Qwen2", DECODER, {}),
    "qwen3": ("Qwen3", DECODER | {"head_dim": 16}, {}),
    "gemma3": ("Gemma3", DECODER | {"head_dim": 16, "query_pre_attn_scalar": 16}, {}),
    "phi": ("Phi", DECODER, {}),
    "phi3": ("Phi3", DECODER, {}),
    "mixtral": ("Mixtral", DECODER | EXPERTS, {}),
    "qwen3_moe": (
        "Qwen3Moe",
        DECODER
        | {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "head_dim": 16,
        },
        {},
    ),
    "deepseek_v2": (
        "DeepseekV2",
        {name: DECODER[name] for name in DECODER if name != "num_key_value_heads"}
        | {
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 32,
            "q_lora_rank": None,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 16,
            "v_head_dim": 16,
            "topk_method": "greedy",
        },
        {},
    ),
    "gpt_oss": ("GptOss", DECODER | EXPERTS | {"head_dim": 16, "sliding_window": 16}, {}),
    "gpt2": (
        "GPT2",
        {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64},
        {"include": ("conv1d",)},
    ),
    "t5": (
        "T5",
        {
            "vocab_size": VOCABULARY,
            "d_model": 64,
            "d_ff": 128,
            "num_layers": 2,
            "num_heads": 4,
            "d_kv": 16,
            "decoder_start_token_id": 0,
        },
        {},
    ),
    "bert": (
        "Bert",
        {name: DECODER[name] for name in DECODER if not name.endswith("_token_id")},
        {},
    ),
    "whisper": (
        "Whisper",
        {
            "vocab_size": VOCABULARY,
            "d_model": 64,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 128,
            "decoder_ffn_dim": 128,
            "num_mel_bins": 16,
            "max_source_positions": 16,
            "max_target_positions": 32,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
        },
        {},
    ),
    "llava": ("Llava", {}, {}),
}
CLASSES = {
    "Gemma3": "Gemma3ForCausalLM",
    "GPT2": "GPT2LMHeadModel",
    "T5": "T5ForConditionalGeneration",
    "Bert": "BertForMaskedLM",
    "Whisper": "WhisperForConditionalGeneration",
    "Llava": "LlavaForConditionalGeneration",
}
CONFIGURATIONS = {"Gemma3": "Gemma3TextConfig"}


def model_class(name):
    """Returns the class of a model."""
    kind = MODELS[name][0]
    return getattr(transformers, CLASSES.get(kind, f"{kind}ForCausalLM"))


def make(name, dtype=torch.bfloat16, **changes):
    """Makes a model of random weights, in evaluation mode."""
    torch.manual_seed(0)
    kind, arguments, _ = MODELS[name]
    if name == "llava":
        config = transformers.LlavaConfig(
            vision_config=transformers.CLIPVisionConfig(**VISION),
            text_config=transformers.LlamaConfig(**DECODER),
            image_token_index=5,
            image_seq_length=4,
        )
    else:
        configuration = CONFIGURATIONS.get(kind, f"{kind}Config")
        config = getattr(transformers, configuration)(**arguments, **changes)
    return model_class(name)._from_config(config, dtype=dtype).eval()


def inputs(name, dtype=torch.bfloat16):
    """Returns the arguments of a call."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(6, VOCABULARY, (2, 7), generator=generator)
    if name == "t5":
        return {"input_ids": ids, "decoder_input_ids": ids[:, :3]}
    if name == "whisper":
        features = torch.randn(2, 16, 32, generator=generator).to(dtype)
        return {"input_features": features, "decoder_input_ids": ids[:, :3]}
    if name == "llava":
        pixels = torch.randn(2, 3, 28, 28, generator=generator).to(dtype)
        image = torch.full((2, 4), 5)
        return {"input_ids": torch.cat([image, ids], 1), "pixel_values": pixels}
    return {"input_ids": ids}
