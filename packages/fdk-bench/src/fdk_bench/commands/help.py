"""The commands' classes: short types of options in ``--help``, and an end without tracebacks."""

from collections.abc import Sequence
from typing import Any

from typer.core import TyperCommand, TyperGroup

from fdk_bench.commands.common import full_disk_is_told

# A flag takes no value; of a range the limits follow.
SHORTER = {"<bool>": "", "<int range>": "<int>", "<float range>": "<float>"}


def shorten_types(params: Sequence[Any], ctx: Any) -> list[Any]:
    """The same parameters, with what stands for their values shortened."""
    for param in params:
        # An argument would be named by it; typer 0.20 shows no such types.
        if param.param_type_name == "option" and hasattr(param, "display_type"):
            param.metavar = SHORTER.get(param.display_type(ctx), param.metavar)
    return list(params)


class Command(TyperCommand):
    """A subcommand."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Its options and arguments, as help shows them."""
        return shorten_types(super().get_params(ctx), ctx)


class Group(TyperGroup):
    """``fdk-bench`` itself."""

    def main(self, *arguments: Any, **named: Any) -> Any:
        """Runs what was typed."""
        with full_disk_is_told():
            return super().main(*arguments, **named)

    def get_params(self, ctx: Any) -> list[Any]:
        """Its options, as help shows them."""
        return shorten_types(super().get_params(ctx), ctx)
