"""Bias-free linear layers whose weights are still to come."""

from torch import nn


def linear(inputs: int, outputs: int) -> nn.Linear:
    """A layer with unset weights: they come from `new_draft` or a file, so nothing is drawn from the global generator."""
    return nn.Linear(inputs, outputs, bias=False, device="meta").to_empty(device="cpu")
