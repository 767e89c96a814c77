"""What pyproject.toml says of Pythons, systems and versions is what .ci/run tests."""

import re
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def test_classifiers_name_the_pythons_that_are_tested():
    run = (ROOT / ".ci" / "run").read_text("utf-8")
    tested = set(
        re.findall(r"^(?:\w+=\w+ )?make (?:test|test-all|coverage) .*VENV=\.venv-(3\.\d+)", run, re.MULTILINE)
    )
    said = {
        found[1]
        for text in PROJECT["classifiers"]
        if (found := re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", text))
    }
    assert said == tested
    assert PROJECT["requires-python"] == ">=" + min(tested, key=lambda text: int(text.split(".")[1]))
    systems = [text for text in PROJECT["classifiers"] if text.startswith("Operating System")]
    assert systems == ["Operating System :: POSIX :: Linux"], "CI runs on no other"


def test_every_dependency_has_a_floor_and_ci_tries_it():
    assert all(re.fullmatch(r"[\w-]+>=[\d.]+", text) for text in PROJECT["dependencies"])
    assert re.search(r"^make lowest ", (ROOT / ".ci" / "run").read_text("utf-8"), re.MULTILINE)
    assert "--resolution lowest-direct" in (ROOT / "Makefile").read_text("utf-8")


def command(target):
    """What `make TARGET` runs as the last."""
    done = subprocess.run(["make", "-n", "-C", ROOT, target], capture_output=True, text=True, check=True)
    return next(line for line in done.stdout.splitlines() if " -m pytest " in line)


def test_every_test_is_run():
    """`make test` leaves out what is marked slow, `make test-all` nothing, and CI runs it as it is."""
    chosen = re.compile(r"-m '|-k |--deselect|--ignore|tests/")
    assert chosen.findall(command("test")) == chosen.findall(command("lowest")) == ["-m '"]
    assert "-m 'not slow'" in command("test")
    assert not chosen.search(command("test-all"))
    run = (ROOT / ".ci" / "run").read_text("utf-8")
    (everything,) = re.findall(r"^make test-all .*$", run, re.MULTILINE)
    assert "ARGS" not in everything
    (measured,) = re.findall(r"^COVERAGE_CORE=sysmon make coverage .*$", run, re.MULTILINE)
    assert "ARGS" not in measured
    options = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["pytest"]["ini_options"]
    assert not chosen.search(options["addopts"])


def test_what_coverage_leaves_out_is_there():
    """A file that has moved would count again, or another would not."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["coverage"]["run"]
    for pattern in settings["omit"]:
        assert list(ROOT.glob(pattern)), pattern


def test_nothing_is_there_for_systems_that_nobody_tests():
    for file in (ROOT / "ooc_gemm").rglob("*.py"):
        assert not re.search(
            r"win32|os\.name|Windows", file.read_text("utf-8").replace("Windows' metadata", "")
        ), file
