"""Choice of kernel and configuration per product: tables and cost models per GPU.

``autotune.tune_layers`` measures better configurations for a GPU and a layer; these are the
defaults.
"""

from fdk_cuda.triton.configs.dgrad import (
    DgradConfig,
    DgradWgmmaConfig,
    dgrad_config,
    dgrad_wgmma_config,
    serves_dgrad,
    serves_dgrad_wgmma,
)
from fdk_cuda.triton.configs.gemm import (
    GemmConfig,
    GemmWgmmaConfig,
    gemm_config,
    gemm_wgmma_config,
    serves_gemm_wgmma,
)
from fdk_cuda.triton.configs.gemv import GemvConfig, as_run, gemv_config
from fdk_cuda.triton.configs.gpus import GPUS, H200, Gpu, gpu_of
from fdk_cuda.triton.layout import PackedLayout

__all__ = [
    "GPUS",
    "H200",
    "Config",
    "DgradConfig",
    "DgradWgmmaConfig",
    "GemmConfig",
    "GemmWgmmaConfig",
    "GemvConfig",
    "Gpu",
    "GradConfig",
    "forward_config",
    "gpu_of",
    "grad_config",
]

# None: dequantise, then cuBLAS.
Config = GemvConfig | GemmConfig | GemmWgmmaConfig | None
GradConfig = DgradConfig | DgradWgmmaConfig | None


def forward_config(layout: PackedLayout, m: int, gpu: Gpu, *, affine: bool = False) -> Config:
    """Returns the configuration of ``x @ W_hat.T`` for m rows of x."""
    if m <= gpu.limits.gemv_m:
        return as_run(gemv_config(layout, m, gpu, affine=affine), gpu)
    if serves_gemm_wgmma(layout, m, gpu, affine=affine):
        return gemm_wgmma_config(layout, m, gpu, affine=affine)
    if m <= gpu.limits.gemm_m:
        return gemm_config(layout, m, gpu)
    return None


def grad_config(layout: PackedLayout, m: int, gpu: Gpu, *, affine: bool = False) -> GradConfig:
    """Returns the configuration of ``dy @ W_hat`` for m rows of dy."""
    if serves_dgrad_wgmma(layout, m, gpu, affine=affine):
        return dgrad_wgmma_config(layout, m, gpu, affine=affine)
    if serves_dgrad(layout, m, gpu, affine=affine):
        return dgrad_config(layout, m, gpu, affine=affine)
    return None
