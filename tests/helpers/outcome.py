"""What a command has said, and what it has left in a folder."""

import os
from pathlib import Path


def snapshot(folder):
    """Every file, folder and link below, with what it holds."""
    return {
        str(path): os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        for path in Path(folder).rglob("*")
    }


def assert_one_sentence(error, *words):
    """A command has said one sentence that contains these words."""
    assert error.startswith("Error: "), error
    assert error.count("\n") == 1, error
    for word in words:
        assert word in error, error
