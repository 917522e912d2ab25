"""YAML as recipes use it: null, booleans, numbers, texts, lists and mappings, bounded in size, with the line of every key.

Of YAML 1.1 it leaves out what turns into something else unseen: dates, base 60, sets, binary data, tags of Python.
`1e-4` is a number here, as in YAML 1.2. A key is always the text that stands there.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import Composer
from yaml.constructor import SafeConstructor
from yaml.resolver import Resolver

Key = tuple[str | int, ...]

MOST_BYTES = 2**18
MOST_VALUES = 5_000  # aliases written out
MOST_LEVELS = 32
MOST_DIGITS = 100

_TAG = "tag:yaml.org,2002:"
_EXPONENT = re.compile(r"^[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+$")  # a number in YAML 1.2, a text in 1.1
NEVER_WRITTEN = re.compile("[\0\ud800-\udfff]")  # no path, name or prompt can hold them


class Unreadable(ValueError):
    """A file or a text that cannot be read; `line` is where, from 1, if that is known."""

    def __init__(self, message: str, line: int | None = None):
        super().__init__(message)
        self.line = line


def read_file(path: Path | str, most: int = MOST_BYTES) -> bytes:
    """A file's bytes. Raises Unreadable where it is missing, no ordinary file, or larger than `most` bytes."""
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))  # a pipe without a writer would be waited for
        mode = os.fstat(handle).st_mode
        if not stat.S_ISREG(mode):
            os.close(handle)
            raise Unreadable(f"cannot be read ({'a folder' if stat.S_ISDIR(mode) else 'a pipe or a device'}, not a file)")
        with open(handle, "rb") as file:
            data = file.read(most + 1)
    except FileNotFoundError:
        raise Unreadable("no such file") from None
    except (OSError, UnicodeError) as error:  # UnicodeError: what the file system's encoding cannot hold
        raise Unreadable(f"cannot be read ({getattr(error, 'strerror', None) or error})") from None
    if len(data) > most:
        raise Unreadable(f"cannot be read (larger than {most / 2**20:g} MB)")
    return data


def load(text: str) -> tuple[Any, dict[Key, int]]:
    """What a YAML text says, and the line of each key path, from 1. Raises Unreadable."""
    if odd := NEVER_WRITTEN.search(text):
        raise Unreadable(f"not YAML (the character U+{ord(odd[0]):04X})", text.count("\n", 0, odd.start()) + 1)
    try:
        if len(text) > MOST_BYTES:
            raise Unreadable(f"larger than {MOST_BYTES / 2**20:g} MB")
        root = _Composer(_bounded(yaml.parse(text, Loader=yaml.SafeLoader))).get_single_node()
        lines: dict[Key, int] = {}
        if root is None:
            return None, lines
        _Sizes().of(root, ())
        return _value(root, (), lines), lines
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        message = f"not YAML ({getattr(error, 'problem', None) or ' '.join(str(error).split())})"
        raise Unreadable(message, mark.line + 1 if mark is not None else None) from None


def dump(data: Any) -> str:
    """YAML that `load` reads back as it was."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def index_or_name(key: str) -> int | str:
    """A key as it was written: the number of an entry of a list, or a name."""
    return int(key) if key.isascii() and key.isdecimal() and len(key) < 10 else key


class _Dumper(yaml.SafeDumper):
    """Quotes the texts that `load` takes for numbers and SafeDumper does not."""


_Dumper.add_implicit_resolver(f"{_TAG}float", _EXPONENT, list("-+0123456789"))


class _Composer(Composer, Resolver):
    """Nodes of events that are read already."""

    def __init__(self, events: Iterator[yaml.Event]):
        Composer.__init__(self)
        Resolver.__init__(self)
        self.events = events
        self.current: yaml.Event | None = None

    def peek_event(self) -> Any:
        if self.current is None:
            self.current = next(self.events, None)
        return self.current

    def get_event(self) -> Any:
        event, self.current = self.peek_event(), None
        return event

    def check_event(self, *choices: type) -> bool:
        return isinstance(self.peek_event(), choices)


_Composer.add_implicit_resolver(f"{_TAG}float", _EXPONENT, list("-+0123456789"))


def _bounded(events: Iterator[yaml.Event]) -> Iterator[yaml.Event]:
    """The events, as long as they are not too many or too deep, and none holds a character that no text should."""
    depth = 0
    for number, event in enumerate(events):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        line = event.start_mark.line + 1 if event.start_mark else None
        if depth > MOST_LEVELS:
            raise Unreadable(f"nested deeper than {MOST_LEVELS} levels", line)
        if number > 2 * MOST_VALUES:
            raise Unreadable(f"more than {MOST_VALUES:,} values", line)
        if isinstance(event, yaml.ScalarEvent) and (odd := NEVER_WRITTEN.search(event.value)):
            raise Unreadable(f"a text with the character U+{ord(odd[0]):04X}", line)
        yield event


class _Sizes:
    """Counts the values of nodes with their aliases written out, without writing them out."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[int, int]] = {}
        self.open: set[int] = set()

    def of(self, node: yaml.Node, keys: Key) -> tuple[int, int]:
        """(values, levels). Raises Unreadable where they are too many, or a node holds itself."""
        if id(node) in self.known:
            return self.known[id(node)]
        line = node.start_mark.line + 1
        if id(node) in self.open:
            raise Unreadable(f"{'.'.join(map(str, keys))} contains itself", line)
        self.open.add(id(node))
        values, levels = 1, 0
        children: list[tuple[str | int, yaml.Node]] = []
        if isinstance(node, yaml.MappingNode):
            children = [(_key(key), value) for key, value in node.value]
        elif isinstance(node, yaml.SequenceNode):
            children = list(enumerate(node.value))
        for key, child in children:
            its = self.of(child, (*keys, key))
            values, levels = values + its[0], max(levels, its[1] + 1)
        if values > MOST_VALUES:
            raise Unreadable(f"more than {MOST_VALUES:,} values, aliases written out", line)
        if levels > MOST_LEVELS:
            raise Unreadable(f"nested deeper than {MOST_LEVELS} levels, aliases written out", line)
        self.open.remove(id(node))
        self.known[id(node)] = values, levels
        return values, levels


