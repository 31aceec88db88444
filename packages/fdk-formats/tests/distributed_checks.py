"""Runs checks in several processes, spawned once per module and number of processes."""

import importlib
import os
import socket
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed, multiprocessing, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

Check = Callable[[DeviceMesh, Path], None]


class MLP(nn.Module):
    """Two layers, run again in the backward pass if ``recomputes``."""

    recomputes = False

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(torch.relu(self.up(x)))
        return y

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.recomputes:
            return self.compute(x)
        y: torch.Tensor = checkpoint(self.compute, x, use_reentrant=False)
        return y


def _run(rank: int, ranks: int, port: int, module: str, folder: Path, device: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    distributed.init_process_group(
        "gloo" if device == "cpu" else "nccl",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=60),
        device_id=None if device == "cpu" else torch.device(device, rank),
    )
    mesh = init_device_mesh(device, (ranks,))
    checks: dict[str, Check] = importlib.import_module(module).CHECKS
    for name, check in checks.items():
        try:
            check(mesh, folder)
            error = ""
        except Exception:
            error = traceback.format_exc()
        (folder / f"{name}.{rank}").write_text(error)
        distributed.barrier()
    distributed.destroy_process_group()


def results(
    file: str, checks: dict[str, Check], ranks: int, folder: Path, device: str = "cpu"
) -> dict[str, str]:
    """Runs each check on all processes.

    Args:
        file: the file whose ``CHECKS`` are run. The processes import it by its stem: pytest's name
            of the module cannot be imported from every folder.
        checks: the same ``CHECKS``.
        ranks: number of processes.
        folder: an empty folder.
        device: ``cpu`` for gloo, ``cuda`` for NCCL with a GPU for each process.

    Returns:
        Name of a check -> traceback of the first process that failed, or ``""``.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = ranks, port, Path(file).stem, folder, device
    context = multiprocessing.spawn(_run, arguments, nprocs=ranks, join=False)
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
