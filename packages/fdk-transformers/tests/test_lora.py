"""PEFT on quantised models: kinds of LoRA, adapters saved and loaded, merging, trainers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_models
import torch
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from torch import nn
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from fdk_formats import QuantisedLinear
from fdk_transformers import FdkConfig, merge_adapters

X = {**tiny_models.inputs("llama")}
KINDS = {
    "lora": {"target_modules": ["q_proj", "v_proj", "down_proj"]},
    "rslora": {"target_modules": ["q_proj", "v_proj", "down_proj"], "use_rslora": True},
    "dora": {"target_modules": ["q_proj", "v_proj", "down_proj"], "use_dora": True},
    "all-linear": {"target_modules": "all-linear"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A quantised model."""
    path = tmp_path_factory.mktemp("model")
    tiny_models.make("llama").save_pretrained(path / "source")
    config = FdkConfig("int4-g32", overrides={"down_proj": "int8-g32-hadamard"})
    model = AutoModelForCausalLM.from_pretrained(path / "source", quantization_config=config)
    model.save_pretrained(path / "small")
    return path / "small"


def load(folder, dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


def adapted(folder, kind="lora", **settings):
    torch.manual_seed(0)
    config = LoraConfig(r=4, task_type="CAUSAL_LM", **KINDS[kind], **settings)
    return get_peft_model(load(folder), config)


def train(model, steps=8, rate=2e-2, dtype=torch.float32):
    """Trains to repeat a text, under autocast if ``dtype`` is bfloat16; returns the losses."""
    model.train()
    optimiser = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=rate)
    losses = []
    for _ in range(steps):
        with torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16):
            loss = model(**X, labels=X["input_ids"]).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    model.eval()
    return losses


def falls(losses):
    """Returns whether the loss, about log(128) = 4.85 of a random model, gets less."""
    return losses[-1] < losses[0] - 0.15


@torch.no_grad()
def logits(model):
    return model(**X).logits


def near(a, b, tolerance):
    return (a - b).norm() / b.norm() < tolerance


@pytest.mark.parametrize("kind", KINDS)
def test_training(folder, tmp_path, kind):
    model = adapted(folder, kind)
    before = {
        name: layer.dequantise()
        for name, layer in model.named_modules()
        if isinstance(layer, QuantisedLinear)
    }
    assert len(before) == 14
    assert torch.equal(logits(model), logits(load(folder))) or kind == "dora"
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert all("lora_" in name for name in trained)
    assert len(trained) == {"all-linear": 28, "dora": 18}.get(kind, 12)
    assert falls(train(model))
    for name, weight in before.items():
        assert torch.equal(model.get_submodule(name).dequantise(), weight)

    model.save_pretrained(tmp_path)
    size = (tmp_path / "adapter_model.safetensors").stat().st_size
    assert size < 60_000  # no base weights
    again = PeftModel.from_pretrained(load(folder), tmp_path)
    assert torch.equal(logits(again), logits(model))
    if kind != "dora":  # transformers 5.23 does not find DoRA's magnitudes in any model
        through_transformers = load(folder)
        through_transformers.load_adapter(str(tmp_path))
        assert torch.equal(logits(through_transformers), logits(model))


def test_adapters_find_their_base_model(folder, tmp_path):
    from peft import AutoPeftModelForCausalLM

    model = adapted(folder)
    train(model)
    model.save_pretrained(tmp_path)
    again = AutoPeftModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize("kind", KINDS)
def test_merged_to_16_bits(folder, tmp_path, kind):
    model = adapted(folder, kind)
    train(model)
    wanted = logits(model)
    merged = merge_adapters(model)
    assert type(merged.model.layers[0].self_attn.q_proj) is nn.Linear
    assert near(logits(merged), wanted, 1e-5)
    merged.save_pretrained(tmp_path)
    assert torch.equal(logits(load(tmp_path)), logits(merged))


def test_merged_and_quantised_again(folder, tmp_path):
    model = adapted(folder)
    train(model)
    wanted, base = logits(model), logits(load(folder))
    formats = {
        name.removeprefix("base_model.model.").removesuffix(".base_layer"): str(layer.format)
        for name, layer in model.named_modules()
        if isinstance(layer, QuantisedLinear)
    }
    merged = merge_adapters(model, requantise=True)
    found = {
        name: str(layer.format)
        for name, layer in merged.named_modules()
        if isinstance(layer, QuantisedLinear)
    }
    assert found == formats
    assert set(found.values()) == {"int4-g32", "int8-g32-hadamard"}
    assert (logits(merged) - wanted).norm() < 0.5 * (base - wanted).norm()
    merged.save_pretrained(tmp_path)
    assert torch.equal(logits(load(tmp_path)), logits(merged))