def _key(node: yaml.Node) -> str:
    if not isinstance(node, yaml.ScalarNode) or node.tag.removeprefix(_TAG) in ("binary", node.tag):
        raise Unreadable("not YAML that a recipe can hold (a key must be a name)", node.start_mark.line + 1)
    return node.value


def _value(node: yaml.Node, keys: Key, lines: dict[Key, int]) -> Any:
    """What a node says; the line of each key path goes into `lines`."""
    kind = node.tag.removeprefix(_TAG)
    if isinstance(node, yaml.SequenceNode) and kind == "seq":
        for index, item in enumerate(node.value):
            lines[(*keys, index)] = item.start_mark.line + 1
        return [_value(item, (*keys, index), lines) for index, item in enumerate(node.value)]
    if isinstance(node, yaml.MappingNode) and kind == "map":
        pairs = _pairs(node, keys)
        for key, (at, _) in pairs.items():
            lines[(*keys, key)] = at.start_mark.line + 1
        return {key: _value(value, (*keys, key), lines) for key, (_, value) in pairs.items()}
    if isinstance(node, yaml.ScalarNode):
        return _scalar(node, kind)
    raise Unreadable(f"not YAML that a recipe can hold (the tag {node.tag[:60]})", node.start_mark.line + 1)


def _pairs(node: yaml.MappingNode, keys: Key) -> dict[str, tuple[yaml.Node, yaml.Node]]:
    """By key, the nodes of key and value; what `<<` names comes first and counts least."""
    own: dict[str, tuple[yaml.Node, yaml.Node]] = {}
    merged: dict[str, tuple[yaml.Node, yaml.Node]] = {}
    for key, value in node.value:
        name = _key(key)
        if name in own:
            where = ".".join(map(str, (*keys, name)))
            raise Unreadable(f"the key '{where[:200]}' occurs twice", key.start_mark.line + 1)
        own[name] = key, value
        if key.tag != f"{_TAG}merge":
            continue
        del own[name]
        below = value.value if isinstance(value, yaml.SequenceNode) else [value]
        for each in reversed(below):
            if not isinstance(each, yaml.MappingNode):
                raise Unreadable("`<<` must name a mapping, or a list of mappings", key.start_mark.line + 1)
            merged |= _pairs(each, keys)
    return merged | own


def _scalar(node: yaml.ScalarNode, kind: str) -> Any:
    text, line = node.value, node.start_mark.line + 1
    if kind in ("str", "value", "merge"):  # a lone `=` or `<<` is a text where no key is meant
        return text
    looks = _RESOLVER.resolve(yaml.ScalarNode, text, (True, False)).removeprefix(_TAG)
    if kind == "timestamp" and looks == kind:
        raise Unreadable(f"{text!r} is a date in YAML; quote it if it is a text", line)
    if kind not in ("null", "bool", "int", "float"):
        raise Unreadable(f"not YAML that a recipe can hold (the tag {node.tag[:60]})", line)
    if looks != kind and (looks, kind) != ("int", "float"):
        raise Unreadable(f"{_short(text)} is not a YAML {kind}", line)
    if ":" in text:
        raise Unreadable(f"{_short(text)} is a number in base 60 in YAML; quote it if it is a text", line)
    if len(text) > MOST_DIGITS:
        raise Unreadable(f"{_short(text)} is a number of more than {MOST_DIGITS} digits", line)
    try:
        return getattr(_CONSTRUCTOR, f"construct_yaml_{kind}")(node)
    except ValueError as error:  # such as `0x_`
        raise Unreadable(f"{_short(text)}: {error}; quote it if it is a text", line) from None


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}...")


_CONSTRUCTOR = SafeConstructor()
_RESOLVER = _Composer(iter(()))
