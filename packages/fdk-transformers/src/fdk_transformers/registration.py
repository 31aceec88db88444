"""Registers the quantiser with transformers, as soon as both are imported.

transformers has no plug-in entry points: it knows the quantisers that somebody registered. It warns
of a folder of another one and goes on with random weights. torch has entry points: those of the
group ``torch.backends`` are called at the end of ``import torch``. So this package is imported with
torch, where it must cost nothing, and waits for ``transformers.quantizers.auto``.
"""

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

METHOD = "fdk"
# The classes to register, by module.
OWN = {"fdk_transformers.config": "FdkConfig", "fdk_transformers.quantiser": "FdkQuantiser"}
# Has the tables of quantisers.
WAITED_FOR = "transformers.quantizers.auto"


def register_with_transformers() -> None:
    """Registers the quantiser now, or when transformers has imported its own."""
    if _tables_are_there():
        register()
    elif not any(isinstance(finder, Waiting) for finder in sys.meta_path):
        sys.meta_path.insert(0, Waiting())


def register() -> None:
    """Adds the quantiser and its configuration to transformers' tables, once."""
    from transformers.quantizers import auto

    if METHOD not in auto.AUTO_QUANTIZER_MAPPING:
        from fdk_formats.quantised_module import MODEL_HOOKS
        from fdk_transformers.config import FdkConfig
        from fdk_transformers.quantiser import FdkQuantiser, attach

        MODEL_HOOKS.append(attach)
        auto.register_quantization_config(METHOD)(FdkConfig)
        auto.register_quantizer(METHOD)(FdkQuantiser)


class Waiting(MetaPathFinder):
    """A finder that finds nothing, and registers at the first import after the tables are there.

    torch may be imported by transformers itself, in the middle of the module waited for, when it is
    too late to wait for that module to be looked up. Any later import will do: the code of every
    model is imported later.
    """

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Returns None: the next finder looks the module up."""
        # Not in the middle of an import of the modules that register() needs.
        if self in sys.meta_path and _tables_are_there() and not _is_half_imported(OWN):
            sys.meta_path.remove(self)
            register()
        return None


def _tables_are_there() -> bool:
    """Returns whether transformers has made its tables: the function that adds to them is last."""
    return hasattr(sys.modules.get(WAITED_FOR), "register_quantizer")


def _is_half_imported(classes: dict[str, str]) -> bool:
    return any(
        name in sys.modules and not hasattr(sys.modules[name], made)
        for name, made in classes.items()
    )