def test_merge_and_unmerge_of_peft(folder):
    """PEFT's own adds to the quantised weight; on the dequantised model it can be undone."""
    model = adapted(folder)
    train(model)
    wanted = logits(model)
    model.get_base_model().dequantize()
    for _ in range(2):
        model.merge_adapter()
        assert near(logits(model), wanted, 1e-5)
        model.unmerge_adapter()
        assert near(logits(model), wanted, 1e-5)
    small = adapted(folder)
    train(small)
    with pytest.warns(UserWarning, match="quantised again"):
        merged = small.merge_and_unload()
    assert isinstance(merged.model.layers[0].self_attn.q_proj, QuantisedLinear)
    assert (logits(merged) - wanted).norm() < 0.5 * (logits(load(folder)) - wanted).norm()


def test_merging_needs_quantised_layers():
    model = get_peft_model(tiny_models.make("llama"), LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="no layer is quantised"):
        merge_adapters(model)


@pytest.mark.parametrize("reentrant", [False, True])
def test_preparation_and_gradient_checkpointing(folder, reentrant):
    """Norms and the head go to float32; weights stay; activations are computed again."""
    stored = {name: p.dtype for name, p in load(folder).named_parameters() if ".weight_" in name}
    model = load(folder, torch.bfloat16)
    kwargs = {"gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    model = prepare_model_for_kbit_training(model, **kwargs)
    assert model.is_gradient_checkpointing
    found = {name: p.dtype for name, p in model.named_parameters() if ".weight_" in name}
    assert found == stored
    assert model.model.norm.weight.dtype == torch.float32
    torch.manual_seed(0)
    config = LoraConfig(r=4, task_type="CAUSAL_LM", **KINDS["all-linear"])
    peft = get_peft_model(model, config)
    assert falls(train(peft, dtype=torch.bfloat16))
    grads = [p.grad for p in peft.parameters() if p.requires_grad]
    assert all(grad is not None and grad.isfinite().all() for grad in grads)


class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        ids = (torch.arange(12) * 5 + i) % 120 + 6
        return {"input_ids": ids, "labels": ids}


ARGUMENTS = {
    "per_device_train_batch_size": 4,
    "num_train_epochs": 4,
    "learning_rate": 2e-2,
    "logging_steps": 1,
    "report_to": [],
    "save_strategy": "no",
    "use_cpu": True,
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
}


@pytest.mark.parametrize("settings", [{}, {"bf16": True, "gradient_checkpointing": True}])
def test_trainer(folder, tmp_path, settings):
    model = adapted(folder)
    arguments = TrainingArguments(str(tmp_path), **ARGUMENTS, **settings)
    trainer = Trainer(model, arguments, train_dataset=Texts())
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert falls(losses)
    trainer.save_model(tmp_path / "adapter")
    again = PeftModel.from_pretrained(load(folder), tmp_path / "adapter")
    assert near(logits(again), logits(model.eval()), 1e-2)


def test_trainer_refuses_a_model_without_adapters(folder, tmp_path):
    with pytest.raises(ValueError, match="attach trainable adapters"):
        Trainer(load(folder), TrainingArguments(str(tmp_path), **ARGUMENTS))


def test_sft_trainer(folder, tmp_path):
    trl = pytest.importorskip("trl", reason="TRL is not installed")
    from datasets import Dataset

    rows = [{"input_ids": Texts()[i]["input_ids"].tolist()} for i in range(8)]
    arguments = trl.SFTConfig(
        str(tmp_path), **ARGUMENTS, bf16=True, dataset_kwargs={"skip_prepare_dataset": True}
    )
    trainer = trl.SFTTrainer(
        load(folder),
        arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(tmp_path),
        peft_config=LoraConfig(r=4, task_type="CAUSAL_LM", **KINDS["lora"]),
    )
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert falls(losses)
    assert isinstance(trainer.model.get_base_model().model.layers[0].mlp.up_proj, QuantisedLinear)


def tokenizer(path):
    """Makes a tokenizer of words."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(128)}
    base = Tokenizer(models.WordLevel(words, unk_token="w0"))
    special = {"pad_token": "w0", "eos_token": "w1", "unk_token": "w0"}
    return PreTrainedTokenizerFast(tokenizer_object=base, **special)


def test_two_processes(folder, tmp_path):
    """Two processes with half of the batch each train as one does with all of it."""
    script = Path(__file__).with_name("two_processes.py")
    command = [sys.executable, str(script)]
    outputs = [tmp_path / f"rank{rank}.txt" for rank in (0, 1)]
    processes = []
    for rank, output in enumerate(outputs):
        with output.open("w") as file:
            arguments = [str(rank), str(folder), str(tmp_path / "rendezvous")]
            env = os.environ | {"OMP_NUM_THREADS": "1"}
            processes.append(
                subprocess.Popen(command + arguments, env=env, stdout=file, stderr=file)
            )
    try:
        codes = [process.wait(timeout=900) for process in processes]
    finally:
        for process in processes:
            process.kill()
    printed = "".join(output.read_text() for output in outputs)
    assert codes == [0, 0], printed
    assert printed.count("ddp equal") == printed.count("fsdp2 equal") == 2
