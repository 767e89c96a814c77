"""Docstrings of public names and help texts of options are complete."""

import importlib.util
import inspect
import re
from pathlib import Path

import click
import pytest

import ooc_gemm
from ooc_gemm.cli import main  # noqa: F401  (which adds the commands)
from ooc_gemm.cli.group import cli

LEFT_OUT = {
    "ES01": "some functions are said in a sentence",
    "EX01": "examples are in the guides, where they run",
    "SA01": "the reference lists related functions together",
    "PR08": "a description may begin with α",
    "GL02": "a docstring without sections may end in its last line",
    "SS06": "the summary of a class may take two lines",
    "YD01": "what a context manager yields is of no use to others",
}
"""Checks of numpydoc that do not count, and why."""
NAMES = [f"ooc_gemm.{name}" for name in ooc_gemm.__all__]
if importlib.util.find_spec("dask"):
    NAMES += ["ooc_gemm.dask.gram", "ooc_gemm.dask.matmul", "ooc_gemm.dask.multiply", "ooc_gemm.dask.on"]
VERBS = (
    "Add|Append|Ask|Check|Compare|Compress|Compute|Continue|Copy|Count|Decode|Divide|Draw|Drop|Find|Fit|Give|"
    "Hold|Keep|Leave|List|Make|Measure|Multiply|Plan|Print|Rank|Read|Replace|Run|Score|Show|Spread|Start|Stop|"
    "Store|Subtract|Take|Use|Write"
)
"""With which the help of an option begins. A new one is added here."""
SENTENCE = re.compile(rf"(?:(?:First|Also|Without B:) )?(?i:{VERBS})\b.*\.(?:  \[default: .+\])?", re.DOTALL)


@pytest.mark.parametrize("name", NAMES)
def test_docstrings_are_as_numpydoc_wants_them(name):
    validate = pytest.importorskip("numpydoc.validate", reason="needs ooc-gemm[docs]").validate
    left_out = set(LEFT_OUT)
    found = getattr(ooc_gemm, name.split(".")[1])
    if inspect.isclass(found) and found is not ooc_gemm.Operand:
        left_out.add("PR01")  # fields of results have docstrings of their own
    assert [error for error in validate(name)["errors"] if error[0] not in left_out] == []


def commands(command, name="ooc-gemm"):
    yield name, command
    for word, one in getattr(command, "commands", {}).items():
        yield from commands(one, f"{name} {word}")


def test_every_option_has_a_help_that_is_a_sentence_with_a_verb():
    wrong = []
    for name, command in commands(cli):
        for param in command.params:
            if isinstance(param, click.Option) and not SENTENCE.fullmatch(param.help or ""):
                wrong.append((name, param.opts, param.help))
    assert wrong == []


def test_every_command_says_what_it_does():
    for name, command in commands(cli):
        assert SENTENCE.match(command.help), name
        assert SENTENCE.fullmatch(command.get_short_help_str(100)), name


@pytest.mark.parametrize(
    "text", [None, "", "The size.", "Hold at most this much memory", "Frobnicate it.", "Holding memory."]
)
def test_what_is_no_sentence_is_found(text):
    assert not SENTENCE.fullmatch(text or "")


def test_the_reference_lists_every_public_name():
    page = (Path(__file__).resolve().parents[2] / "docs" / "reference" / "python.md").read_text("utf-8")
    listed = set(re.findall(r"^::: ooc_gemm\.(\w+)$", page, re.MULTILINE))
    assert listed == set(ooc_gemm.__all__)
