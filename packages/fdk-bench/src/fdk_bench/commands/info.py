"""``fdk-bench info``: machine, versions, which backend takes which format by which kernels."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fdk_bench.commands.common import (
    FILE_WIDTH,
    LISTS,
    checked,
    checked_dtype,
    prepare_environment,
    split,
)
from fdk_bench.commands.options import CASES, DtypeOption, GroupOption

if TYPE_CHECKING:
    from rich.table import Table

    from fdk_bench.support import Machine, Support


def info(
    formats: Annotated[
        list[str] | None,
        typer.Option(
            "--format",
            "--formats",
            metavar="LIST",
            help=f"Formats to ask about; {LISTS}. Default: custom, int and affine, 1 to 8 bits.",
            rich_help_panel=CASES,
        ),
    ] = None,
    n: Annotated[
        int,
        typer.Option("-n", "--n", min=1, help="Outputs of the layer.", rich_help_panel=CASES),
    ] = 4096,
    k: Annotated[
        int, typer.Option("-k", "--k", min=1, help="Inputs of the layer.", rich_help_panel=CASES)
    ] = 4096,
    group_size: GroupOption = "64",
    dtype: DtypeOption = "bf16",
    json_lines: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show the machine, the versions, and which backend takes which format and why not.

    On a GPU also which kernel of it serves which number of rows.

    Exit code: 0, or 2 for bad usage.
    """
    prepare_environment()
    import torch  # here and not above, so that `fdk-bench --help` does not wait for it

    from fdk_bench.cases import DTYPES, formats_of
    from fdk_bench.machine import facts
    from fdk_bench.support import (
        SAMPLED_BITS,
        machine,
        missing_peers,
        sampled_formats,
        supports,
    )

    checked_dtype(dtype)
    if asked := split(formats, "--format"):
        names = checked(lambda: formats_of(SAMPLED_BITS, asked, group_size, dtype))
    else:
        names = checked(lambda: sampled_formats(group_size))
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    quantised = [name for name in names if name not in DTYPES]
    here = checked(machine)  # FDK_CPU_ISA may name what it does not run
    found = list(supports(quantised, n, k, dtype, devices))
    gathered, peers = facts("info", "cpu"), missing_peers()
    if json_lines:
        record = asdict(gathered) | {"machine": asdict(here), "peers": peers}
        record["supports"] = [asdict(support) for support in found]
        print(json.dumps(record, ensure_ascii=False))
        return
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=FILE_WIDTH)
    console.print(_facts(here, gathered.versions, gathered.environment, gathered.commit))
    title = f"[{n}, {k}] layer, {dtype} activations"
    if found:
        console.print(_supports(found, title))
    if plain := [name for name in names if name in DTYPES]:
        text = f"{', '.join(plain)}: not quantised; torch computes it, and no backend is asked"
        console.print(text, highlight=False, soft_wrap=True, markup=False)
    for line in kernel_lines(found):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    for line in _peers(peers):
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def _facts(here: "Machine", versions: Any, environment: Any, commit: str | None) -> "Table":
    from rich.table import Table

    table = Table(box=None, show_header=False)
    mib = 1 << 20
    memory = "" if here.memory is None else f", {here.memory / (1 << 30):.1f} GiB"
    table.add_row("CPU", f"{here.cpu}, {here.cores} cores{memory}")
    sizes = ", ".join(f"{name} {_size(size)}" for name, size in here.caches.items())
    table.add_row("caches", sizes or "not told by the system")
    runs = ", ".join(here.instruction_sets) or "fdk-cpu is not installed"
    used = f" (in use: {here.instruction_set})" if here.instruction_set else ""
    table.add_row("instruction sets", runs + used)
    for gpu in here.gpus:
        text = f"{gpu['name']}, compute capability {gpu['capability']}, "
        text += f"{gpu['multiprocessors']} multiprocessors, {gpu['memory'] / (1 << 30):.1f} GiB, "
        table.add_row("GPU", text + f"L2 {gpu['L2'] / mib:.0f} MiB")
    if not here.gpus:
        table.add_row("GPU", "torch finds none")
    table.add_row("versions", ", ".join(f"{name} {text}" for name, text in versions.items()))
    table.add_row("commit", commit or "not run from a checkout")
    settings = ", ".join(f"{name}={value}" for name, value in environment.items())
    table.add_row("environment", settings or "nothing set that matters")
    return table


def _size(size: int) -> str:
    """``48 KiB``, ``1 MiB``."""
    return f"{size / (1 << 20):.3g} MiB" if size >= 1 << 20 else f"{size / (1 << 10):.3g} KiB"


def _supports(found: "list[Support]", title: str) -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table("format", "device", "auto picks", "against the others", box=SIMPLE_HEAD)
    table.title, table.title_justify = title, "left"
    before = None
    for support in found:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in support.reasons.items())
        shown = '"' if reasons == before else reasons
        table.add_row(support.format, support.device, support.chosen or "none", shown)
        before = reasons
    return table


def kernel_lines(found: "list[Support]") -> list[str]:
    """A line for each choice of kernels by rows, with the formats that it is of."""
    formats: dict[tuple[str, str], list[str]] = {}
    for support in found:
        if support.by_rows:
            key = str(support.chosen), support.by_rows
            formats.setdefault(key, []).append(support.format)
    lines = [f"  {name}, {', '.join(of)}: {told}" for (name, told), of in formats.items()]
    return ["kernels by number of rows:", *lines] if lines else []


def _peers(peers: "dict[str, str | None]") -> list[str]:
    here = [name for name, missing in peers.items() if missing is None]
    lines = [f"peers for compare: {', '.join(here)}"]
    return lines + [f"  absent: {name}: {missing}" for name, missing in peers.items() if missing]
