"""Runs checks in several processes, spawned once per module and number of processes."""

import os
import socket
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed, multiprocessing
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

Check = Callable[[DeviceMesh, Path], None]


def _run(rank: int, ranks: int, port: int, checks: dict[str, Check], folder: Path) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    mesh = init_device_mesh("cpu", (ranks,))
    for name, check in checks.items():
        try:
            check(mesh, folder)
            error = ""
        except Exception:
            error = traceback.format_exc()
        (folder / f"{name}.{rank}").write_text(error)
        distributed.barrier()
    distributed.destroy_process_group()


def results(checks: dict[str, Check], ranks: int, folder: Path) -> dict[str, str]:
    """Runs each check on all processes.

    Returns:
        Name of a check -> traceback of the first process that failed, or ``""``.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.spawn(_run, (ranks, port, checks, folder), nprocs=ranks, join=False)
    try:
        while not context.join(timeout=100):
            pass
    except Exception as error:  # a process died: later checks have no result
        died = f"a process died: {error}"
    else:
        died = ""
    found = {}
    for name in checks:
        files = [folder / f"{name}.{rank}" for rank in range(ranks)]
        errors = [file.read_text() if file.exists() else died or "no result" for file in files]
        found[name] = next(filter(None, errors), "")
    return found
