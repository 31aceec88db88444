"""Training with quantised weights by transformers' Trainer."""

import pytest
import tiny_models
import torch
import transformers
from packaging.version import Version
from torch import nn
from transformers import Trainer, TrainingArguments

from fdk_formats import (
    QATExperts,
    QATLinear,
    QuantisedExperts,
    QuantisedLinear,
    convert,
    prepare_qat,
)

STEPS = 6


class Texts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(
            2, tiny_models.VOCABULARY, (16,), generator=torch.Generator().manual_seed(index)
        )
        return {"input_ids": ids, "labels": ids}


def prepared(learn: tuple[str, ...], name: str = "llama") -> nn.Module:
    model = tiny_models.make(name)
    return prepare_qat(model, "kmeans2-g32", learn=learn, refit_every=2, inplace=True)


@torch.no_grad()
def loss_of(model: nn.Module) -> float:
    """Returns the loss on all texts."""
    texts = Texts()
    ids = torch.stack([texts[index]["input_ids"] for index in range(len(texts))])
    return float(model(input_ids=ids, labels=ids).loss)


def trainer_of(model: nn.Module, folder: str, **settings: object) -> Trainer:
    arguments = TrainingArguments(
        folder,
        max_steps=STEPS,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        gradient_checkpointing=True,
        save_steps=STEPS // 2,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **settings,
    )
    return Trainer(model, arguments, train_dataset=Texts())


@pytest.mark.parametrize("learn", [(), ("codebook", "scale")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_trainer_trains_and_the_model_converts(learn, dtype, tmp_path):
    model = prepared(learn)
    layers = {name: m for name, m in model.named_modules() if isinstance(m, QATLinear)}
    before = {name: layer.codebook.clone() for name, layer in layers.items()}
    trainer = trainer_of(model, str(tmp_path), bf16=dtype == torch.bfloat16)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    for name, layer in layers.items():
        assert layer.weight.grad is None or torch.isfinite(layer.weight.grad).all()
        assert not torch.equal(layer.codebook, before[name])
    if not learn:
        assert {int(layer.refit_step) for layer in layers.values()} == {STEPS}
    x = tiny_models.inputs("llama")
    model.eval()
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32), torch.no_grad():
        wanted = model(**x).logits
    small = convert(model, backend="reference")
    assert isinstance(small.get_submodule(next(iter(layers))), QuantisedLinear)
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32), torch.no_grad():
        torch.testing.assert_close(small(**x).logits, wanted)


# Not Mixtral: Trainer does not resume the plain model either, whose files hold experts one by one.
@pytest.mark.parametrize(
    ("learn", "name"), [((), "llama"), (("codebook",), "llama"), ((), "gpt_oss")]
)
def test_trainer_resumes_a_checkpoint(learn, name, tmp_path):
    whole = prepared(learn, name)
    trainer_of(whole, str(tmp_path)).train()
    resumed = prepared(learn, name)
    trainer_of(resumed, str(tmp_path)).train(
        resume_from_checkpoint=str(tmp_path / f"checkpoint-{STEPS // 2}")
    )
    wanted = whole.state_dict()
    found = resumed.state_dict()
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, wanted[name], msg=name)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            "mixtral",
            marks=pytest.mark.skipif(
                Version(transformers.__version__) < Version("5.21"),
                reason="older transformers splits codebooks as it splits the experts",
            ),
        ),
        "gpt_oss",
    ],
)
def test_trainer_trains_a_mixture_that_converts_exactly(name, tmp_path):
    whole = prepared((), name)
    experts = [n for n, each in whole.named_modules() if isinstance(each, QATExperts)]
    assert len(experts) == 2
    before = loss_of(whole)
    trainer_of(whole, str(tmp_path)).train()
    assert loss_of(whole) < before

    x = tiny_models.inputs(name)
    small = convert(whole.eval(), backend="reference")
    for own in experts:
        assert isinstance(small.get_submodule(own), QuantisedExperts)
    with torch.no_grad():
        assert torch.equal(small(**x).logits, whole(**x).logits)
