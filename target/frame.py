"""Templates that write one message after the other: one render then gives the text of every beginning of a conversation.

ChatML and its like are `before` + a block for each message + `after`, where a block depends on its own message, on how many
stand before it and on the first one. Then template(messages[:j]) needs no render of its own. Whether a template is such a
one is proven from its syntax: whatever this file does not know makes it none, and it is rendered anew for each turn.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from jinja2 import nodes

# What a template may be made of. Nothing here keeps a state from one message to the next: no namespaces, macros, inner loops.
PURE = (
    *(
        nodes.Output,
        nodes.TemplateData,
        nodes.Const,
        nodes.Name,
        nodes.If,
        nodes.CondExpr,
        nodes.Getattr,
        nodes.Getitem,
    ),
    *(nodes.Add, nodes.Concat, nodes.Compare, nodes.Operand, nodes.And, nodes.Or, nodes.Not, nodes.Test),
)
PURE_FILTERS = frozenset({"trim", "string", "upper", "lower", "length", "tojson", "default"})
PURE_METHODS = frozenset({"strip", "lstrip", "rstrip", "startswith", "endswith", "upper", "lower", "get"})
# What a message may know of its place: not whether it is the last.
PLACE = frozenset({"first", "index", "index0"})
ANSWERS_NEXT = "add_generation_prompt"


@dataclass(frozen=True)
class Frame:
    """The text before all messages, and that after them: with the generation prompt and without."""

    before: str
    asking: str
    ending: str


class Watched(list[Any]):
    """Messages that note how many pieces of text there were whenever the template asked for the next one."""

    def __init__(self, messages: Sequence[Any], pieces: list[str]) -> None:
        super().__init__(messages)
        self.pieces = pieces
        self.marks: list[int] = []

    def __iter__(self) -> Iterator[Any]:
        """The messages, each noted, and the end."""
        for message in super().__iter__():
            self.marks.append(len(self.pieces))
            yield message
        self.marks.append(len(self.pieces))


# The pieces of text that the template writes, one by one, for messages and with the generation prompt or without.
Write = Callable[[Sequence[Any], bool], Iterator[str]]


def written(write: Write, messages: Sequence[Any], asking: bool) -> tuple[str, list[str], str]:
    """The text before the messages, that of each message, and that after them, of a template that `writes_by_message`."""
    pieces: list[str] = []
    watched = Watched(messages, pieces)
    for piece in write(watched, asking):
        pieces.append(piece)
    marks = watched.marks
    blocks = ["".join(pieces[start:stop]) for start, stop in pairwise(marks)]
    return "".join(pieces[: marks[0]]), blocks, "".join(pieces[marks[-1] :])


def frame_of(tree: nodes.Template, write: Write) -> Frame | None:
    """What a template, parsed, writes around the messages; None where it is not proven to write one after the other."""
    if not writes_by_message(tree):
        return None
    before, _, asking = written(write, [], True)
    same, _, ending = written(write, [], False)
    return Frame(before, asking, ending) if before == same else None


def writes_by_message(tree: nodes.Template) -> bool:
    """Whether a template is texts around one loop over `messages`, whose body sees its message, its place and messages[0]."""
    loops = [node for node in tree.body if isinstance(node, nodes.For)]
    if len(loops) != 1:
        return False
    (loop,) = loops
    around = [node for node in tree.body if node is not loop]
    if loop.else_ or loop.test is not None or loop.recursive or not isinstance(loop.target, nodes.Name):
        return False
    own = loop.target.name
    if not isinstance(loop.iter, nodes.Name) or loop.iter.name != "messages" or own in ("messages", "loop"):
        return False
    # Names set outside may follow from the generation prompt: the loop is given none of them.
    assigned = {name.name for node in around for name in node.find_all(nodes.Name) if name.ctx != "load"}
    hidden = {*assigned, ANSWERS_NEXT}
    return (
        hidden.isdisjoint({"messages", "loop", own})
        and all(_pure(node, {"messages", "loop"}, outside=True) for node in around)
        and all(_pure(node, hidden, outside=False) for node in loop.body)
    )


def _pure(node: nodes.Node, hidden: set[str], outside: bool) -> bool:
    # Whether this part of the template sees nothing that is hidden from it, and leaves nothing behind but text.
    match node:
        case nodes.Getattr(node=nodes.Name(name="loop"), attr=attr) if not outside:
            return attr in PLACE
        case nodes.Getitem(node=nodes.Name(name="messages"), arg=nodes.Const(value=0)) if not outside:
            return True
        case nodes.Name(name=name):
            return name not in hidden and (outside or name not in ("messages", "loop"))
        case nodes.Assign(target=nodes.Name()) if outside:
            pass
        case nodes.Filter(name=name, node=nodes.Node()):
            if name not in PURE_FILTERS:
                return False
        case nodes.Call(node=nodes.Name(name="raise_exception")):
            pass
        case nodes.Call(node=nodes.Getattr(attr=attr)):
            if attr not in PURE_METHODS:
                return False
        case _ if not isinstance(node, PURE):
            return False
    return all(_pure(child, hidden, outside) for child in node.iter_child_nodes())
