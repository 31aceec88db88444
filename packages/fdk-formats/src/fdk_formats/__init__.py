"""Linear layers whose weights are stored in 1 to 8 bits.

Formats, codebooks, quantisers, layers, whole models, files and the backend ``reference``. Kernels
come with ``fdk_cpu`` and ``fdk_cuda``, which are found when they are installed.
"""

import fdk_formats.reference  # noqa: F401  registers the backend
from fdk_formats.backends import (
    Backend,
    ExpertBackend,
    ExpertLayout,
    Layout,
    NoBackendError,
    Problem,
    all_backends,
    register,
    select,
    unsupported_reasons,
)
from fdk_formats.blockwise import (
    QuantisedBlocks,
    dequantise_4bit,
    dequantise_blockwise,
    quantise_4bit,
    quantise_blockwise,
)
from fdk_formats.calibration import (
    CalibratedLayer,
    calibrate,
    calibrate_weights,
    random_windows,
    token_windows,
)
from fdk_formats.compensate import Hessian, output_error
from fdk_formats.dequantised_weight import DequantisedWeight
from fdk_formats.embedding import QuantisedEmbedding
from fdk_formats.experts import QuantisedExpertLinear, QuantisedExperts
from fdk_formats.files import load, load_model, parameters_on_meta, save, save_model
from fdk_formats.format import Format
from fdk_formats.fuse import fuse_layers
from fdk_formats.linear import QuantisedLinear
from fdk_formats.mixed import mix_formats
from fdk_formats.model import choose_formats, quantise_model, replace_layers
from fdk_formats.packing import pack, unpack
from fdk_formats.qat import fake_quantise
from fdk_formats.quantise import fit_codebook, quantise, quantise_stack
from fdk_formats.report import LayerReport, LeftWeight, ModelReport, model_report
from fdk_formats.tensor import QuantisedStack, QuantisedTensor, relative_error
from fdk_formats.training import QATExperts, QATLinear, convert, prepare_qat, refit

__version__ = "0.1.0"
__all__ = [
    "Backend",
    "CalibratedLayer",
    "DequantisedWeight",
    "ExpertBackend",
    "ExpertLayout",
    "Format",
    "Hessian",
    "LayerReport",
    "Layout",
    "LeftWeight",
    "ModelReport",
    "NoBackendError",
    "Problem",
    "QATExperts",
    "QATLinear",
    "QuantisedBlocks",
    "QuantisedEmbedding",
    "QuantisedExpertLinear",
    "QuantisedExperts",
    "QuantisedLinear",
    "QuantisedStack",
    "QuantisedTensor",
    "all_backends",
    "calibrate",
    "calibrate_weights",
    "choose_formats",
    "convert",
    "dequantise_4bit",
    "dequantise_blockwise",
    "fake_quantise",
    "fit_codebook",
    "fuse_layers",
    "load",
    "load_model",
    "mix_formats",
    "model_report",
    "output_error",
    "pack",
    "parameters_on_meta",
    "prepare_qat",
    "quantise",
    "quantise_4bit",
    "quantise_blockwise",
    "quantise_model",
    "quantise_stack",
    "random_windows",
    "refit",
    "register",
    "relative_error",
    "replace_layers",
    "save",
    "save_model",
    "select",
    "token_windows",
    "unpack",
    "unsupported_reasons",
]
