"""Two figures from the accepted lengths of all anchors: uniform, and the walk that replays decoding (docs/design.md, section 4)."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """Drafted tokens accepted, over how many blocks."""

    accepted: int
    blocks: int

    def to_json(self) -> dict[str, float | int | None]:
        """`acceptance` counts the verified token too: accepted / blocks + 1, null without a block."""
        acceptance = self.accepted / self.blocks + 1 if self.blocks else None
        return {"accepted": self.accepted, "blocks": self.blocks, "acceptance": acceptance}


def figure_of(lengths: Iterable[Sequence[int]]) -> Figure:
    """The figure of blocks' accepted drafted tokens, grouped in any way."""
    groups = list(lengths)
    return Figure(sum(map(sum, groups)), sum(map(len, groups)))


def answers_of(loss_mask: Sequence[bool]) -> list[tuple[int, int]]:
    """The maximal runs of supervised positions, as (first, end) with the end exclusive."""
    runs, first = [], None
    for position, supervised in enumerate([*loss_mask, False]):
        if supervised and first is None:
            first = position
        elif not supervised and first is not None:
            runs.append((first, position))
            first = None
    return runs


def walk_lengths(loss_mask: Sequence[bool], accepted: Mapping[int, int]) -> list[int]:
    """Accepted drafted tokens of each block of a sample's walk, answers in order.

    `accepted` maps every anchor's position in the sample to the matches that follow it inside its answer. For each answer: begin
    at its first token, go on at the first token not accepted; no block begins at the answer's last token.
    """
    lengths = []
    for first, end in answers_of(loss_mask):
        position = first
        while position < end - 1:
            lengths.append(accepted[position])
            position += accepted[position] + 1
    return lengths
