"""Templates that write one message after the other: one render then gives the text of every beginning of a conversation.

ChatML, Llama's and Gemma's are a text before the messages, a block for each of them, and a text after them. While such a template
writes, it has seen no message but those before, and not how many follow: its text up to there is that of template(messages[:j])
too, so that needs no render of its own. Whether a template is such a one is proven in two steps. From its syntax: it reads the
messages in ways that can be watched, and what it writes after them depends on none. And while it writes: a list that notes what
was read refuses to tell what lies ahead. What is not proven is rendered anew for each turn.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from jinja2 import nodes

# What a message may know of its place: not whether it is the last.
PLACE = frozenset({"first", "index", "index0", "previtem"})
ANSWERS_NEXT = "add_generation_prompt"
# Templates that bring in others, stop early, or write by chance.
UNKNOWN = (nodes.Extends, nodes.Include, nodes.Import, nodes.FromImport, nodes.Block, nodes.Break)
LENGTHS = frozenset({"length", "count"})
PROBE = [{"role": role, "content": "x"} for role in ("user", "assistant", "user")]


class LooksAhead(Exception):
    """A template asked for what it would see differently with fewer messages."""


@dataclass(frozen=True)
class Frame:
    """The text after all messages: with the generation prompt and without."""

    asking: str
    ending: str


class Written(NamedTuple):
    """The text before the messages, of each message, and after them; `reach`: with fewer messages it may be another."""

    before: str
    blocks: list[str]
    after: str
    reach: int


@dataclass
class Watch:
    """What a template has read: how many pieces there were whenever it asked for the next message, and how many it read at once."""

    pieces: list[str] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    skipped: int = 0
    reach: int = 1


class Watched:
    """Messages, from one of them on, that can be gone through once and read by their place, and have no length."""

    def __init__(self, messages: Sequence[Any], watch: Watch, start: int = 0) -> None:
        self.messages, self.watch, self.start = messages, watch, start

    def __iter__(self) -> Iterator[Any]:
        """The messages, each noted, and the end."""
        if self.watch.marks:
            raise LooksAhead
        self.watch.skipped = self.start
        for message in self.messages[self.start :]:
            self.watch.marks.append(len(self.watch.pieces))
            yield message
        self.watch.marks.append(len(self.watch.pieces))

    def __getitem__(self, place: Any) -> Any:
        """A message, or all from one on."""
        first = place.start or 0 if isinstance(place, slice) else place
        if type(first) is not int or first < 0:
            raise LooksAhead
        if isinstance(place, slice):
            if place.stop is not None or place.step is not None:
                raise LooksAhead
            self.watch.reach = max(self.watch.reach, self.start + first)
            return Watched(self.messages, self.watch, self.start + first)
        self.watch.reach = max(self.watch.reach, self.start + first + 1)
        return self.messages[self.start + first]

    def __len__(self) -> int:
        """Not told, nor whether there are any."""
        raise LooksAhead


# The pieces of text that the template writes, one by one, for messages and with the generation prompt or without.
Write = Callable[[Any, bool], Iterator[str]]


def written(write: Write, messages: Sequence[Any], asking: bool) -> Written:
    """What a template that `writes_by_message` writes, by message. Raises LooksAhead where it turns out not to, and what it raises."""
    watch = Watch()
    for piece in write(Watched(messages, watch), asking):
        watch.pieces.append(piece)
    pieces, marks, skipped = watch.pieces, watch.marks, watch.skipped
    if len(marks) != len(messages) - skipped + 1:
        raise LooksAhead
    blocks = [*[""] * skipped, *("".join(pieces[start:stop]) for start, stop in pairwise(marks))]
    return Written("".join(pieces[: marks[0]]), blocks, "".join(pieces[marks[-1] :]), watch.reach)


def frame_of(tree: nodes.Template, write: Write) -> Frame | None:
    """What a template, parsed, writes after the messages; None where it is not proven to write one after the other.

    Raises whatever the template raises for a short conversation.
    """
    if not writes_by_message(tree):
        return None
    try:
        asked, told = written(write, PROBE, True), written(write, PROBE, False)
    except LooksAhead:
        return None
    return Frame(asked.after, told.after) if asked[:2] == told[:2] else None


def writes_by_message(tree: nodes.Template) -> bool:
    """Whether a template's syntax is texts around one loop over the messages, and all else that it reads of them is watched."""
    loops = [node for node in tree.body if isinstance(node, nodes.For)]
    if len(loops) != 1 or any(tree.find(kind) for kind in UNKNOWN):
        return False
    (loop,) = loops
    lists = _lists(tree)
    if loop.else_ or loop.test is not None or loop.recursive or not lists or not _is_list(loop.iter, lists):
        return False
    place = tree.body.index(loop)
    stored = _stored(tree)
    after = {name.name for node in tree.body[place + 1 :] for name in _names(node)}
    return (
        isinstance(loop.target, nodes.Name)
        and "loop" not in stored
        and after.isdisjoint({*stored, *lists, "loop"} - {ANSWERS_NEXT})
        and all(
            _watched(node, lists, inner=False) for node in (*tree.body[:place], *loop.body) if not _sets_default(node)
        )
    )


