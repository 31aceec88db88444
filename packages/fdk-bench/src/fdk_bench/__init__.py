"""Measures and compares fdk: accuracy, kernels, models."""

__version__ = "0.1.0"
