"""A decoding step of llamas: Triton kernels between the linear layers, and their definition."""
