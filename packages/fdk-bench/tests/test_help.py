"""``--help`` of every command, as a terminal of 80 columns shows it."""

import pytest
from typer.core import TyperOption
from typer.main import get_command
from typer.testing import CliRunner

from fdk_bench.cli import app

COMMANDS = sorted(get_command(app).commands)


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)], ids=" ".join)
def test_types_leave_room(command):
    """A flag takes no value and shows none; a number shows its limits, and no word for them."""
    done = CliRunner().invoke(app, [*command, "--help"], env={"COLUMNS": "80"})
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert not any(word in done.stdout for word in ("<bool>", "range>"))
    (shown,) = (line for line in lines if "--help " in line)
    assert "this message" in shown


def test_limits_are_shown():
    if not hasattr(TyperOption, "display_type"):
        pytest.skip("typer is older than 0.29, and words types in its own way")
    done = CliRunner().invoke(app, ["models", "--help"], env={"COLUMNS": "80"})
    (context,) = (line for line in done.stdout.splitlines() if "--context" in line)
    assert "<int> [x>=1]  Tokens of the prompt." in context
