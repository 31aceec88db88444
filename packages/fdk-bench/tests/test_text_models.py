"""Models that cannot be loaded, and one by its id."""

import os
import shutil
import subprocess
import sys

import pytest

from fdk_bench.text_models import ModelError, load_text_model


def test_model_by_its_id(bert_folder, tmp_path):
    # As the hub's cache holds it; a process of its own, which reads the variables at its start.
    snapshot = tmp_path / "models--someone--tiny" / "snapshots" / "1"
    shutil.copytree(bert_folder, snapshot)
    (tmp_path / "models--someone--tiny" / "refs").mkdir()
    (tmp_path / "models--someone--tiny" / "refs" / "main").write_text("1")
    code = """
from fdk_bench.text_models import ModelError, load_text_model
assert load_text_model("someone/tiny").module.config.hidden_size == 64
try:
    load_text_model("someone/absent")
except ModelError as error:
    assert "someone/absent: transformers could not load it" in str(error)
else:
    raise AssertionError("an id that is in no cache was loaded")
"""
    environment = os.environ | {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def test_no_tokenizer(bert_folder, tmp_path):
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).write_bytes((bert_folder / file).read_bytes())
    with pytest.raises(ModelError, match=r"wanted a tokenizer .* found config.json, model.safe"):
        load_text_model(tmp_path)


def test_no_model(tmp_path):
    with pytest.raises(
        ModelError, match=r"wanted a folder with config\.json, found an empty folder"
    ):
        load_text_model(tmp_path)
    with pytest.raises(ModelError, match="wanted the folder of a Hugging Face model, found none"):
        load_text_model(tmp_path / "absent")


def test_no_weights(bert_folder, tmp_path):
    for file in ("config.json", "tokenizer.json"):
        (tmp_path / file).write_bytes((bert_folder / file).read_bytes())
    with pytest.raises(ModelError, match="transformers could not load it"):
        load_text_model(tmp_path)
