"""Compiling ahead: processes side by side, whose results are thrown away."""

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

POLL_SECONDS = 0.05
KILLED = -signal.SIGKILL


@dataclass(frozen=True)
class Task:
    """A command that compiles, and the file for what it prints."""

    command: Sequence[str]
    log: Path


def run_side_by_side(tasks: Sequence[Task], jobs: int, seconds: float) -> list[int]:
    """Runs tasks, the first ones first and ``jobs`` at a time; the exit code of each.

    What has not ended after ``seconds`` is killed; what has not begun has the code of that too.
    """
    # A process has one thread here: as many workers each as the machine has cores were too many.
    alone = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
    end = time.perf_counter() + seconds
    codes = [KILLED] * len(tasks)
    waiting, running = list(enumerate(tasks)), dict[int, subprocess.Popen[bytes]]()
    try:
        while (waiting or running) and time.perf_counter() < end:
            while waiting and len(running) < jobs:
                number, task = waiting.pop(0)
                task.log.parent.mkdir(parents=True, exist_ok=True)
                with task.log.open("wb") as log:
                    running[number] = subprocess.Popen(
                        task.command, stdout=log, stderr=log, env=alone, start_new_session=True
                    )
            for number, process in list(running.items()):
                if process.poll() is not None:
                    codes[number] = running.pop(number).returncode
            time.sleep(POLL_SECONDS)
    finally:
        for process in running.values():
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return codes
