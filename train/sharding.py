"""A draft whose weights, gradients and optimizer state are spread over the ranks (FSDP2), for one that a GPU cannot hold.

Outside the forward and backward pass each rank has its part of every parameter; files hold all of them whole.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from cache.peers import is_spread, whole
from draft.model import Draft


def shard(draft: Draft, device: torch.device, world: int) -> None:
    """Spread a draft over the ranks, in place: a layer is whole while it runs, what lies outside the layers during a whole pass.

    So the selector is whole from the forward of the trunk to the end of the backward pass: where the objective reads it. Its gradients,
    as all others, are summed over the ranks, not averaged.
    """
    # Half a second, which only a draft that is spread need take.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    mesh = init_device_mesh(device.type, (world,))
    for module in (*draft.layers, draft):
        fully_shard(module, mesh=mesh)
    for part in draft.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            # The other way is a product within the sum, which gloo has not.
            part.set_force_sum_reduction_for_comms(True)


def whole_all(tensors: Mapping[str, Tensor], keep: bool) -> dict[str, Tensor]:
    """Tensors in full, where `keep`, those that were spread in the memory of the host; every rank must ask. Else none."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        full = whole(tensor.detach())
        if keep:
            found[name] = full.cpu() if is_spread(tensor) else full
    return found


def plain_draft(draft: Draft, device: torch.device) -> Draft:
    """The same weights in a draft that is neither spread, compiled nor converted to float8: as it will be served.

    What is not spread is shared, not copied. Every rank must ask.
    """
    plain = Draft(draft.config)
    plain.attention = draft.attention
    plain.load_state_dict({name: whole(tensor) for name, tensor in draft.state_dict().items()}, assign=True)
    return plain.to(device)


def like(tensor: Tensor, value: Tensor) -> Tensor:
    """A full value, which every rank has, on the device of `tensor` and spread as it is."""
    value = value.to(tensor.device)
    if not is_spread(tensor):
        return value
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(tensor, DTensor)
    return distribute_tensor(value, tensor.device_mesh, tensor.placements, src_data_rank=None)
