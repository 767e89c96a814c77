"""Reads the data of a report from standard input and writes its page to the file that is named. This is a
process of its own, because Bokeh takes memory that the limit of a run does not allow for."""

import json
import os
import sys
from pathlib import Path

from .page import page


def main(path: str) -> None:
    """Write the page beside its place and move it there, so that a page is whole or not there."""
    beside = Path(f"{path}.{os.getpid()}.part")
    try:
        beside.write_text(page(json.load(sys.stdin)), "utf-8", errors="backslashreplace")
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


main(sys.argv[1])
