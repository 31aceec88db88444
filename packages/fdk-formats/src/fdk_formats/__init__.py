"""Formats of weights in 1 to 8 bits: codebooks, quantisers, packing, layers, files, reference."""

from fdk_formats import reference as _reference  # registers its backend
from fdk_formats.backends import (
    Backend,
    Layout,
    NoBackendError,
    Problem,
    backends,
    reasons_against,
    register,
    select,
)
from fdk_formats.format import Format
from fdk_formats.packing import pack, unpack
from fdk_formats.tensor import QuantisedTensor

__version__ = "0.1.0"
