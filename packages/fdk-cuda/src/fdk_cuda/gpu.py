"""Which GPU a caller means."""

import torch


def gpu_index(caller: str, device: torch.device | str | int | None) -> int:
    """The index of a GPU, by default and of ``cuda`` that of the current one.

    Raises:
        RuntimeError: torch finds no GPU; what it says itself depends on the device.
        ValueError: for a device that is no GPU.
    """
    if not torch.cuda.is_available():
        raise RuntimeError(
            f"{caller}: needs an NVIDIA GPU and its driver: torch finds none on this machine"
        )
    with torch.cuda.device(device):
        return torch.cuda.current_device()
