"""The tokens of a row as pieces, each to become a sample: the number of its first answer, its ids, and what of them is the target's."""

from collections.abc import Sequence

Piece = tuple[int, list[int], list[int]]


def plain_piece(lead: list[int], ids: list[int]) -> Piece:
    """All of a plain text but its first token, before which the target has nothing to go on; `lead` stands before it."""
    ids = ids if ids[: len(lead)] == lead else lead + ids
    first = max(1, len(lead))
    return 0, ids, [0] * min(first, len(ids)) + [1] * (len(ids) - first)


def join_turns(pairs: Sequence[tuple[list[int], list[int]]]) -> list[Piece]:
    """Samples (number of the first answer in it, ids, mask) of a conversation's (context ids, answer ids).

    A turn extends the sample before it where its context begins with that sample's ids. Templates that rewrite earlier
    turns (dropping their reasoning) break this; then a new sample begins, so that before every answer stands exactly
    what the target would be given.
    """
    done: list[Piece] = []
    for number, (context, answer) in enumerate(pairs):
        if done and context[: len(done[-1][1])] == done[-1][1]:
            first, ids, mask = done.pop()
            mask = mask + [0] * (len(context) - len(ids)) + [1] * len(answer)
            done.append((first, context + answer, mask))
        else:
            done.append((number, context + answer, [0] * len(context) + [1] * len(answer)))
    return done
