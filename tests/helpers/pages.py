"""The blocks of code of a page, and runners that carry them out in their order in one folder.

A block of `text` after a block of code is what it prints on standard output: `…` in a line stands for any
text, and a line that is nothing else for any lines. A block with a title is not run, but its syntax is
checked; the title says why. One for an S3 server runs where the test has one, one for a checkout where it
has installed one.
"""

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from conftest import ooc

BLOCK = re.compile(r"^```(sh|python|text)(?: title=\"([^\"]*)\")?\n(.*?)^```$", re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    line: int
    language: str
    title: str
    code: str
    printed: str | None


def blocks(text: str) -> list[Block]:
    """The blocks of a page, each with what it prints. Every fence is one of a language that is known."""
    found: list[Block] = []
    matches = list(BLOCK.finditer(text))
    fences = len(re.findall(r"^\s*```", text, re.MULTILINE))
    assert fences == 2 * len(matches), "a block is neither sh, python nor text, or is indented"
    for match in matches:
        language, title, code = match.groups()
        if language == "text":
            assert found[-1].printed is None
            found[-1] = found[-1]._replace(printed=code)
        else:
            line = text.count("\n", 0, match.start()) + 1
            found.append(Block(line, language, title or "", code, None))
    return found


def differs(printed: str, expected: str) -> str:
    """What differs between an output and what a page says of it; "" where nothing does. Space at the ends
    of lines does not count."""
    lines = [line.rstrip() for line in expected.strip().splitlines()]
    parts = [r"(?:.*\n)*?" if line == "…" else re.escape(line).replace("…", ".*?") + "\n" for line in lines]
    text = "".join(line.rstrip() + "\n" for line in printed.strip().splitlines())
    return "" if re.fullmatch("".join(parts), text) else f"printed:\n{text}\nexpected:\n{expected}"


def bash(code: str, folder: Path, environment: dict[str, str], runs: bool = True) -> str:
    """What commands print; if they are not to be run, their syntax is checked."""
    done = subprocess.run(
        ["bash", "-euc" if runs else "-nc", code],
        cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def this_python(programs: Path) -> str:
    """PATH with this Python, and with `ooc-gemm` in a new folder."""
    programs.mkdir()
    program = programs / "ooc-gemm"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m ooc_gemm.cli "$@"\n')
    program.chmod(0o755)
    return os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]])


class Runner:
    """Runs blocks of one page: commands of ooc-gemm, and Python, in this process."""

    def __init__(self, folder: Path, environment: dict[str, str], s3: bool = False):
        self._folder, self._s3 = folder, s3
        self._names: dict[str, Any] = {"__name__": "__main__"}
        path = this_python(folder / ".bin")
        self._environment = {**os.environ, **environment, "COLUMNS": "80", "PATH": path}

    def run(self, block: Block) -> None:
        """Run a block, or check its syntax; compare what it prints."""
        runs = not block.title or (self._s3 and "S3 server" in block.title)
        try:
            self._compared(block, runs)
        except AssertionError as error:
            raise AssertionError(f"line {block.line}: {error}") from None

    def _compared(self, block: Block, runs: bool) -> None:
        printed = self._sh(block, runs) if block.language == "sh" else self._python(block, runs)
        if runs and block.printed is not None:
            assert not (found := differs(printed, block.printed)), found

    def _sh(self, block: Block, runs: bool) -> str:
        commands = [shlex.split(line, comments=True) for line in block.code.splitlines() if line]
        plain = not re.search(r"[|&;<>$`\\]", re.sub("#.*", "", block.code))
        if runs and plain and not self._s3 and all(words[:1] == ["ooc-gemm"] for words in commands):
            return "".join(self._here(words[1:]) for words in commands)
        return bash(block.code, self._folder, self._environment, runs)

    def _here(self, words: list[str]) -> str:
        """Run a command in this process, which takes a tenth of the time of one of its own."""
        with contextlib.chdir(self._folder):
            done = ooc(*words)
        assert done.code == 0, done.err
        return done.out

    def _python(self, block: Block, runs: bool) -> str:
        code = compile("\n" * block.line + block.code, "page", "exec")
        out = io.StringIO()
        if runs:
            with contextlib.redirect_stdout(out), contextlib.chdir(self._folder):
                exec(code, self._names)
        return out.getvalue()


INTERPRETER = """
import json, sys
names = {"__name__": "__main__"}
for line in sys.stdin:
    exec(compile(json.loads(line), "page", "exec"), names)
    print(END, flush=True)
"""
END = "-- end of the block --"


class Newcomer(Runner):
    """Runs blocks of one page as a newcomer does: each command in a process of its own, Python in one for the
    page. Blocks for a checkout run where there is one with an environment to install into."""

    def __init__(self, folder: Path, environment: dict[str, str], s3: bool, checkout: Path | None):
        self._folder, self._environment, self._s3, self._checkout = folder, environment, s3, checkout
        self._errors = folder / ".errors"
        self._interpreter: subprocess.Popen[str] | None = None

    def run(self, block: Block) -> None:
        if self._checkout and "in a checkout" in block.title:
            block = block._replace(title="", code=f"cd {shlex.quote(str(self._checkout))}\n{block.code}")
        super().run(block)

    def _sh(self, block: Block, runs: bool) -> str:
        return bash(block.code, self._folder, self._environment, runs)

    def _python(self, block: Block, runs: bool) -> str:
        code = "\n" * block.line + block.code
        compile(code, "page", "exec")
        if not runs:
            return ""
        if self._interpreter is None:
            with self._errors.open("wb") as errors:
                self._interpreter = subprocess.Popen(
                    ["python", "-c", f"END = {END!r}{INTERPRETER}"], cwd=self._folder, env=self._environment,
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
                )  # fmt: skip
        asked, answers = self._interpreter.stdin, self._interpreter.stdout
        assert asked
        assert answers
        print(json.dumps(code), file=asked, flush=True)
        lines: list[str] = []
        for line in answers:
            if line == END + "\n":
                return "".join(lines)
            lines.append(line)
        raise AssertionError(self._errors.read_text("utf-8"))

    def close(self) -> None:
        """End the page's Python."""
        if self._interpreter:
            self._interpreter.communicate()
