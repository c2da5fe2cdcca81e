"""Which device to compute on: the one place where "auto" is decided."""

import torch

from schemas.errors import OptionError
from schemas.ranks import ALONE, Ranks


def resolve_device(name: str, ranks: Ranks = ALONE) -> torch.device:
    """ "auto" is CUDA where there is one, else the CPU; of several processes on a machine each takes the GPU of its number.

    Raises OptionError for a device that torch does not have, and for more processes than GPUs.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and ranks.local_world > 1 and torch.cuda.is_available():
        if name != "cuda":
            raise OptionError(f"--device {name} with {ranks.local_world} processes: give cuda, each takes one GPU")
        if ranks.local_world > torch.cuda.device_count():
            raise OptionError(
                f"{ranks.local_world} processes on this machine, which has {torch.cuda.device_count()} GPUs: start fewer "
                "with --nproc"
            )
        name = f"cuda:{ranks.local}"
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
