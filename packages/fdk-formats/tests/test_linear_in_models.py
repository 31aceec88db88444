"""Quantised layers in models whose code asks for nn.Linear's attributes."""

import copy

import pytest
import torch
from torch import nn

from fdk_formats import QuantisedLinear, quantise_model


def layer(n=24, k=64, dtype=torch.float32, **settings):
    torch.manual_seed(0)
    made = QuantisedLinear.from_linear(
        nn.Linear(k, n).to(dtype), "int8-g32", backend="reference", **settings
    )
    return made


def test_input_by_keyword():
    x = torch.randn(3, 64)
    assert torch.equal(layer()(input=x), layer()(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.bfloat16])
def test_autocast_rounds_as_nn_linear(dtype, x_dtype, bias_dtype):
    quantised, x = layer(dtype=torch.bfloat16), torch.randn(3, 64, dtype=x_dtype)
    quantised.bias.data = quantised.bias.data.to(bias_dtype)
    plain = nn.Linear(64, 24)
    plain.weight = nn.Parameter(quantised.dequantise(dtype), requires_grad=False)
    plain.bias = nn.Parameter(quantised.bias.detach().clone())
    with torch.autocast("cpu", dtype):
        y, wanted = quantised(x), plain(x)
    assert y.dtype == wanted.dtype == dtype
    assert torch.equal(y, wanted)
    y.float().sum().backward()
    assert quantised.bias.grad.dtype == bias_dtype


@pytest.mark.parametrize("name", ["T5", "MT5"])
def test_t5(name):
    import transformers

    config = getattr(transformers, f"{name}Config")(
        d_model=64, d_ff=128, num_layers=1, num_heads=4, d_kv=16, vocab_size=256
    )
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).half().eval()
    ids = torch.ones(1, 3, dtype=torch.long)
    model = quantise_model(model, "int8-g32", backend="reference", progress=False)
    logits = model(input_ids=ids, decoder_input_ids=ids).logits
    assert logits.dtype == torch.float16
    assert logits.isfinite().all()


def test_weight_of_mamba():
    dt_proj, x = layer(), torch.randn(64, 5)
    assert torch.equal(dt_proj.weight @ x, dt_proj.dequantise() @ x)


def test_fast_path_of_the_transformer_encoder():
    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(64, 4, 128, dropout=0, batch_first=True).eval()
    quantised = quantise_model(encoder, "int8-g32", backend="reference", progress=False)
    kinds = {name: type(module) for name, module in quantised.named_modules()}
    assert kinds["linear1"] is kinds["linear2"] is QuantisedLinear
    x = torch.randn(2, 5, 64)
    wanted = encoder(x)
    with torch.inference_mode():
        y = quantised(x)
    assert 0 < (y - wanted).norm() / wanted.norm() < 0.02


def test_kbit_training_of_peft():
    from peft import prepare_model_for_kbit_training
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    torch.manual_seed(0)
    config = GPTNeoXConfig(
        vocab_size=128,
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=128,
    )
    model = quantise_model(
        GPTNeoXForCausalLM(config).half(), "int8-g32", backend="reference", progress=False
    )
    stored = {name: p.dtype for name, p in model.named_parameters() if ".weight_" in name}
    model.is_loaded_in_8bit = True
    prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    assert {n: p.dtype for n, p in model.named_parameters() if ".weight_" in n} == stored
    ids = torch.arange(5)[None]
    with torch.autocast("cpu", torch.bfloat16):
        assert model(input_ids=ids).logits.isfinite().all()


def test_counts_and_footprints():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=128,
    )
    model = quantise_model(
        LlamaForCausalLM(config), "int4-g32", backend="reference", progress=False
    )
    stored = sum(p.nbytes for p in model.parameters()) + sum(b.nbytes for b in model.buffers())
    assert model.get_memory_footprint() == stored
    model(input_ids=torch.arange(5)[None])
    assert model.get_memory_footprint() == stored
    # Stored elements are counted: two 4-bit codes in each.
    assert model.num_parameters() == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("rows", [140, 100])
@pytest.mark.parametrize("mean_resizing", [False, True])
def test_resized_token_embeddings(rows, mean_resizing):
    """transformers makes the head an nn.Linear with the dequantised rows."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=128,
        tie_word_embeddings=False,
    )
    model = quantise_model(
        LlamaForCausalLM(config),
        "int8-g32",
        default_skip=False,
        backend="reference",
        progress=False,
    )
    assert type(model.lm_head) is QuantisedLinear
    ids = torch.arange(5)[None]
    wanted, weight = model(input_ids=ids).logits, model.lm_head.dequantise()
    model.resize_token_embeddings(rows, mean_resizing=mean_resizing)
    assert type(model.lm_head) is nn.Linear
    assert model.lm_head.weight.shape == (rows, 64)
    kept = min(rows, 128)
    assert torch.equal(model.lm_head.weight[:kept], weight[:kept])
    logits = model(input_ids=ids).logits
    assert logits.shape == (1, 5, rows)
    torch.testing.assert_close(logits[..., :kept], wanted[..., :kept])
    again = quantise_model(
        model, "int8-g32", default_skip=False, backend="reference", progress=False
    )
    assert again.lm_head.weight_shape == (rows, 64)


@pytest.mark.parametrize("is_training", [False, True])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", ["attention", "encoder"])
def test_out_proj_of_attention(kind, mode, is_training):
    """nn.MultiheadAttention does not call its out_proj: it multiplies with the weight."""
    torch.manual_seed(0)
    if kind == "encoder":
        plain = nn.TransformerEncoderLayer(64, 4, 128, dropout=0, batch_first=True)
    else:
        plain = nn.MultiheadAttention(64, 4, batch_first=True)
    quantised = copy.deepcopy(plain)
    own, other = (m.self_attn if kind == "encoder" else m for m in (quantised, plain))
    own.out_proj = QuantisedLinear.from_linear(own.out_proj, "int8-g32", backend="reference")
    other.out_proj.weight = nn.Parameter(own.out_proj.dequantise(), requires_grad=False)
    for module in (quantised, plain):
        module.train(is_training)
    with mode():
        # The fast path of evaluation takes plain tensors only; it rounds in another order.
        given = [torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(1)) for _ in "12"]
        if mode is torch.enable_grad:
            given = [x.requires_grad_() for x in given]
        outputs = [
            module(x) if kind == "encoder" else module(x, x, x)[0]
            for module, x in zip((quantised, plain), given, strict=True)
        ]
    torch.testing.assert_close(*outputs)
    if mode is torch.enable_grad:
        for y in outputs:
            y.square().sum().backward()
        torch.testing.assert_close(given[0].grad, given[1].grad, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(own.out_proj.bias.grad, other.out_proj.bias.grad)
