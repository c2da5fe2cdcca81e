"""The tokens of a row as pieces, each to become a sample: the number of its first answer, its ids, and what of them is the target's."""

from array import array
from collections.abc import Iterable, Sequence

from target.steps import Step

# Ids and mask may be arrays and bytes, or lists.
Piece = tuple[int, Sequence[int], Sequence[int]]
SUPERVISED = b"\1"


def plain_piece(lead: list[int], ids: list[int]) -> Piece:
    """All of a plain text but its first token, before which the target has nothing to go on; `lead` stands before it."""
    ids = ids if ids[: len(lead)] == lead else lead + ids
    first = max(1, len(lead))
    return 0, ids, [0] * min(first, len(ids)) + [1] * (len(ids) - first)


def join_turns(pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[int, list[int], list[int]]]:
    """`join_steps` of a conversation's (context ids, answer ids), both whole."""
    pieces = join_steps(Step(False, array("i", context), array("i", answer)) for context, answer in pairs)
    return [(number, list(ids), list(mask)) for number, ids, mask in pieces]


def join_steps(steps: Iterable[Step]) -> list[Piece]:
    """Samples (number of the first answer in it, ids, mask) of a conversation's turns.

    A turn extends the sample before it where its context begins with that sample's ids. Templates that rewrite earlier
    turns (dropping their reasoning) break this; then a new sample begins, so that before every answer stands exactly
    what the target would be given.
    """
    done: list[Piece] = []
    ids, mask = array("i"), bytearray()
    for number, (extends, context, answer) in enumerate(steps):
        if extends or (done and context[: len(ids)] == ids):
            new = context if extends else context[len(ids) :]
        else:
            new, ids, mask = context, array("i"), bytearray()
            done.append((number, ids, mask))
        ids += new
        ids += answer
        mask += bytes(len(new))
        mask += SUPERVISED * len(answer)
    return done
