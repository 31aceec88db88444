"""``python -m fdk_bench``: the command line where no entry point is installed."""

from fdk_bench.cli import app

app(prog_name="fdk-bench")
