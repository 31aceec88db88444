"""Linear layers with 1- to 8-bit weights on NVIDIA GPUs."""

__version__ = "0.1.0"
