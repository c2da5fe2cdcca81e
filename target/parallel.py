"""A target that one device cannot hold: the same weights over several processes, by transformers' own tensor-parallel plan."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from schemas.errors import OptionError, TargetError

# Loading a large checkpoint takes the slowest process this much longer than the fastest, at most.
PATIENCE = timedelta(hours=2)


def check_parallel(config: Any, tp: int, device: torch.device) -> None:
    """Refuse, before any weight is read, a target that `tp` processes cannot share evenly. Raises OptionError, TargetError.

    `config` is the text model's.
    """
    if tp == 1:
        return
    counts = {
        "attention heads": getattr(config, "num_attention_heads", None),
        # Multi-head latent attention has no key heads of its own: its config repeats another number there.
        "key-value heads": None if hasattr(config, "kv_lora_rank") else getattr(config, "num_key_value_heads", None),
        "vocabulary rows": config.vocab_size,
    }
    for what, count in counts.items():
        if isinstance(count, int) and count % tp:
            fitting = [
                str(n) for n in range(1, tp + 1) if not any(c % n for c in counts.values() if isinstance(c, int))
            ]
            raise OptionError(
                f"--tp {tp} does not divide the target's {count} {what}: give one that does ({', '.join(fitting)})"
            )
    if device.type == "cpu" and torch.cuda.is_available():
        raise OptionError(
            "--tp shards over the GPUs of a machine that has them: leave out --device cpu, or hide them with "
            "CUDA_VISIBLE_DEVICES="
        )
    if not getattr(config, "base_model_tp_plan", None):
        raise TargetError(
            f"{config.model_type} has no tensor-parallel plan in transformers: capture it without --tp, on a device that "
            "holds it whole"
        )


@contextmanager
def parallel_group(store: dist.Store, replica: int, member: int, tp: int, device: torch.device) -> Iterator[None]:
    """Within the block, the default process group is this replica's: `tp` processes, of which this is number `member`."""
    if tp == 1:
        yield
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    group_store = dist.PrefixStore(f"replica{replica}", store)
    dist.init_process_group(backend, store=group_store, rank=member, world_size=tp, timeout=PATIENCE)
    try:
        yield
    finally:
        dist.destroy_process_group()


def storage_of(tensor: torch.Tensor) -> int:
    """The address of a weight's values here: the same for tied weights."""
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.data_ptr()
