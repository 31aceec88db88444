"""``fdk-bench guard``: did anything get slower since the last run on such a machine?"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from fdk_bench.guard import Change


def guard(
    new: Annotated[Path, typer.Argument(help="Rows of `kernels` just measured.", exists=True)],
    last: Annotated[
        Path, typer.Option(help="Rows of the last runs, one per case and machine class.")
    ] = Path("out/bench/last.jsonl"),
    update: Annotated[
        bool, typer.Option("--update/--no-update", help="Remember the new rows as the last.")
    ] = True,
    json_lines: Annotated[
        bool, typer.Option("--json", help="Print changes as JSON lines.")
    ] = False,
) -> None:
    """Compare rows of `kernels` with the last of the same machine class, as times over the floor.

    Says what got slower or faster by more than the spread of both runs explains, and 10 % at
    least. It never fails for what it finds.

    Exit code: 0, or 2 for bad usage.
    """
    from fdk_bench.commands.common import checked
    from fdk_bench.guard import changes, check, remember
    from fdk_bench.results import KERNELS, read_records

    def check_kernels(record: dict[str, Any]) -> None:
        if record["benchmark"] in KERNELS:
            check(record)

    rows = checked(lambda: list(read_records([new], check_kernels)))
    after = [record for record in rows if record["benchmark"] in KERNELS]
    if update:
        _make(last)
    before = checked(lambda: list(read_records([last], check)), "--last") if last.exists() else []
    found = list(changes(before, after))
    if json_lines:
        for change in found:
            print(json.dumps({**vars(change), "slower": change.slower, "faster": change.faster}))
    else:
        _print(found, len(after), last)
    if update:
        remember(last, after)


def _make(last: Path) -> None:
    """Makes the file where there is none; bad usage for one that cannot be written."""
    if last.exists() and not last.is_file():  # a device has no end
        raise typer.BadParameter(f"--last: wanted a file, got {last}")
    try:
        last.parent.mkdir(parents=True, exist_ok=True)
        last.open("a").close()
    except OSError as error:
        raise typer.BadParameter(f"--last: wanted a file to write, got {last}: {error}") from None


def _print(found: "list[Change]", count: int, last: Path) -> None:
    for change in found:
        if change.slower or change.faster:
            word = "SLOWER" if change.slower else "faster"
            print(
                f"{word} {change.case}: {change.before:.2f} -> {change.after:.2f} times the floor "
                f"(noise {100 * change.noise:.0f} %)"
            )
    slower = sum(change.slower for change in found)
    print(f"{len(found)} of {count} cases are in {last}; {slower} got slower than the noise")
