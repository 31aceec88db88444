"""Linear layers with 1- to 8-bit weights on x86 and ARM CPUs."""

__version__ = "0.1.0"
