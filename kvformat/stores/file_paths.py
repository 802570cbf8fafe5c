"""Keys as paths below the folder of a file store, and back.

``kvformat1/acme/some%20model/.../00ff`` is the file ``kvformat1/acme/some%2520model/.../00ff+kv``:

* each part of a key between slashes is a directory, the last part is a file;
* every byte outside ``[A-Za-z0-9_.~-]`` becomes ``%XX``, and so does a leading dot, so that no part
  is ``..``, hidden, or holds a separator; an empty part is a lone ``%``;
* a part above ``CHUNK`` characters is cut into chunks, each a level below the one before, and all
  but the first start with ``+``;
* below ``MAX_DEPTH`` directories the rest of the key is one part, its slashes escaped, so that a
  hostile key can't ask for 64 Ki directories;
* files end with ``+kv``. ``+`` is never in an escaped part, so names of different kinds can't meet.

Each key has exactly one path, and a path that no key has is not an object.
"""

from __future__ import annotations

import re
from functools import lru_cache
from urllib.parse import unquote_to_bytes

#: Characters of a part in one directory or file name (a name holds at most 255 bytes).
CHUNK = 240
#: Directories that follow the parts of the key. Keys of this format have six.
MAX_DEPTH = 16
SUFFIX = "+kv"

_UNSAFE = re.compile(rb"[^A-Za-z0-9_.~-]|^\.")
_DIRECTORY = re.compile(r"(?!\.)\+?[A-Za-z0-9_.~%-]+")


def format_path(key: str) -> str:
    """The path of the object ``key``, relative to the folder. ``key`` must be encodable."""
    head, slash, last = _cut(key)
    directory = _format_head(head) + "/" if slash else ""
    return directory + _format_part(last) + SUFFIX


def format_directory(prefix: str) -> str:
    """The deepest directory that holds every key that starts with ``prefix``; "" is the folder."""
    head, slash, _ = _cut(prefix)
    return _format_head(head) if slash else ""


def parse_path(path: str) -> str | None:
    """The key whose object has this relative path, or None where no key has it."""
    if not path.endswith(SUFFIX):
        return None
    parts = path.removesuffix(SUFFIX).replace("/+", "").split("/")
    try:
        key = "/".join("" if part == "%" else unquote_to_bytes(part).decode() for part in parts)
    except UnicodeError:  # also of a file name that is no UTF-8
        return None
    return key if format_path(key) == path else None


def is_directory_name(name: str) -> bool:
    """Whether a directory of this name can be on the path of a key."""
    return _DIRECTORY.fullmatch(name) is not None


def _cut(key: str) -> tuple[str, str, str]:
    """The parts of a key that are directories, a slash if there are any, and the last part."""
    if key.count("/") <= MAX_DEPTH:
        return key.rpartition("/")
    parts = key.split("/", MAX_DEPTH)
    return "/".join(parts[:-1]), "/", parts[-1]


# The same for many keys. Small, because a hostile key may have 128 KiB.
@lru_cache(maxsize=128)
def _format_head(head: str) -> str:
    return "/".join([_format_part(part) for part in head.split("/")])


def _format_part(part: str) -> str:
    text = _UNSAFE.sub(_escape, part.encode()).decode() or "%"
    if len(text) <= CHUNK:
        return text
    return "/+".join([text[start : start + CHUNK] for start in range(0, len(text), CHUNK)])


def _escape(match: re.Match[bytes]) -> bytes:
    return b"%%%02X" % match[0][0]
