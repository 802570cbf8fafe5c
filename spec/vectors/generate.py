"""Writes the vector files of the current format version: ``python spec/vectors/generate.py``.

With ``--check`` it writes nothing and ends with 1 if a file differs from what it would write. The
expected values come from ``model.py`` alone, never from the library.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import evolution  # noqa: E402
import explainer  # noqa: E402
import keys  # noqa: E402
import manifests  # noqa: E402
import objects  # noqa: E402
import reader  # noqa: E402
import resharder  # noqa: E402

SUITES = (
    manifests.manifests,
    keys.keys,
    reader.maps,
    reader.headers,
    reader.checks,
    evolution.evolution,
    objects.whole,
    objects.layers,
    objects.writers,
    resharder.stores,
    resharder.transfers,
    explainer.diffs,
)


def files() -> dict[Path, str]:
    """Every vector file with its text."""
    suites = [make() for make in SUITES]
    return {HERE / "1.0" / f"{suite.name}.json": suite.text() for suite in suites}


def main() -> int:
    check = sys.argv[1:] == ["--check"]
    differ = [
        path for path, text in files().items() if not (path.is_file() and path.read_text() == text)
    ]
    for path in differ:
        print(path)
        if not check:
            path.write_text(files()[path])
    return 1 if check and differ else 0


if __name__ == "__main__":
    sys.exit(main())
