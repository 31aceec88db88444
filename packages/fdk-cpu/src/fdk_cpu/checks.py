"""What every kernel asks of a tensor whose address it is given."""

from torch import Tensor


def check_placed(caller: str, name: str, tensor: Tensor) -> None:
    """Raises ValueError for a tensor that is not contiguous, or not on the CPU."""
    if not (tensor.is_contiguous() and tensor.is_cpu):
        raise ValueError(
            f"{caller}: {name} must be contiguous and on the CPU, "
            f"got strides {list(tensor.stride())} on {tensor.device}"
        )
