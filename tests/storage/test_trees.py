"""Folders of many files are removed by several threads."""

import gc
import os

import pytest

from ooc_gemm.storage.io import trees


def test_all_is_removed_and_links_are_not_followed(tmp_path):
    gc.collect()  # files of earlier tests, which would be closed meanwhile
    kept, tree, before = tmp_path / "kept", tmp_path / "tree", len(os.listdir("/proc/self/fd"))
    kept.mkdir()
    (kept / "file").write_text("stays")
    for number in range(70):
        folder = tree / f"{number % 3}" / f"{number}"
        folder.mkdir(parents=True)
        for name in range(number):
            (folder / f"{name}").write_text("goes")
    (tree / "to a folder").symlink_to(kept)
    (tree / "to a file").symlink_to(kept / "file")
    trees.remove_tree(tree)
    assert not tree.exists()
    assert (kept / "file").read_text() == "stays"
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_cannot_be_removed_is_said(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError):
        trees.remove_tree(tmp_path / "nowhere")
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "x").write_text("")
    unlink = os.unlink

    def refuse(path, *args, **options):
        if os.fspath(path).endswith("x"):
            raise PermissionError(13, "refused")
        unlink(path, *args, **options)

    monkeypatch.setattr(os, "unlink", refuse)
    with pytest.raises(PermissionError):
        trees.remove_tree(tmp_path / "tree")
