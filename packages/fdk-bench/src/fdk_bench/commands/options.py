"""Options that several subcommands have, each described once."""

from pathlib import Path
from typing import Annotated

import typer

from fdk_bench.commands.common import LISTS, check_output

CASES = "What is measured"
TIMING = "How it is timed"
RESULTS = "Results"

MsOption = Annotated[
    list[str] | None,
    typer.Option(
        "-m",
        "--m",
        metavar="LIST",
        help=f"Rows of x; {LISTS}. Default: 1, 16, 256; for compare 1, 16.",
        rich_help_panel=CASES,
    ),
]
KsOption = Annotated[
    list[str] | None,
    typer.Option(
        "-k",
        "--k",
        metavar="LIST",
        help=f"Inner sizes; {LISTS}. Default: 4096.",
        rich_help_panel=CASES,
    ),
]
NsOption = Annotated[
    list[str] | None,
    typer.Option(
        "-n", "--n", metavar="LIST", help=f"Outputs; {LISTS}. Default: as k.", rich_help_panel=CASES
    ),
]
ShapesOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="LIST",
        help=f"In place of -n and -k: NxK, a model (llama-8b, llama-70b, qwen3-32b, ...), or a "
        f"file with a shape a line; {LISTS}.",
        rich_help_panel=CASES,
    ),
]
GroupOption = Annotated[
    str,
    typer.Option(
        "--group-size",
        "-g",
        help="For formats that name none: a number, or row.",
        rich_help_panel=CASES,
    ),
]
BitsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--bits",
        "-b",
        metavar="LIST",
        help=f"1 to 8, and 16 for the layer that is not quantised; {LISTS}. "
        "Default: 16, 8, 4, 3, 2, 1; for compare 16, 4; for models 16, 4, 1.",
        rich_help_panel=CASES,
    ),
]
FormatsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--format",
        "--formats",
        metavar="LIST",
        help="Codebooks (int, affine, nf), which take each of --bits, or whole formats "
        f"(kmeans4-g32); {LISTS}. Default: custom, an arbitrary codebook.",
        rich_help_panel=CASES,
    ),
]
DeviceOption = Annotated[
    str | None,
    typer.Option(help="cpu or cuda. Default: the GPU, if any.", rich_help_panel=CASES),
]
BackendOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="LIST",
        help=f"auto, cpu, triton, marlin, marlin-lut, or reference, which dequantises and "
        f"multiplies by torch; {LISTS}. torch.compile and other peers: fdk-bench compare. "
        "Default: auto.",
        rich_help_panel=CASES,
    ),
]
ActivationsOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="LIST",
        help=f"float, or int8 for x rounded to 8 bits (CPU only); {LISTS}. Default: float.",
        rich_help_panel=CASES,
    ),
]
DtypeOption = Annotated[
    str, typer.Option(help="Of x and y: bf16, fp16 or fp32.", rich_help_panel=CASES)
]
AgainstOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="LIST",
        help=f"Peers to measure in the same run: a name (fdk-bench info lists them), all, or none; "
        f"{LISTS}. Default: none; for compare all.",
        rich_help_panel=CASES,
    ),
]
IncludeOption = Annotated[
    str,
    typer.Option(
        help="Regular expression: only cases such as m1-n512-k512-int4-g64-bf16-cpu-auto.",
        rich_help_panel=CASES,
    ),
]
ExcludeOption = Annotated[
    str | None,
    typer.Option(help="Regular expression of cases to leave out.", rich_help_panel=CASES),
]
CopiesOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Copies of each weight. Default: more than the caches hold.",
        rich_help_panel=TIMING,
    ),
]
InnerOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Calls in a turn (CPU; default 8) or at least in a graph (GPU; default 40).",
        rich_help_panel=TIMING,
    ),
]
OuterOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Turns (CPU; default: for --seconds) or replays of the graph (GPU; default 15).",
        rich_help_panel=TIMING,
    ),
]
SecondsOption = Annotated[
    float,
    typer.Option(
        min=0.0,
        help="For each case on a CPU, where --outer-reps is not given.",
        rich_help_panel=TIMING,
    ),
]
PeerSecondsOption = Annotated[
    float | None,
    typer.Option(
        min=0.1,
        help="For a peer to pack, compile, tune and be checked on one layer; a row with its "
        "error after that. Default: 120, on a GPU.",
        rich_help_panel=TIMING,
    ),
]
ThreadsOption = Annotated[
    int | None, typer.Option(min=1, help="Of a CPU. Default: torch's.", rich_help_panel=TIMING)
]
JsonOption = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Print rows as JSON lines; the table goes to standard error.",
        rich_help_panel=RESULTS,
    ),
]
# Angle brackets would be read as HTML and not be shown.
OutOption = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "--output",
        callback=check_output,
        help="Folder for results; a new run replaces the rows of the last. Default: "
        "out/COMMAND-TIME.",
        rich_help_panel=RESULTS,
    ),
]
