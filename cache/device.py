"""Which device to compute on: the one place where "auto" is decided."""

import torch

from schemas.errors import OptionError


def resolve_device(name: str) -> torch.device:
    """ "auto" is CUDA where there is one, else the CPU. Raises OptionError for a device that torch does not have."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError):
        raise OptionError(
            f"--device {name!r} is not available here: use cpu, or cuda on a machine that has it"
        ) from None
    if device.type == "meta":
        raise OptionError("--device 'meta' computes nothing: use cpu or cuda")
    return device
