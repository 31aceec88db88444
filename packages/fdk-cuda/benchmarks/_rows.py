"""How the rows of a benchmark here are written, and what each tells beside its numbers."""

import json
import platform
import shlex
import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from fdk_bench.records import source_commit
from fdk_cuda import __version__


def facts() -> dict[str, object]:
    """What makes a row whole: device, versions, commit, time and command."""
    command = Path(sys.argv[0]).name, *sys.argv[1:]
    return {
        "device": torch.cuda.get_device_name(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "fdk_cuda": __version__,
        },
        "commit": source_commit(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        # Where a machine keeps its files is nobody's business.
        "command": shlex.join(Path(a).name if Path(a).is_absolute() else a for a in command),
    }


def write_rows(
    out: Path | None, rows: Iterable[dict[str, Any]], line_of: Callable[[dict[str, Any]], str]
) -> None:
    """Prints rows as they come, and writes them with the facts to a file, if one is named."""
    told = facts()
    with out.open("w") if out else nullcontext() as file:
        for row in rows:
            print(line_of(row), flush=True)
            if file is not None:
                file.write(json.dumps(row | told) + "\n")
                file.flush()
