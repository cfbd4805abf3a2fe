"""The one way in for files that users write: regular files of bounded size, YAML and JSON of bounded
depth and number.

What a text can do to a parser is refused here, in one sentence that names the file: nesting, aliases that
unfold to millions of nodes, keys that occur twice, numbers that no machine word holds, and the spellings that
YAML 1.1 reads as another number than a person does. What a document means is its reader's business.
"""

import io
import json
import os
import re
import stat
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import yaml

from policies.core.errors import InputError
from policies.process.sentences import shown

MAX_CONFIG_BYTES = 1_000_000
MAX_JSON_BYTES = 64_000_000
MAX_NODES = 50_000
MAX_DEPTH = 32
LARGEST_INT = 2**63 - 1
LARGEST_ID = 2**64 - 1
"""In JSON numbers may be hashes of 64 bits."""

_SEXAGESIMAL = re.compile(r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?")
_OCTAL = re.compile(r"[-+]?0[0-9_]*[0-9]")
_PLAIN = "tag:yaml.org,2002:"


def open_regular(path: Path, expected: str) -> io.BufferedReader:
    """`path` opened for reading. Raises `InputError` unless it is a regular file that can be opened; never
    waits for the other end of a pipe. `expected` ends the sentence: "a trace"."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file, expected {expected}") from None
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise InputError(f"{path}: cannot be read ({reason}), expected {expected}") from None
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(handle, "rb")
    os.close(handle)
    if stat.S_ISDIR(mode):
        raise InputError(f"{path}: is a folder, expected {expected}")
    raise InputError(f"{path}: is a pipe or a device and is read more than once, expected {expected} on disk")


def read_text(path: Path, expected: str, max_bytes: int) -> str:
    """All of a small file in UTF-8. Raises `InputError` for one that is not, or larger than `max_bytes`."""
    with open_regular(path, expected) as file:
        try:
            data = file.read(max_bytes + 1)
        except OSError as error:
            raise InputError(f"{path}: cannot be read ({error.strerror}), expected {expected}") from None
    if len(data) > max_bytes:
        raise InputError(f"{path}: is larger than {max_bytes:,} bytes, expected {expected}")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: cannot be read as text ({error.reason}), expected {expected}") from None


def parse_yaml(text: str, where: str) -> Any:
    """The value of a YAML document; a date is the text that it is. Raises `InputError`, starting with
    `where`."""
    return _guarded(where, "YAML", lambda: _load(text, where))


def parse_scalar(text: str, where: str) -> Any:
    """`text` as the value of one plain YAML scalar, whatever `#` and `:` it holds; in brackets or quotes, a
    document."""
    text = text.strip()
    if text[:1] in ("[", "{", '"', "'"):
        return parse_yaml(text, where)

    def construct() -> Any:
        loader = _Loader("")
        tag = loader.resolve(  # type: ignore[no-untyped-call]
            yaml.ScalarNode, text, (True, False)
        )
        mark = yaml.Mark(where, 0, 0, 0, None, 0)
        return loader.construct_object(yaml.ScalarNode(tag, text, mark, mark))

    return _guarded(where, "YAML", construct)


def read_json(path: Path, expected: str, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """The value in a JSON file. Raises `InputError`."""
    return parse_json(read_text(path, expected, max_bytes), str(path))


def parse_json(text: str, where: str, expected: str = "", **options: Any) -> Any:
    """The value of a JSON document. `options` go to `json.loads`. Raises `InputError`, starting with
    `where`."""
    hooks = {"parse_constant": _no_constant, **options}
    value = _guarded(where, "JSON", lambda: json.loads(text, object_pairs_hook=_unique, **hooks), expected)
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [child for item in level for child in _children(item, where)]
        if not level:
            return value
    raise InputError(f"{where}: nested too deeply, expected at most {MAX_DEPTH} levels")


class _Loader(yaml.SafeLoader):
    """The safe loader with bounds."""

    num_nodes = 0
    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.num_nodes += 1
        self.depth += 1
        if self.num_nodes > MAX_NODES:
            raise _Refusal(f"expected at most {MAX_NODES:,} values")
        if self.depth > MAX_DEPTH:
            raise _Refusal(f"nested too deeply, expected at most {MAX_DEPTH} levels")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        keys = [(key.tag, key.value) for key, _ in node.value if isinstance(key.value, str)]
        twice = (
            next((key for key in keys if keys.count(key) > 1), None) if len(set(keys)) < len(keys) else None
        )
        if twice is not None:
            raise _Refusal(f"key {shown(twice[1])} occurs twice, expected it once{_place(node)}")
        return super().construct_mapping(node, deep)

    def construct_number(self, node: Any) -> int | float:
        text = self.construct_scalar(node)
        if _SEXAGESIMAL.fullmatch(text) or _OCTAL.fullmatch(text):
            raise _Refusal(
                f"{shown(text)} is another number in YAML 1.1 than it looks like, expected a plain number, "
                f"or quotes around a text{_place(node)}"
            )
        kind = self.construct_yaml_int if node.tag == _PLAIN + "int" else self.construct_yaml_float
        try:
            value: int | float = kind(node)
        except (ValueError, IndexError):
            raise _Refusal(f"{shown(text)} is no number{_place(node)}") from None
        if isinstance(value, int) and abs(value) > LARGEST_INT:
            raise _Refusal(f"{shown(text)}, expected a number below 2**63{_place(node)}")
        return value


def _refused_tag(loader: _Loader, node: Any) -> Any:
    raise _Refusal(f"tag {shown(node.tag)}, expected plain values{_place(node)}")


_Loader.yaml_constructors = {
    **yaml.SafeLoader.yaml_constructors,
    **dict.fromkeys((_PLAIN + "int", _PLAIN + "float"), _Loader.construct_number),
    _PLAIN + "timestamp": _Loader.construct_yaml_str,
    **{_PLAIN + name: _refused_tag for name in ("binary", "omap", "pairs", "set")},
}


class _Refusal(ValueError):
    """What a bound says of a document, without its name."""


def _load(text: str, where: str) -> Any:
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _unfolded(node, {}, set())
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _unfolded(node: Any, sizes: dict[int, int], open_nodes: set[int]) -> int:
    """Values in `node` with every alias written out."""
    if isinstance(node, yaml.ScalarNode):
        return 1
    if id(node) in open_nodes:
        raise _Refusal(f"refers to itself, expected plain values{_place(node)}")
    if id(node) not in sizes:
        open_nodes.add(id(node))
        children = (
            [part for pair in node.value for part in pair]
            if isinstance(node, yaml.MappingNode)
            else node.value
        )
        sizes[id(node)] = 1 + sum(_unfolded(child, sizes, open_nodes) for child in children)
        open_nodes.remove(id(node))
    if sizes[id(node)] > MAX_NODES:
        raise _Refusal(f"its aliases stand for more than {MAX_NODES:,} values, expected fewer")
    return sizes[id(node)]


def _place(node: Any) -> str:
    return f" (line {node.start_mark.line + 1})"


def _guarded(where: str, kind: str, parse: Callable[[], Any], expected: str = "") -> Any:
    """What `parse` returns. Whatever a text makes a parser raise is one `InputError`."""
    expected = f", expected {expected}" if expected else ""
    try:
        return parse()
    except _Refusal as error:
        raise InputError(f"{where}: {error}") from None
    except yaml.MarkedYAMLError as error:
        line = f" (line {error.problem_mark.line + 1})" if error.problem_mark else ""
        raise InputError(f"{where}: not valid YAML: {str(error.problem)[:200]}{line}{expected}") from None
    except (yaml.YAMLError, ValueError, TypeError) as error:
        message = " ".join(str(error).split())
        raise InputError(f"{where}: not valid {kind} ({message[:200]}){expected}") from None
    except (RecursionError, MemoryError, OverflowError):
        raise InputError(f"{where}: not valid {kind} (nested too deeply or too large){expected}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _Refusal(f"key {shown(twice)} occurs twice, expected it once")
    return found


def _no_constant(name: str) -> Any:
    raise _Refusal(f"{name} is no number of JSON, expected a finite one")


def _children(item: Any, where: str) -> Any:
    if type(item) is dict:
        return item.values()
    if type(item) is list:
        return item
    if (type(item) is int and not -LARGEST_INT <= item <= LARGEST_ID) or item in (
        float("inf"),
        float("-inf"),
    ):
        raise InputError(f"{where}: {str(item)[:40]}, expected numbers below 2**63")
    return ()
