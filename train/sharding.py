"""A draft whose weights, gradients and optimizer state are spread over the ranks (FSDP2), for one that a GPU cannot hold."""

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def whole(tensor: Tensor) -> Tensor:
    """A tensor in full, wherever its parts lie; every rank must ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(tensor: Tensor, value: Tensor) -> Tensor:
    """A full value, which every rank has, on the device of `tensor` and spread as it is."""
    value = value.to(tensor.device)
    if not isinstance(tensor, DTensor):
        return value
    return distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None)
