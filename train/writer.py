"""Checkpoints written beside training: a step waits for a copy in memory, not for the disk."""

import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from train.checkpoint import Checkpoint, save_checkpoint


class CheckpointWriter:
    """Writes checkpoints into `folder`, one at a time and in order, on a thread. Used as a context manager: leaving waits.

    What is written is what the tensors held when `save` was called. Until it returns, a copy of weights and optimizer state is made
    on the device that holds them (in the memory of the host where the device has no room): three times the weights with AdamW,
    until the write is done. A checkpoint counts once it is on disk whole; a kill before that leaves the one before.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder, self._keep = folder, keep
        self._thread: threading.Thread | None = None
        self._fault: BaseException | None = None

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        if fault is None:
            self.wait()
        elif self._thread is not None:
            # The fault that is on its way matters more than one of the disk.
            self._thread.join()

    def save(self, checkpoint: Checkpoint) -> None:
        """Begin to write; waits for the write before. Raises TrainFault where that one failed."""
        self.wait()
        snapshot = Checkpoint(_copied(checkpoint.model), _copied(checkpoint.optimizer), checkpoint.state)
        devices = {tensor.device for tensor in snapshot.model.values() if tensor.is_cuda}
        copied = {device: torch.cuda.current_stream(device).record_event() for device in devices}
        self._thread = threading.Thread(target=self._write, args=(snapshot, copied), name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Return when all is on disk. Raises TrainFault where it could not be written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._fault is not None:
            fault, self._fault = self._fault, None
            raise fault

    def _write(self, checkpoint: Checkpoint, copied: Mapping[torch.device, torch.cuda.Event]) -> None:
        try:
            for device, event in copied.items():
                # On a stream of its own, or the steps would queue behind the way to the host.
                torch.cuda.set_stream(stream := torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
                stream.wait_event(event)
            model, optimizer = _on_host(checkpoint.model), _on_host(checkpoint.optimizer)
            save_checkpoint(self._folder, Checkpoint(model, optimizer, checkpoint.state), self._keep)
        except BaseException as fault:  # whatever it is, it belongs to the trainer
            self._fault = fault


def _copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous copies that nothing else changes."""
    return {name: _copy(tensor.detach()) for name, tensor in tensors.items()}


def _on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.cpu() for name, tensor in tensors.items()}


def _copy(tensor: Tensor) -> Tensor:
    try:
        return tensor.clone(memory_format=torch.contiguous_format)
    except torch.OutOfMemoryError:
        return tensor.to("cpu", copy=True).contiguous()
