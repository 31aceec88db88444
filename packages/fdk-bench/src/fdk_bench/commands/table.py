"""``fdk-bench table``: recorded rows as Markdown, printed or put into documents."""

from pathlib import Path
from typing import Annotated

import typer

from fdk_bench.commands.common import EXIT_FAILED_ROWS, check_pattern, checked, split


def table(
    files: Annotated[
        list[Path],
        typer.Argument(help="JSONL files of rows, or with --fill documents.", exists=True),
    ],
    include: Annotated[
        str,
        typer.Option(help="Regular expression: only cases such as m1-n4096-k4096-custom4-g64-..."),
    ] = "",
    columns: Annotated[
        list[str] | None,
        typer.Option(
            metavar="LIST",
            help="Headings to show, separated by commas. Default: all that are filled.",
        ),
    ] = None,
    goals: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            help="JSONL file of n, k, bits, m and goal (microseconds): each measured case beside "
            "floor, best peer and goal, and how many are met.",
        ),
    ] = None,
    fill: Annotated[
        bool,
        typer.Option(
            "--fill",
            help="FILES are Markdown documents: renders every table between the marks "
            "'fdk-bench table FILE --include REGEX --columns A,B' (or --goals) and 'end' in them "
            "anew. Paths in marks start at the present folder.",
        ),
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="With --fill: change nothing, say what would change.")
    ] = False,
    json_lines: Annotated[
        bool,
        typer.Option("--json", help="Print the documents that changed, or the table, as JSON."),
    ] = False,
) -> None:
    """Render rows as Markdown tables, with the command and machine that they are of.

    So that no number of a document is copied by hand.

    Exit code: 0, 1 where --check finds a table that is not what its rows give, 2 bad usage.
    """
    import json

    from fdk_bench.rendering import fill as filled
    from fdk_bench.rendering import render
    from fdk_bench.results import read_text

    check_pattern("--include", include)
    if check and not fill:
        raise typer.BadParameter("--check goes with --fill")
    if not fill:
        text = checked(lambda: render(files, include, split(columns, "--columns"), goals))
        print(json.dumps(text) if json_lines else text, end="\n" if json_lines else "")
        return
    anew: dict[Path, str] = {}
    for path in files:
        before = checked(lambda: read_text(path))  # noqa: B023 (called at once)
        after = checked(lambda: filled(before, Path()), str(path))  # noqa: B023
        if after != before:
            anew[path] = after
    if not check:
        _write(anew)
    changed = [str(path) for path in anew]
    word = "would change" if check else "changed"
    if json_lines:
        print(json.dumps(changed))
    else:
        print("\n".join(f"{word}: {name}" for name in changed) or "every table is up to date")
    if check and changed:
        raise typer.Exit(EXIT_FAILED_ROWS)


def _write(documents: dict[Path, str]) -> None:
    from fdk_bench.records import replace_text

    for path, text in documents.items():
        try:
            replace_text(path, text)
        except OSError as error:
            raise typer.BadParameter(f"wanted a file to write, got {path}: {error}") from None
