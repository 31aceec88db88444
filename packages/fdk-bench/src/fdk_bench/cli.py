"""The command line ``fdk-bench``: one module of ``commands`` for each subcommand."""

import typer

from fdk_bench import __version__
from fdk_bench.commands.accuracy import accuracy
from fdk_bench.commands.guard import guard
from fdk_bench.commands.help import Command, Group
from fdk_bench.commands.info import info
from fdk_bench.commands.kernels import COMMANDS, kernels
from fdk_bench.commands.models import models
from fdk_bench.commands.plot import plot
from fdk_bench.commands.profile import profile
from fdk_bench.commands.record import record
from fdk_bench.commands.table import table

app = typer.Typer(
    name="fdk-bench",
    cls=Group,
    help="Measures and compares fdk: linear layers with weights stored in 1 to 8 bits.",
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
    """Measures and compares fdk: linear layers with weights stored in 1 to 8 bits."""


for name, command in COMMANDS.items():
    app.command(name, cls=Command, help=command.help)(kernels)
for function in (models, accuracy, plot, table, record, profile, guard, info):
    app.command(cls=Command)(function)
