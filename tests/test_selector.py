"""The selector's scores and its greedy walk against loops."""

import torch

from draft.selector import CandidateSelector


def lively(vocab: int = 30, hidden: int = 12, rank: int = 5, top_k: int = 4) -> CandidateSelector:
    selector = CandidateSelector(vocab, hidden, rank, top_k)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in selector.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return selector


def naive_score(selector: CandidateSelector, hidden: torch.Tensor, unary: float, before: int, token: int) -> float:
    left = selector.predecessor_codebook[before] * (selector.hidden_projection.weight @ hidden)
    return unary + float(left.detach() @ selector.successor_codebook[token].detach())


def test_scores_are_the_definition() -> None:
    selector, generator = lively(), torch.Generator().manual_seed(1)
    hidden, unary = torch.randn(6, 12, generator=generator), torch.randn(6, 4, generator=generator)
    candidates, before = (
        torch.randint(0, 30, (6, 4), generator=generator),
        torch.randint(0, 30, (6,), generator=generator),
    )
    scores = selector.scores(hidden, unary, candidates, before)
    for r in range(6):
        for k in range(4):
            expected = naive_score(selector, hidden[r], unary[r, k].item(), int(before[r]), int(candidates[r, k]))
            assert abs(scores[r, k].item() - expected) < 1e-4


@torch.no_grad()
def test_walk_takes_the_best_candidate_after_the_token_it_chose() -> None:
    selector, generator = lively(), torch.Generator().manual_seed(2)
    hidden, logits = torch.randn(3, 6, 12, generator=generator), torch.randn(3, 6, 30, generator=generator)
    verified = torch.tensor([4, 9, 0])
    path, candidates = selector.walk(hidden, logits, verified)
    for n in range(3):
        before = int(verified[n])
        for slot in range(6):
            best = sorted(range(30), key=lambda token: -logits[n, slot, token].item())[:4]
            assert set(candidates[n, slot].tolist()) == set(best)
            scores = {
                token: naive_score(selector, hidden[n, slot], logits[n, slot, token].item(), before, token)
                for token in best
            }
            before = max(scores, key=lambda token: scores[token])
            assert path[n, slot] == before
    assert not torch.equal(path, logits.argmax(-1)), "the selector changed nothing: the test shows nothing"
