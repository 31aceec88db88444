"""What every row of a benchmark here tells beside its numbers."""

import platform
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path

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
