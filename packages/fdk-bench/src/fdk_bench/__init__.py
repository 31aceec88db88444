"""Benchmarks of fdk: kernels, whole models, accuracy."""

__version__ = "0.1.0"
