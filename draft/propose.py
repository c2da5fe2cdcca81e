"""What a draft proposes for the slots of a block: the tokens that decoding would send to the target.

N blocks, B block size, H hidden, V vocabulary, K candidates.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from draft.model import Draft


@dataclass(frozen=True)
class Proposal:
    """Tokens of slots 1..B-1. `token` [N, B-1] is what would be drafted, `backbone` [N, B-1] the largest logits alone.

    They differ with a selector only; without one, `candidate` [N, B-1, K] is None. `logits` is [N, B-1, V].
    """

    token: Tensor
    backbone: Tensor
    candidate: Tensor | None
    logits: Tensor


def propose(draft: Draft, logits_of: Callable[[Tensor], Tensor], hidden_NBH: Tensor, verified_N: Tensor) -> Proposal:
    """Greedy tokens for blocks whose states after the final norm are `hidden_NBH` and whose slot 0 holds `verified_N`.

    `logits_of` are the target's logits of states [R, H].
    """
    # Of states that lie apart torch makes a product for each block and reads the weights every time: several times slower.
    drafted_NBH = hidden_NBH[:, 1:].contiguous()
    logits_NBV = logits_of(drafted_NBH.flatten(0, 1)).float().view(*drafted_NBH.shape[:2], -1)
    backbone_NB = logits_NBV.argmax(-1)
    if draft.candidate_selector is None:
        return Proposal(backbone_NB, backbone_NB, None, logits_NBV)
    token_NB, candidate_NBK = draft.candidate_selector.walk(drafted_NBH, logits_NBV, verified_N)
    return Proposal(token_NB, backbone_NB, candidate_NBK, logits_NBV)
