"""The path selector of DFlash 2: it re-scores the backbone's candidates of a slot by the token chosen before it.

R slots, H hidden, V vocabulary, K candidates, r rank.
"""

import torch
from torch import Tensor, nn

from draft.linear import linear


class CandidateSelector(nn.Module):
    """S_t(a, b) = U_t(b) + <A(a) * H(h_t), B(b)> over the `top_k` tokens b of slot t by the backbone's logit U_t.

    A is the predecessor's codebook, B the successor's, h_t the draft's hidden state after its final norm (docs/design.md, section 4).
    """

    def __init__(self, vocab_size: int, hidden_size: int, rank: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.empty(vocab_size, rank))
        self.hidden_projection = linear(hidden_size, rank)

    def scores(self, hidden_RH: Tensor, unary_RK: Tensor, candidate_RK: Tensor, predecessor_R: Tensor) -> Tensor:
        """Scores [R, K] of candidates, given the token before each slot."""
        right_RKr = nn.functional.embedding(candidate_RK, self.successor_codebook)
        return self._rescore(self.hidden_projection(hidden_RH), unary_RK, right_RKr, predecessor_R)

    def scores_backward(
        self, hidden_RH: Tensor, candidate_RK: Tensor, predecessor_R: Tensor, gradient_RK: Tensor
    ) -> tuple[Tensor, dict[nn.Parameter, Tensor]]:
        """From the gradient of `scores` to that of the hidden states [R, H] (the unary term left out) and of the parameters.

        Holds tensors of [R, r], where autograd's own pass would hold [R, K, r]: sum over k of g_k <left, B(b_k)> is
        <left, sum over k of g_k B(b_k)>, a weighted bag of rows. Candidates without a gradient cost what the others do.
        """
        parameters = list(self.parameters())
        with torch.enable_grad():
            hidden_RH = hidden_RH.detach().requires_grad_()
            weights_RK = gradient_RK.to(self.successor_codebook.dtype)
            bag_Rr = nn.functional.embedding_bag(
                candidate_RK, self.successor_codebook, per_sample_weights=weights_RK, mode="sum"
            )
            total = (self._left(self.hidden_projection(hidden_RH), predecessor_R) * bag_Rr).sum()
        gradient_RH, *gradients = torch.autograd.grad(total, [hidden_RH, *parameters])
        return gradient_RH, dict(zip(parameters, gradients, strict=True))

    def walk(self, hidden_NBH: Tensor, logits_NBV: Tensor, verified_N: Tensor) -> tuple[Tensor, Tensor]:
        """Greedy path through slots 1..B-1, left to right from the verified token of slot 0.

        Takes the states and logits of slots 1..B-1. Returns the chosen tokens [N, B-1] and the candidates [N, B-1, K].
        """
        unary_NBK, candidate_NBK = logits_NBV.topk(self.top_k, -1)
        projected_NBr = self.hidden_projection(hidden_NBH)
        right_NBKr = nn.functional.embedding(candidate_NBK, self.successor_codebook)
        chosen_N, path = verified_N, []
        for slot in range(hidden_NBH.shape[1]):
            scores_NK = self._rescore(projected_NBr[:, slot], unary_NBK[:, slot], right_NBKr[:, slot], chosen_N)
            chosen_N = candidate_NBK[:, slot].gather(1, scores_NK.argmax(-1, keepdim=True))[:, 0]
            path.append(chosen_N)
        return torch.stack(path, 1), candidate_NBK

    def _rescore(self, projected_Rr: Tensor, unary_RK: Tensor, right_RKr: Tensor, predecessor_R: Tensor) -> Tensor:
        return unary_RK + (right_RKr @ self._left(projected_Rr, predecessor_R)[:, :, None])[:, :, 0]

    def _left(self, projected_Rr: Tensor, predecessor_R: Tensor) -> Tensor:
        return nn.functional.embedding(predecessor_R, self.predecessor_codebook) * projected_Rr
