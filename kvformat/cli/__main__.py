"""``python -m kvformat.cli``, where the installed command isn't on the path."""

from kvformat.cli import main

main(prog_name="kvformat")
