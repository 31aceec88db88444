"""Decoding with a llama: its Triton kernels, the model, and a step as one CUDA graph."""
