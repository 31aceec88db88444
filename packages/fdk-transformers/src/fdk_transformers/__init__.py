"""Hugging Face models whose weights are stored in 1 to 8 bits.

``from_pretrained(..., quantization_config=FdkConfig("kmeans4-g64"))`` quantises while it loads, and
``save_pretrained`` writes a folder that ``from_pretrained`` opens. Importing this package, or torch
where the package is installed, makes transformers know the folders.
"""

from typing import TYPE_CHECKING, Any

from fdk_transformers.registration import register_with_transformers

if TYPE_CHECKING:
    from fdk_transformers.config import FdkConfig
    from fdk_transformers.generation import generate
    from fdk_transformers.hub import model_card
    from fdk_transformers.lora import merge_adapters
    from fdk_transformers.quantiser import FdkQuantiser
    from fdk_transformers.step_cache import release_step

__version__ = "0.1.0"
__all__ = [
    "FdkConfig",
    "FdkQuantiser",
    "generate",
    "merge_adapters",
    "model_card",
    "release_step",
]

_MODULES = {
    "FdkConfig": "config",
    "FdkQuantiser": "quantiser",
    "generate": "generation",
    "merge_adapters": "lora",
    "model_card": "hub",
    "release_step": "step_cache",
}

register_with_transformers()


def autoload() -> None:
    """Does nothing: torch calls it at the end of its import, after it imported this package."""


def __getattr__(name: str) -> Any:
    """Imports a public name at its first use: transformers takes seconds to import."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    module = importlib.import_module(f"{__name__}.{_MODULES[name]}")
    register_with_transformers()
    return getattr(module, name)
