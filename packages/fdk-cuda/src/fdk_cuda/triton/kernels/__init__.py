"""Triton and Gluon kernels, one module per operation, and the PTX that they inline."""
