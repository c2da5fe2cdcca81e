"""Gradients summed over all ranks while the backward pass is still computing others.

Every rank's gradients are its shares of the whole loss, so ranks only add: no mean, and no weights to correct. Torch's own
wrapper (DDP) divides, wants every parameter inside one forward, and owns what accumulation means; the few lines here take
whatever has put a gradient into a parameter, the selector's among them.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

# Large enough for the network's full speed, small enough that the last one, which nothing hides, is short.
BUCKET_BYTES = 25 << 20


class GradientSum:
    """Sums the gradients of `parameters` over all ranks, in buckets, each on its way as soon as it and those before it are there.

    `begin` before the step's last backward pass, `finish` after it. Every rank has the same parameters and calls, hence the same
    buckets in the same order; a parameter without a gradient has one of zeros.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], bucket_bytes: int = BUCKET_BYTES) -> None:
        # A backward pass comes to the parameters from the last to the first.
        self._buckets = buckets_of(list(reversed(parameters)), bucket_bytes)
        self._bucket_of = {parameter: n for n, bucket in enumerate(self._buckets) for parameter in bucket}
        self._missing: list[set[nn.Parameter]] | None = None
        self._sent: list[tuple[Tensor, dist.Work]] = []
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._arrived)  # type: ignore[no-untyped-call]

    def begin(self, complete: Iterable[nn.Parameter] = ()) -> None:
        """What gradients follow are final, and those of `complete` are already: no more will be added to them."""
        self._missing = [set(bucket) for bucket in self._buckets]
        for parameter in complete:
            self._arrived(parameter)

    def finish(self) -> None:
        """Return when all gradients are sums over the ranks."""
        assert self._missing is not None, "begin comes before the last backward pass"
        self._missing = None
        while len(self._sent) < len(self._buckets):
            self._send()
        for bucket, (flat, work) in zip(self._buckets, self._sent, strict=True):
            work.wait()
            parts = torch.split(flat, [parameter.numel() for parameter in bucket])
            for parameter, part in zip(bucket, parts, strict=True):
                parameter.grad = part.view_as(parameter)
        self._sent = []

    def _arrived(self, parameter: nn.Parameter) -> None:
        if self._missing is None:
            return
        self._missing[self._bucket_of[parameter]].discard(parameter)
        while len(self._sent) < len(self._buckets) and not self._missing[len(self._sent)]:
            self._send()

    def _send(self) -> None:
        bucket = self._buckets[len(self._sent)]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
        # A large gradient is a bucket of its own and is summed where it lies.
        flat = gradients[0].flatten() if len(bucket) == 1 else torch.cat([gradient.flatten() for gradient in gradients])
        for parameter in bucket:
            parameter.grad = None
        work = dist.all_reduce(flat, async_op=True)
        assert work is not None
        self._sent.append((flat, work))


def buckets_of(parameters: Sequence[nn.Parameter], most_bytes: int) -> list[list[nn.Parameter]]:
    """The parameters in order, in runs of at most so many bytes; a larger one is alone."""
    buckets: list[list[nn.Parameter]] = []
    room = 0
    for parameter in parameters:
        size = parameter.numel() * parameter.element_size()
        if size > room:
            buckets.append([])
            room = most_bytes
        buckets[-1].append(parameter)
        room -= size
    return buckets
