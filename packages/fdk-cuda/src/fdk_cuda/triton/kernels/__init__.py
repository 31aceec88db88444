"""The Triton and Gluon kernels, one module for each operation, and the PTX they are built of."""
