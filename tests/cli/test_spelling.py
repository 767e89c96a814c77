"""Errors and notices name arguments in Python, and options on the command line."""

import ast
import re

import numpy as np
import pytest
from conftest import make, ooc
from sources import trees

import ooc_gemm
from ooc_gemm.cli.group import cli
from ooc_gemm.cli.spelling import for_command_line

OPTIONS = {
    "force": "--force",
    "out_dtype": "--out-dtype",
    "memory_limit": "--memory-limit",
    "device_memory_limit": "--device-memory-limit",
    "chunks": "--chunks",
    "device": "--device",
    "alpha": "--alpha",
    "transpose_a": "--transpose-a",
    "verify": "--verify",
}


@pytest.mark.parametrize(
    ("python", "command"),
    [
        ("give force=True to replace it", "give --force to replace it"),
        ("leave out force=True.", "leave out --force."),
        ("give transpose_a=False", "give --no-transpose-a"),
        ("give out_dtype='float64'", "give --out-dtype float64"),
        ("give a wider out_dtype; or stop", "give a wider --out-dtype; or stop"),
        ("both, such as chunks=(512, 512)", "both, such as --chunks 512,512"),
        (
            "a smaller device_memory_limit, or memory_limit",
            "a smaller --device-memory-limit, or --memory-limit",
        ),
        ("or alpha=-1.5e-3", "or --alpha -1.5e-3"),
        # Words that are also arguments, and parts of paths, are left alone.
        ("chunks of the device; force it, verify it", "chunks of the device; force it, verify it"),
        ("runs/chunks=5/out_dtype/a.zarr exists", "runs/chunks=5/out_dtype/a.zarr exists"),
        ("memory_limit.zarr exists", "memory_limit.zarr exists"),
        ("my_out_dtype=3", "my_out_dtype=3"),
    ],
)
def test_arguments_become_options(python, command):
    assert for_command_line(python, OPTIONS) == command


def test_the_same_refusal_in_both_languages(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in "abc":
        make(name, np.ones((4, 4), "i1"), chunks=(4, 4))
    with pytest.raises(ooc_gemm.InputError) as refused:
        ooc_gemm.multiply("a", "b", "c", device="cpu")
    assert str(refused.value) == "c exists; give force=True to replace it, or choose another place"
    said = ooc("multiply", "a", "b", "c", "-d", "cpu").err
    assert said == "Error: c exists; give --force to replace it, or choose another place\n"
    with pytest.raises(ooc_gemm.RangeError, match=r"give a wider out_dtype$"):
        ooc_gemm.multiply("a", "b", out_dtype="i1", alpha=100, device="cpu")
    said = ooc("multiply", "a", "b", "d", "-d", "cpu", "--out-dtype", "int8", "--alpha", "100").err
    assert said.endswith("give a wider --out-dtype\n")
    with pytest.raises(ooc_gemm.InputError, match=r"chunks=\(512, 512\)$"):
        ooc_gemm.multiply("a", "b", "e", shards=(8, 8), device="cpu")
    said = ooc("multiply", "a", "b", "e", "-d", "cpu", "--shards", "8,8").err
    assert said.endswith("such as --chunks 512,512\n")


COMMAND_LINE = {
    *("random_products.py", "stress.py", "kernels.py", "figures.py", "tables.py", "compile.py"),
    "experiments.py",
}
"""Files outside of cli/ that speak only to users of the command line, or to other programs."""


def texts(tree):
    """Strings of a module that are no docstrings."""
    silent = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in silent:
            yield node.value


@pytest.mark.slow
def test_no_message_is_written_with_options():
    """The command line would show it as it is, and so would Python. (A whole command in backticks, and
    --scheduler, which Python does not have, may be named.)"""
    params = [
        param for name in ("multiply", "gram", "verify", "random") for param in cli.commands[name].params
    ]
    options = {opt for param in params for opt in param.opts if opt.startswith("-")} - {"--scheduler"}
    named = re.compile(rf"(?<![\w-])({'|'.join(map(re.escape, options))})(?![\w-])")
    found = [
        (module.name, text)
        for module, tree in trees().items()
        if module.name not in COMMAND_LINE and module.parent.name != "cli"
        for text in texts(tree)
        if " " in text and named.search(re.sub(r"`[^`]*`", "", text))
    ]
    assert found == []
