"""`python -m fdk_formats`: a Hugging Face folder to a quantised one."""

import json
import shutil

import pytest
import torch

from fdk_formats import load_model
from fdk_formats.__main__ import divergence, main
from fdk_formats.calibration import calibrate, random_windows

transformers = pytest.importorskip("transformers")

TEXT = " ".join(f"word{i % 7} stands before word{i % 11}." for i in range(400))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A llama of two blocks with a tokenizer of whole words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    path = tmp_path_factory.mktemp("model")
    words = sorted(set(TEXT.replace(".", " .").split()))
    vocabulary = {word: index for index, word in enumerate(["<unk>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(path)
    save_model_of(path, "Llama", vocab_size=len(vocabulary))
    (path / "text.txt").write_text(TEXT)
    return path


def save_model_of(path, kind, **sizes):
    """Saves a small model of random weights."""
    config = getattr(transformers, f"{kind}Config")(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        **sizes,
    )
    torch.manual_seed(0)
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(path)


def command(folder, out, *more, format="kmeans3-g32"):
    text = str(folder / "text.txt")
    length = ["--length", "32", "--windows", "12"]
    main([str(folder), format, "--out", str(out), "--calibration", text, *length, *more])


def test_a_folder_to_a_folder(folder, tmp_path, capsys):
    out = tmp_path / "out"
    text = str(folder / "text.txt")
    command(folder, out, "--override", "down_proj=int4-g32", "--held-out", text)
    printed, report = (
        json.loads(capsys.readouterr().out),
        json.loads((out / "report.json").read_text()),
    )
    assert report.items() >= printed.items()
    formats = {layer["name"]: layer["format"] for layer in report["layers"]}
    assert len(formats) == 14
    assert formats["model.layers.0.mlp.down_proj"] == "int4-g32"
    assert formats["model.layers.1.self_attn.q_proj"] == "kmeans3-g32"
    assert all(0 < layer["output_error"] < 0.3 for layer in report["layers"])
    assert 3.5 < report["bits_per_weight"] < 4.5
    assert 0 < report["kl"] < 0.1
    assert {"config.json", "tokenizer.json", "model.safetensors"} < {f.name for f in out.iterdir()}
    assert not (out / "calibration").exists()
    source = transformers.AutoModelForCausalLM.from_pretrained(folder)
    loaded = load_model(out / "model.safetensors", source, "reference")
    ids = torch.arange(20)[None] % 12
    found = divergence(source, loaded, ids)
    assert 0 < found["kl"] < 0.1


def test_a_mixture_of_experts(folder, tmp_path):
    source, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(folder, source)
    (source / "model.safetensors").unlink()
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    save_model_of(source, "Mixtral", vocab_size=vocabulary, num_local_experts=4)
    command(source, out, "--held-out", str(folder / "text.txt"))
    report = json.loads((out / "report.json").read_text())
    layers = {layer["name"]: layer for layer in report["layers"]}
    assert len(layers) == 2 * (4 + 2)
    down = layers["model.layers.1.mlp.experts.down_proj"]
    assert down["format"] == "kmeans3-g32"
    assert 0 < down["output_error"] < 0.3
    assert 0 < report["kl"] < 0.1
    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    loaded = load_model(out / "model.safetensors", model, "reference")
    assert type(loaded.model.layers[0].mlp.experts).__name__ == "QuantisedExperts"
    with pytest.raises(SystemExit, match=r"give model\.layers\.0.* experts a format of their own"):
        command(source, tmp_path / "mixed", format="kmeans2-g32:kmeans4-g32@3.5")


def test_formats_mixed_for_bits_on_average(folder, tmp_path, capsys):
    fixed = ("--override", "0.*down_proj=int4-g32", "--skip", "v_proj", "--epochs", "0")
    command(folder, tmp_path / "o", *fixed, format="kmeans2-g32:kmeans4-g32@3.5")
    layers = json.loads((tmp_path / "o" / "report.json").read_text())["layers"]
    formats = {layer["name"]: layer["format"] for layer in layers}
    assert len(formats) == 12
    assert formats.pop("model.layers.0.mlp.down_proj") == "int4-g32"
    assert set(formats.values()) == {"kmeans2-g32", "kmeans4-g32"}
    source = transformers.AutoModelForCausalLM.from_pretrained(folder)
    load_model(tmp_path / "o" / "model.safetensors", source, "reference")


def test_random_tokens_in_the_place_of_a_text(folder, tmp_path):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    windows = random_windows(tokenizer, 32, 12)
    assert windows.shape == (12, 32)
    assert set(windows.unique().tolist()) == set(range(len(tokenizer)))
    assert torch.equal(windows, random_windows(tokenizer, 32, 12))
    tokenizer.add_special_tokens({"bos_token": "<unk>"})
    assert (random_windows(tokenizer, 32, 12) != tokenizer.bos_token_id).all()
    out = tmp_path / "out"
    length = ["--length", "32", "--windows", "12"]
    main([str(folder), "kmeans3-g32", "--out", str(out), "--calibration", "random", *length])
    report = json.loads((out / "report.json").read_text())
    assert report["calibration_tokens"] == 384
    assert all(0 < layer["output_error"] < 0.3 for layer in report["layers"])


def test_windows_by_default(folder, tmp_path, capsys):
    text = str(folder / "text.txt")
    for length, tokens in ((32, 32 * 32), (100, 2000)):
        out = tmp_path / str(length)
        options = ["--length", str(length), "--epochs", "0", "--override", "mlp|[qkv]_proj=none"]
        main([str(folder), "int4-g32", "--out", str(out), "--calibration", text, *options])
        assert json.loads((out / "report.json").read_text())["calibration_tokens"] == tokens


def test_resumed_after_a_kill(folder, tmp_path, monkeypatch):
    command(folder, tmp_path / "whole")

    def killed(*args, **options):
        steps = calibrate(*args, **options)
        yield next(steps)
        raise KeyboardInterrupt

    monkeypatch.setattr("fdk_formats.calibration.calibrate", killed)
    with pytest.raises(KeyboardInterrupt):
        command(folder, tmp_path / "cut")
    monkeypatch.undo()
    with pytest.raises(SystemExit, match=r"not empty.*--resume"):
        command(folder, tmp_path / "cut")
    command(folder, tmp_path / "cut", "--resume")
    files = [tmp_path / name / "model.safetensors" for name in ("whole", "cut")]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.filterwarnings("ignore:quantise_model. nothing to quantise")
@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--override", "down_proj"], "takes REGEX=FORMAT"),
        (["--override", "nothing=int4-g32"], r"override 'nothing' fits no linear layer"),
        (
            ["--override", "down_proj=int4-g64"],
            "down_proj: int4-g64: k must be .* skip or override",
        ),
        (["--skip", "proj|lm_head"], "no linear layer to quantise"),
        (["--windows", "9999"], "wanted 9999 windows"),
        (["--calibration", "absent.txt"], "absent.txt"),
    ],
)
def test_errors_end_with_a_message(folder, tmp_path, more, message):
    with pytest.raises(SystemExit, match=message):
        command(folder, tmp_path / "out", *more)


def test_no_hugging_face_folder(tmp_path):
    with pytest.raises(SystemExit, match="it has no config"):
        main([str(tmp_path), "int4-g32", "--out", str(tmp_path / "o"), "--calibration", "x"])


@pytest.mark.parametrize(
    ("format", "message"),
    [
        ("kmeans2-g32:kmeans3-g32", "several with their bits on average"),
        ("kmeans2-g32@3", "several with their bits on average"),
        ("kmeans2-g32:kmeans3-g32@three", "several with their bits on average"),
        ("kmeans2-g32:kmeans3-g32@4", "wanted 2.5 to 3.5 bits per weight"),
    ],
)
def test_mixes_that_cannot_be(folder, tmp_path, format, message):
    with pytest.raises(SystemExit, match=message):
        command(folder, tmp_path / "out", format=format)
