"""A fix of Triton's interpreter, for the tests that run in it."""

from typing import Any

import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder


def fix_scalar_masks() -> None:
    """Makes the mask of a scalar's comparison bool: Triton 3.9's interpreter refuses others.

    It broadcasts the result of a comparison in the dtype of the operands.
    """
    broadcast = InterpreterBuilder.create_splat

    def create_splat(self: object, type: Any, scalar: Any) -> Any:
        result = broadcast(self, type, scalar)
        if type.scalar == tl.int1:
            result.data = result.data.astype(bool)
        return result

    InterpreterBuilder.create_splat = create_splat