def _names(node: nodes.Node) -> Iterator[nodes.Name]:
    if isinstance(node, nodes.Name):
        yield node
    yield from node.find_all(nodes.Name)


def _stored(tree: nodes.Template) -> list[str]:
    # The names that a template gives a value to, whatever way, each as often as it does.
    names = [name.name for name in tree.find_all(nodes.Name) if name.ctx != "load"]
    return [
        *names,
        *(node.name for node in tree.find_all(nodes.NSRef)),
        *(node.name for node in tree.find_all(nodes.Macro)),
    ]


def _is_list(node: nodes.Node, lists: set[str]) -> bool:
    # The messages, or all of them from one on.
    match node:
        case nodes.Name(name=name):
            return name in lists
        case nodes.Getitem(node=nodes.Name(name=name), arg=nodes.Slice()):
            return name in lists
        case nodes.CondExpr(expr1=one, expr2=nodes.Node() as other):
            return _is_list(one, lists) and _is_list(other, lists)
    return False


def _assigned(node: nodes.Assign) -> list[tuple[nodes.Node, nodes.Node]]:
    # Each target with its value.
    match node:
        case nodes.Assign(target=nodes.Tuple(items=targets), node=nodes.Tuple(items=values)) if len(targets) == len(
            values
        ):
            return list(zip(targets, values, strict=True))
    return [(node.target, node.node)]


def _lists(tree: nodes.Template) -> set[str]:
    # The names that stand for messages, and never for anything else; none if one of them may.
    pairs = [pair for node in tree.find_all(nodes.Assign) for pair in _assigned(node)]
    lists, known = {"messages"}, 0
    while known != len(lists):
        known = len(lists)
        lists |= {one.name for one, value in pairs if isinstance(one, nodes.Name) and _is_list(value, lists)}
    sound = sum(isinstance(one, nodes.Name) and one.name in lists and _is_list(value, lists) for one, value in pairs)
    lists -= {ANSWERS_NEXT}
    return lists if sound == sum(name in lists for name in _stored(tree)) else set()


def _sets_default(node: nodes.Node) -> bool:
    # {% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}
    match node:
        case nodes.If(body=[nodes.Assign(target=nodes.Name(name=name), node=nodes.Const())], elif_=[], else_=[]):
            return name == ANSWERS_NEXT and all(own.name == ANSWERS_NEXT for own in _names(node.test))
    return False


def _watched(node: nodes.Node, lists: set[str], inner: bool) -> bool:
    # Whether this part of the template reads of the messages only what a watched list notes, or refuses to tell, and nothing of
    # what comes after them. `inner`: within another loop, whose place is its own affair.
    match node:
        case nodes.Getattr(node=nodes.Name(name="loop"), attr=attr):
            return inner or attr in PLACE
        case nodes.Getitem(node=nodes.Name(name=name), arg=nodes.Const(value=int(place))) if name in lists:
            return place >= 0
        case nodes.Filter(name=filtered, node=nodes.Name(name=name), args=[], kwargs=[]) if name in lists:
            return filtered in LENGTHS
        case nodes.Filter(name="random"):
            return False
        case nodes.Name(name=name):
            return name not in lists and name != ANSWERS_NEXT and (inner or name != "loop")
        case nodes.Assign():
            parts = [part for pair in _assigned(node) if not _is_list(pair[1], lists) for part in pair]
            return all(_watched(part, lists, inner) for part in parts)
        case nodes.For():
            around = [node.target, node.iter, *node.else_, *([] if node.test is None else [node.test])]
            return (
                all(_watched(part, lists, inner) for part in around)
                and all(_watched(part, lists, True) for part in node.body)
                and not node.recursive
            )
    return all(_watched(child, lists, inner) for child in node.iter_child_nodes())
