"""Options that environment variables give, and what the help of the main command says."""

import json

import click
import numpy as np
import pytest
import zarr
from conftest import make, ooc

from ooc_gemm.cli.group import cli

RESERVED = {"OOC_GEMM_CACHE", "OOC_GEMM_AGAIN"}


def commands(group=cli, before="OOC_GEMM"):
    """Each command with the words that its variables begin with."""
    for name, command in group.commands.items():
        words = f"{before}_{name.upper()}"
        if isinstance(command, click.Group):
            yield from commands(command, words)
        else:
            yield words, command


def test_every_option_has_two_variables():
    for words, command in commands():
        for option in command.params:
            if isinstance(option, click.Option):
                long = max(option.opts, key=len).lstrip("-").replace("-", "_").upper()
                assert option.envvar == [f"{words}_{long}", f"OOC_GEMM_{long}"]
                assert not RESERVED & set(option.envvar)


@pytest.mark.parametrize("words", ["OOC_GEMM", "OOC_GEMM_RANDOM"])
def test_a_variable_gives_an_option(tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    for name, value in {"SHAPE": "30,20", "CHUNKS": "10,20", "DTYPE": "int16", "JSON": "1"}.items():
        monkeypatch.setenv(f"{words}_{name}", value)
    assert json.loads(ooc("random", "x").out)["dtype"] == "int16"
    assert zarr.open_array("x", mode="r").chunks == (10, 20)


def test_the_command_line_counts_first_then_the_variable_of_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make("a", np.eye(16, dtype=np.float32))
    monkeypatch.setenv("OOC_GEMM_MEMORY_LIMIT", "1kB")
    for command in (["multiply", "a", "a", "c"], ["topk", "a", "c"], ["verify", "a", "a", "a"]):
        done = ooc(*command)
        assert done.code == 2
        assert "a memory limit of 1000 bytes is too small" in done.err
    monkeypatch.setenv("OOC_GEMM_GRAM_MEMORY_LIMIT", "2kB")
    assert "2000 bytes" in ooc("gram", "a", "c").err
    assert "3000 bytes" in ooc("gram", "a", "c", "-M", "3kB").err


def test_verbose_shows_where_an_error_comes_from(monkeypatch):
    monkeypatch.setenv("OOC_GEMM_VERBOSE", "1")
    assert "Traceback" in ooc("verify", "no", "no", "no").err
    monkeypatch.setenv("OOC_GEMM_VERBOSE", "0")
    assert "Traceback" not in ooc("verify", "no", "no", "no").err


def test_the_help_of_the_main_command_lists_the_exit_status():
    shown = ooc("--help").out
    for status in (0, 1, 2, 3, 130, 143):
        assert f"\n    {status} " in shown
