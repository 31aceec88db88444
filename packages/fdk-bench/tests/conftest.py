"""Tiny models of transformers in folders, and rows made by hand."""

import signal

import pytest
import torch

WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "dogs", "ran", "far", "from", "home")


def save_tokenizer(folder, **special):
    """Save a tokenizer of ``WORDS``."""
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
    """Keep errors on one line where a temporary path is long."""
    monkeypatch.setenv("COLUMNS", "240")


@pytest.fixture
def own_code(monkeypatch):
    """Models decode by their own code, whichever packages are installed."""
    from fdk_transformers import step_cache
    from fdk_transformers.transformers_step import TransformersStep

    monkeypatch.setattr(step_cache, "STEPS", (TransformersStep,))


@pytest.fixture
def interruptible():
    """Ctrl-C raises, as in a terminal: below nohup, cron and some CI it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def refused(tmp_path, monkeypatch):
    """Return a check that a command is bad usage, says why, and writes nothing."""
    monkeypatch.chdir(tmp_path)

    def check(run, *arguments, said):
        done = run(*arguments)
        assert done.exit_code == 2
        assert said in done.stderr
        assert not list(tmp_path.iterdir())

    return check


@pytest.fixture(params=["file", "file/sub", "/proc", "/proc/nope"])
def no_folder(request, tmp_path):
    """A path that cannot be a folder of results."""
    (tmp_path / "file").touch()
    return tmp_path / request.param


@pytest.fixture(scope="session")
def write_tokenizer():
    """``save_tokenizer``."""
    return save_tokenizer


@pytest.fixture(scope="session")
def bert_folder(tmp_path_factory):
    """A BERT of two layers, each with 4 weights [64, 64], a [128, 64] and a [64, 128]; a pooler."""
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
    """Sizes of a decoder of two layers, as SMALL in test_models.py."""
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
    """A llama of ``hf_sizes``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 500_000.0}
    config = LlamaConfig(**hf_sizes, rms_norm_eps=1e-5, rope_parameters=rope)
    return LlamaForCausalLM(config).eval().requires_grad_(False)


@pytest.fixture
def hf_folder(hf_model, tmp_path):
    """Folder of ``hf_model`` with a tokenizer of w0 to w39."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path / "llama"
    hf_model.save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(40)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(folder)
    return folder


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
    """Facts of every row, for a machine that is made up."""
    return dict(FACTS)


@pytest.fixture
def kernel():
    """Return a function that makes a row of ``fdk-bench kernels``."""
    return kernel_row


def kernel_row(format="int4-g64", m=1, time=2e-6, size=64, backend="cpu", floor=1e-6, bits=None):
    is_dense, operations = format == "bf16", 2 * m * size * size
    bits = 16 if is_dense else (bits or int(format[3])) + 0.25
    backend = "torch" if is_dense else backend
    values = {
        "backend": backend,
        "bits_per_weight": bits,
        "weight_bytes": 2176,
        "bytes": 2432,
        "operations": operations,
        "error": 0.001,
        "time": time,
        "time_min": time,
        "spread": 0.05,
        "samples": 8,
        "method": "turns",
        "eager_time": None,
        "copies": 3,
        "bandwidth": 2432 / time,
        "throughput": operations / time,
        "floor": floor,
        "floor_share": floor / time,
        "speedup_16": None if is_dense else 3.5,
        "best_peer": None,
        "speedup_peer": None,
    }
    case = {"m": m, "n": size, "k": size, "format": format, "dtype": "bf16", "device": "cpu"}
    case |= {"backend": backend, "activations": "float"}
    return FACTS | {"benchmark": "kernels", "case": case, "values": values}


@pytest.fixture
def model():
    """Return a function that makes a row of ``fdk-bench models``."""
    return model_row


def model_row(format="int4-g64", batch=1, parameters=4e9, context=128, fused=True, floor=0.01):
    case = {"model": f"{parameters / 1e9:g}b", "batch": batch, "format": format}
    case |= {"backend": "auto", "dtype": "bf16", "context": context, "fused": fused}
    values = {"backends": "cpu", "parameters": parameters, "tokens_per_second": 50.0 * batch}
    values |= {"step_time": 0.02, "floor": floor, "floor_share": floor / 0.02, "speedup_16": None}
    return FACTS | {"benchmark": "models", "case": case, "values": values}


@pytest.fixture
def accuracy():
    """Return a function that makes a row of ``fdk-bench accuracy``."""
    return accuracy_row


def accuracy_row(format, bits):
    case = {"format": format, "model": "m", "backend": "auto", "skip": "", "sentences": 1}
    values = {"bits_per_weight": bits, "weight_error": 2.0**-bits, "cosine_mean": 1 - 2.0**-bits}
    return FACTS | {"benchmark": "accuracy", "case": case, "values": values}
