"""Resolves a device argument to a GPU, and checks that the kernels run on it."""

import torch

MIN_CAPABILITY = (8, 0)
NO_GPU = "needs an NVIDIA GPU and its driver: torch finds none on this machine"


def gpu_index(caller: str, device: torch.device | str | int | None) -> int:
    """Returns the index of a GPU; for None and ``cuda``, of the current one.

    Raises:
        RuntimeError: torch finds no GPU.
        ValueError: the device is not a GPU.
    """
    if not torch.cuda.is_available():
        raise RuntimeError(f"{caller}: {NO_GPU}")
    with torch.cuda.device(device):
        return torch.cuda.current_device()


def unsupported_gpu(device: torch.device) -> str | None:
    """Returns why no kernel runs on a device ("needs an NVIDIA GPU, got cpu"), or None."""
    if device.type != "cuda":
        return f"needs an NVIDIA GPU, got {device}"
    if not torch.cuda.is_available():
        return NO_GPU
    if torch.version.hip is not None:
        return "needs an NVIDIA GPU, got one of AMD"
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        wanted, got = (".".join(map(str, each)) for each in (MIN_CAPABILITY, capability))
        return f"needs compute capability {wanted} or later, got {got}"
    return None
