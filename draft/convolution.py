"""The in-block dynamic convolution of DFlash 2, once before and once after a sublayer (docs/design.md, section 4).

N blocks, B block size, C channels (the hidden size), O taps, P groups of channels.
"""

import torch
from torch import Tensor, nn

from draft.linear import linear


class BlockConvolution(nn.Module):
    """y_t = sum over taps o of (base[o] + delta_t[o, c // group_size]) * x_{t-o}, zero before slot 0 of the block.

    The deltas of both sides come from one projection of the (unconvolved) normed input of the sublayer.
    """

    def __init__(self, hidden_size: int, kernel_size: int, group_size: int) -> None:
        super().__init__()
        self.kernel_size, self.group_size = kernel_size, group_size
        groups = hidden_size // group_size
        self.base_kernel = nn.Parameter(torch.empty(2, kernel_size, hidden_size))
        self.kernel_projection = linear(hidden_size, 2 * kernel_size * groups)

    def deltas(self, normed_NBC: Tensor) -> tuple[Tensor, Tensor]:
        """The kernels' dynamic parts for the side before and the side after the sublayer, each [N, B, O, P, 1]."""
        flat = self.kernel_projection(normed_NBC)
        before, after = flat.view(*normed_NBC.shape[:2], 2, self.kernel_size, -1, 1).unbind(2)
        return before, after

    def convolve(self, states_NBC: Tensor, delta_NBOP1: Tensor, side: int) -> Tensor:
        """One side's convolution, [N, B, C] -> [N, B, C]; side 0 is before the sublayer, 1 after it."""
        count, size, _ = states_NBC.shape
        states = states_NBC.view(count, size, -1, self.group_size)
        base_OPg = self.base_kernel[side].to(states.dtype).view(self.kernel_size, -1, self.group_size)
        output = (base_OPg[0] + delta_NBOP1[:, :, 0]) * states
        for tap in range(1, min(self.kernel_size, size)):
            kernel = base_OPg[tap] + delta_NBOP1[:, tap:, tap]
            output = output + nn.functional.pad(kernel * states[:, :-tap], (0, 0, 0, 0, tap, 0))
        return output.view_as(states_NBC)
