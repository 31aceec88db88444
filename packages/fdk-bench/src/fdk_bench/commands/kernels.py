"""``fdk-bench kernels`` and ``fdk-bench compare``: y = x @ W_hat.T, alone and beside peers."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fdk_bench.commands.common import (
    LISTS,
    Screen,
    checked,
    collect,
    finish,
    numbers,
    output_folder,
    prepare_environment,
    split,
)

if TYPE_CHECKING:
    from fdk_bench.kernels import KernelRun

MsOption = Annotated[
    list[str] | None, typer.Option("-m", "--m", help=f"Rows of x; {LISTS}. Default: 1, 16, 256.")
]
KsOption = Annotated[
    list[str] | None, typer.Option("-k", "--k", help=f"Inner sizes; {LISTS}. Default: 4096.")
]
NsOption = Annotated[
    list[str] | None, typer.Option("-n", "--n", help=f"Outputs; {LISTS}. Default: as k.")
]
ShapesOption = Annotated[
    list[str] | None,
    typer.Option(
        help=f"In place of -n and -k: NxK, a model (llama-8b, llama-70b, qwen3-32b, ...), or a "
        f"file with a shape a line; {LISTS}."
    ),
]
GroupOption = Annotated[
    str,
    typer.Option("--group-size", "-g", help="For formats that name none: a number, or row."),
]
BitsOption = Annotated[
    list[str] | None,
    typer.Option("--bits", "-b", help=f"16 is the layer that is not quantised; {LISTS}."),
]
FormatsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--format",
        "--formats",
        help="Codebooks (int, affine, nf), which take each of --bits, or whole formats "
        f"(kmeans4-g32); {LISTS}. Default: custom, an arbitrary codebook.",
    ),
]
DeviceOption = Annotated[str | None, typer.Option(help="cpu or cuda. Default: the GPU, if any.")]
BackendOption = Annotated[
    list[str] | None,
    typer.Option(help=f"auto, cpu, triton, marlin, marlin-lut, reference; {LISTS}."),
]
DtypeOption = Annotated[str, typer.Option(help="Of x and y: bf16, fp16 or fp32.")]
AgainstOption = Annotated[
    list[str] | None,
    typer.Option(help=f"Peers to measure in the same run: a name, all, or none; {LISTS}."),
]
IncludeOption = Annotated[
    str,
    typer.Option(
        help="Regular expression: only cases such as m1-n4096-k4096-custom4-g64-bf16-cpu-auto."
    ),
]
ExcludeOption = Annotated[
    str | None, typer.Option(help="Regular expression of cases to leave out.")
]
CopiesOption = Annotated[
    int | None,
    typer.Option(min=1, help="Copies of each weight. Default: more than the caches hold."),
]
InnerOption = Annotated[
    int | None, typer.Option(min=1, help="Calls in a turn (CPU) or at least in a graph (GPU).")
]
OuterOption = Annotated[
    int | None, typer.Option(min=1, help="Turns (CPU) or replays of the graph (GPU).")
]
SecondsOption = Annotated[
    float, typer.Option(min=0.0, help="For each case on a CPU, where --outer-reps is not given.")
]
ThreadsOption = Annotated[int | None, typer.Option(min=1, help="Of a CPU. Default: torch's.")]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print rows as JSON lines in place of the table.")
]
OutOption = Annotated[
    Path | None,
    typer.Option("--out", "--output", help="Folder for results. Default: out/<command>-<time>."),
]


def kernels(
    m: MsOption = None,
    k: KsOption = None,
    n: NsOption = None,
    shapes: ShapesOption = None,
    group_size: GroupOption = "64",
    bits: BitsOption = None,
    formats: FormatsOption = None,
    device: DeviceOption = None,
    backend: BackendOption = None,
    dtype: DtypeOption = "bf16",
    against: AgainstOption = None,
    include: IncludeOption = "",
    exclude: ExcludeOption = None,
    copies: CopiesOption = None,
    inner_reps: InnerOption = None,
    outer_reps: OuterOption = None,
    seconds: SecondsOption = 0.5,
    threads: ThreadsOption = None,
    json_lines: JsonOption = False,
    out: OutOption = None,
) -> None:
    """Time y = x @ W_hat.T; print time, share of the read floor and speed-up over 16 bits.

    Every answer is checked before it is timed. Weights rotate through more copies than the caches
    hold. On a GPU the calls are captured in a CUDA graph and the median replay is given; eager is
    the time of one call that the host starts. Default: a 4096 x 4096 layer at 16, 8, 4, 3, 2 and 1
    bits. Writes kernels.jsonl and kernels.md.

    Exit code: 0 all measured, 1 a case failed, 2 bad usage, 130 interrupted (Ctrl-C keeps what
    was measured).
    """
    _kernels(
        "kernels",
        m=m or ["1,16,256"],
        k=k,
        n=n,
        shapes=shapes,
        group_size=group_size,
        bits=bits or ["16,8,4,3,2,1"],
        formats=formats,
        device=device,
        backend=backend,
        dtype=dtype,
        against=against or ["none"],
        include=include,
        exclude=exclude,
        copies=copies,
        inner_reps=inner_reps,
        outer_reps=outer_reps,
        seconds=seconds,
        threads=threads,
        json_lines=json_lines,
        out=out,
    )


def compare(
    m: MsOption = None,
    k: KsOption = None,
    n: NsOption = None,
    shapes: ShapesOption = None,
    group_size: GroupOption = "64",
    bits: BitsOption = None,
    formats: FormatsOption = None,
    device: DeviceOption = None,
    backend: BackendOption = None,
    dtype: DtypeOption = "bf16",
    against: AgainstOption = None,
    include: IncludeOption = "",
    exclude: ExcludeOption = None,
    copies: CopiesOption = None,
    inner_reps: InnerOption = None,
    outer_reps: OuterOption = None,
    seconds: SecondsOption = 0.5,
    threads: ThreadsOption = None,
    json_lines: JsonOption = False,
    out: OutOption = None,
) -> None:
    """Time every peer that is installed beside ours, in turns, in one run.

    The 16-bit layer of torch, a compiled reference, tinygemm, torch's int4pack, bitsandbytes,
    gemlite, torchao, Humming and llama.cpp; those that are absent are named, with the reason.
    A peer's answer is checked against its own dequantised weight. As `kernels` in all else;
    default: 4 bits, m = 1 and 16.
    """
    _kernels(
        "compare",
        m=m or ["1,16"],
        k=k,
        n=n,
        shapes=shapes,
        group_size=group_size,
        bits=bits or ["16,4"],
        formats=formats,
        device=device,
        backend=backend,
        dtype=dtype,
        against=against or ["all"],
        include=include,
        exclude=exclude,
        copies=copies,
        inner_reps=inner_reps,
        outer_reps=outer_reps,
        seconds=seconds,
        threads=threads,
        json_lines=json_lines,
        out=out,
    )


def _kernels(
    command: str,
    *,
    m: list[str],
    k: list[str] | None,
    n: list[str] | None,
    shapes: list[str] | None,
    group_size: str,
    bits: list[str],
    formats: list[str] | None,
    device: str | None,
    backend: list[str] | None,
    dtype: str,
    against: list[str],
    include: str,
    exclude: str | None,
    copies: int | None,
    inner_reps: int | None,
    outer_reps: int | None,
    seconds: float,
    threads: int | None,
    json_lines: bool,
    out: Path | None,
) -> None:
    prepare_environment()
    import torch  # here and not above, so that `fdk-bench --help` does not wait for it

    from fdk_bench.cases import DTYPES, formats_of, shapes_of
    from fdk_bench.kernels import KernelRun
    from fdk_bench.peers import peers_named

    if threads is not None:
        torch.set_num_threads(threads)
    check_pattern("--include", include)
    check_pattern("--exclude", exclude or "")
    if dtype not in DTYPES:
        raise typer.BadParameter(f"--dtype: wanted one of {', '.join(DTYPES)}, got {dtype!r}")
    ks, ns = numbers("-k", k, ()), numbers("-n", n, ())
    widths = numbers("--bits", bits, ())
    run = KernelRun(
        shapes=checked(lambda: shapes_of(split(shapes), ns, ks, (4096, 4096))),
        ms=numbers("-m", m, ()),
        formats=checked(lambda: formats_of(widths, split(formats), group_size, dtype)),
        dtype=dtype,
        device=checked_device(device),
        backends=checked_backends(split(backend) or ["auto"]),
        peers=checked(lambda: peers_named(split(against))),
        include=include,
        exclude=exclude,
        copies=copies,
        inner=inner_reps,
        outer=outer_reps,
        seconds=seconds,
    )
    if not run.count():
        raise typer.BadParameter("--include and --exclude leave no case")
    _run(command, run, output_folder(out, command), json_lines)


def _run(command: str, run: "KernelRun", folder: Path, json_lines: bool) -> None:
    from fdk_bench.kernel_tables import kernel_markdown, kernel_table
    from fdk_bench.kernels import absent, measure
    from fdk_bench.machine import facts

    total = run.count()
    gathered = facts(command, run.device)
    threads = f", {gathered.threads} threads" if run.device == "cpu" else ""
    caption = f"{gathered.device}{threads}, {run.dtype}; floor: weight, x and y read once"
    screen = Screen(total, to_stderr=json_lines)
    with screen.live():
        rows, interrupted = collect(
            measure(run, screen.step),
            gathered,
            folder / f"{command}.jsonl",
            json_lines=json_lines,
            show=lambda rows: screen.update(len(rows), kernel_table(rows, caption)),
        )
    screen.console.print(kernel_table(rows, caption))
    (folder / f"{command}.md").write_text(f"{kernel_markdown(rows)}\n{caption}\n", encoding="utf-8")
    measured = {row.case.backend for row in rows if row.values is not None}
    for peer in run.peers:
        if peer.name in measured:
            screen.console.print(f"{peer.name}: {peer.note}", highlight=False, soft_wrap=True)
    for name, reason in absent(run).items():
        screen.console.print(f"not measured: {name}: {reason}", highlight=False, soft_wrap=True)
    screen.console.print(f"Results are in {folder}", highlight=False, soft_wrap=True)
    finish(rows, total, interrupted, screen)


def check_pattern(option: str, text: str) -> None:
    """Bad usage for what is no regular expression."""
    try:
        re.compile(text)
    except re.error as error:
        raise typer.BadParameter(
            f"{option}: wanted a regular expression, got {text!r}: {error}"
        ) from None


def checked_device(device: str | None) -> str:
    """The device asked for, or the default; bad usage where torch does not find it."""
    import torch

    from fdk_bench.machine import default_device

    if device is None:
        return default_device()
    if device not in ("cpu", "cuda"):
        several = "CUDA_VISIBLE_DEVICES picks one GPU of several"
        raise typer.BadParameter(f"--device: wanted cpu or cuda ({several}), got {device!r}")
    if device != "cpu" and not torch.cuda.is_available():
        raise typer.BadParameter(f"--device: torch {torch.__version__} finds no GPU here")
    return device


def checked_backends(names: list[str]) -> list[str]:
    """The backends asked for; bad usage for a name that none has."""
    from fdk_formats import all_backends

    known = ("auto", *all_backends())
    if unknown := [name for name in names if name not in known]:
        wanted = ", ".join(known)
        raise typer.BadParameter(f"--backend: wanted one of {wanted}, got {', '.join(unknown)}")
    return list(dict.fromkeys(names))
