"""Tiny models of transformers, with folders as the hub has them."""

import pytest
import torch

WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "dogs", "ran", "far", "from", "home")


def save_tokenizer(folder, **special):
    """A tokenizer of ``WORDS``."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[EOS]", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", **special
    ).save_pretrained(folder)


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    """Errors are not folded where a temporary path is long."""
    monkeypatch.setenv("COLUMNS", "240")


@pytest.fixture
def refused(tmp_path, monkeypatch):
    """Asserts that a command is bad usage, says why, and writes nothing into its empty folder."""
    monkeypatch.chdir(tmp_path)

    def check(run, *arguments, said):
        done = run(*arguments)
        assert done.exit_code == 2
        assert said in done.stderr
        assert not list(tmp_path.iterdir())

    return check


@pytest.fixture(params=["file", "file/sub", "/proc", "/proc/nope"])
def no_folder(request, tmp_path):
    """A path at which no folder of results can be."""
    (tmp_path / "file").touch()
    return tmp_path / request.param


@pytest.fixture(scope="session")
def write_tokenizer():
    """``save_tokenizer``."""
    return save_tokenizer


@pytest.fixture(scope="session")
def bert_folder(tmp_path_factory):
    """Two layers: in each 4 weights of [64, 64], one [128, 64] and one [64, 128]; and a pooler."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("bert")
    config = BertConfig(
        vocab_size=16,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
        initializer_range=0.2,
    )
    BertModel(config).save_pretrained(folder)
    save_tokenizer(folder, pad_token="[PAD]")
    return folder


@pytest.fixture
def hf_sizes():
    """Of a decoder of two layers: those of SMALL in test_models.py."""
    return {
        "vocab_size": 40,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "max_position_embeddings": 64,
    }


@pytest.fixture
def hf_model(hf_sizes):
    """A llama of these sizes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 500_000.0}
    config = LlamaConfig(**hf_sizes, rms_norm_eps=1e-5, rope_parameters=rope)
    return LlamaForCausalLM(config).eval().requires_grad_(False)


@pytest.fixture
def hf_folder(hf_model, tmp_path):
    """``hf_model`` with a tokenizer of w0 to w39."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path / "llama"
    hf_model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(40)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(folder)
    return folder


# What every row has, of a machine made up.
FACTS = {
    "error": None,
    "started": "2026-11-20T00:00:00+00:00",
    "command": "fdk-bench kernels -k 64",
    "commit": "0123456789abcdef",
    "device": "a chip",
    "threads": 2,
    "versions": {"torch": "2"},
}


@pytest.fixture
def facts():
    """``FACTS``, a copy."""
    return dict(FACTS)


@pytest.fixture
def kernel():
    """Makes a row of ``fdk-bench kernels``."""
    return kernel_row


def kernel_row(format="int4-g64", m=1, time=2e-6, **changed):
    values = {
        "backend": "cpu",
        "bits_per_weight": 4.25,
        "weight_bytes": 2176,
        "bytes": 2432,
        "operations": 8192 * m,
        "error": 0.001,
        "time": time,
        "time_min": time,
        "spread": 0.05,
        "samples": 8,
        "method": "calls",
        "eager_time": None,
        "copies": 3,
        "bandwidth": 2432 / time,
        "throughput": 8192 * m / time,
        "floor": 1e-6,
        "floor_share": 1e-6 / time,
        "speedup_16": 3.5,
        "of_a_newer_version": 1,
    }
    case = {"m": m, "n": 64, "k": 64, "format": format, "dtype": "bf16", "device": "cpu"}
    case["backend"] = "auto"
    return FACTS | {"benchmark": "kernels", "case": case, "values": values} | changed
