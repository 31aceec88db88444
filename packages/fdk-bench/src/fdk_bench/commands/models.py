"""``fdk-bench models``: whole models, decoding and first token."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
    numbers,
    output_folder,
    prepare_environment,
    split,
    use_threads,
)

if TYPE_CHECKING:
    from fdk_bench.decoding import Build
    from fdk_bench.model_cases import ModelRun


def models(
    size: Annotated[
        list[str] | None,
        typer.Option(
            "--size",
            "--model",
            metavar="LIST",
            help="tiny, 1b, 4b, 12b, 31b: llamas with random weights, made on the device; or a "
            f"Hugging Face folder or id; {LISTS}. Default: 4b on a GPU, tiny on a CPU.",
        ),
    ] = None,
    batch_size: Annotated[
        list[str] | None,
        typer.Option(metavar="LIST", help=f"Sequences decoded together; {LISTS}. Default: 1."),
    ] = None,
    bits: options.BitsOption = None,
    formats: Annotated[
        list[str] | None,
        typer.Option(
            "--format",
            "--formats",
            metavar="LIST",
            help="Codebooks (int, affine, nf), which take each of --bits, or whole formats "
            f"(kmeans4-g32); {LISTS}. Default: custom, an arbitrary codebook; kmeans where a model "
            "is real.",
            rich_help_panel=options.CASES,
        ),
    ] = None,
    group_size: options.GroupOption = "64",
    backend: options.BackendOption = None,
    skip: Annotated[
        str | None,
        typer.Option(
            help="Regular expression of layers that stay as they are. Default: lm_head, as of "
            "quantise_model."
        ),
    ] = None,
    context: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 128,
    reps: Annotated[int, typer.Option(min=1, help="Decoding steps that are timed.")] = 100,
    compile_model: Annotated[
        bool,
        typer.Option(
            "--compile/--no-compile",
            help="With torch.compile; a random llama on a GPU with our kernels; 16 bits too. "
            "Quantised layers are their backend's, reference too, and are not compiled.",
        ),
    ] = True,
    fused: Annotated[
        bool,
        typer.Option(
            "--fuse/--no-fuse",
            help="One product of q, k and v and one of gate and up; of a Hugging Face model where "
            "it is quantised.",
        ),
    ] = True,
    layers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Blocks of a random llama. Default: as its size has. Few compile the same kernels "
            "ahead, or make a short profile.",
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(help="Text file: its perplexity under a real model, and how that goes on."),
    ] = None,
    device: options.DeviceOption = None,
    dtype: options.DtypeOption = "bf16",
    threads: options.ThreadsOption = None,
    json_lines: options.JsonOption = False,
    out: options.OutOption = None,
) -> None:
    """Decode with whole models: tokens/s, first token, memory, share of the roofline.

    The cache is static; on a GPU a step is one CUDA graph. The roofline is the time to read every
    weight of a step once at the read rate measured in the same run. The 16-bit model has the same
    between its layers, and is captured too. Quantised layers are checked before anything is timed.
    Memory: on a GPU what the model allocates, on a CPU its weights as packed, and its cache.
    Default: 16, 4 and 1 bits. Writes models.jsonl and models.md.

    Exit code: 0 all measured, 1 a model failed, 2 bad usage, 130 interrupted (Ctrl-C keeps what
    was measured).
    """
    prepare_environment()
    from fdk_bench.cases import DEFAULT_CODEBOOK, formats_of  # torch: --help must not wait for it
    from fdk_bench.llama import SIZES
    from fdk_bench.model_cases import ModelRun
    from fdk_formats.model import DEFAULT_SKIP

    use_threads(threads)
    check_pattern("--skip", skip or "")
    checked_dtype(dtype)
    where = checked_device(device)
    widths = numbers("--bits", bits, (16, 4, 1))
    names = _models(split(size, "--size") or ["tiny" if where == "cpu" else "4b"])
    real = [name for name in names if name not in SIZES]
    if text is not None and not real:
        raise typer.BadParameter(
            f"--text: perplexity is of a real model, and {', '.join(names)} has random weights"
        )
    if layers is not None and real:
        raise typer.BadParameter(
            f"--layers: wanted random llamas alone, and {', '.join(real)} has blocks of its own"
        )
    read = None if text is None else given_text("--text", text)
    # Of weights that are real an arbitrary codebook makes nothing: k-means is fitted to them.
    asked = split(formats, "--format") or ["kmeans" if real else DEFAULT_CODEBOOK]
    run = ModelRun(
        models=names,
        formats=checked(lambda: formats_of(widths, asked, group_size, dtype)),
        batches=numbers("--batch-size", batch_size, (1,)),
        backends=checked_backends(split(backend, "--backend") or ["auto"]),
        dtype=dtype,
        device=where,
        skip=DEFAULT_SKIP if skip is None else skip,
        context=context,
        reps=reps,
        compiled=compile_model,
        fused=fused,
        layers=layers,
    )
    _run(run, _builder(read), output_folder(out, "models"), json_lines)


def _models(names: list[str]) -> list[str]:
    from fdk_bench.llama import SIZES
    from fdk_bench.models import HUB_ID

    names = [name.lower() if name.lower() in SIZES else name for name in names]
    for name in names:
        # Or transformers would ask the hub for it for over a minute.
        if not (name in SIZES or Path(name).is_dir() or HUB_ID.fullmatch(name)):
            raise typer.BadParameter(
                f"--size: wanted some of {', '.join(SIZES)}, the folder of a Hugging Face model, "
                f"or an id such as owner/name; got {name!r}"
            )
    return names


def _builder(text: str | None) -> "Build":
    from fdk_bench.decoding import Built
    from fdk_bench.hf_decoding import build_hf
    from fdk_bench.llama import SIZES
    from fdk_bench.model_cases import ModelCase
    from fdk_bench.random_llama import build_llama

    def build(case: ModelCase, batches: "list[int]") -> Built:
        real = partial(build_hf, text=text)
        return (build_llama if case.model in SIZES else real)(case, batches)

    return build  # type: ignore[return-value]


def _how(run: "ModelRun") -> str:
    """What computes between the linear layers."""
    from fdk_bench.llama import SIZES
    from fdk_bench.llama_ops import has_kernels

    if not run.compiled:
        return "not compiled"
    ours = has_kernels(run.device)
    told = ("our kernels" if ours and model in SIZES else "compiled" for model in run.models)
    return " or ".join(dict.fromkeys(told))


def _run(run: "ModelRun", build: "Build", folder: Path, json_lines: bool) -> None:
    from fdk_bench.decoding import measure
    from fdk_bench.machine import facts
    from fdk_bench.model_tables import continuations, model_markdown, model_table
    from fdk_bench.records import counted

    total = run.count()
    gathered = facts("models", run.device)
    threads = f", {counted(gathered.threads)}" if run.device == "cpu" else ""
    caption = (
        f"{gathered.device}{threads}, {run.dtype}, {_how(run)}, prompt of {run.context} tokens; "
        "share: of the time to read every weight of a step once"
    )
    screen = Screen(total, to_stderr=json_lines)
    with screen.live():
        rows, interrupted = collect(
            measure(run, build, screen.step),
            gathered,
            folder / "models.jsonl",
            json_lines=json_lines,
            show=lambda rows: screen.update(len(rows), model_table(rows, caption, screen.width)),
        )
    screen.console.print(model_table(rows, caption, screen.width))
    told = continuations(rows)
    screen.console.print(told, end="", markup=False, highlight=False, soft_wrap=True)
    table = f"{model_markdown(rows)}\n{caption}\n"
    if rows:
        (folder / "models.md").write_text(table + (f"\n{told}" if told else ""), encoding="utf-8")
    finish(rows, total, interrupted, screen, folder)
