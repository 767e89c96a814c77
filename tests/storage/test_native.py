"""The library that copies files in memory: its compilation, and the package without it."""

import subprocess
import sys
from pathlib import Path

import cupy_on_cpu
import pytest

from ooc_gemm.storage.io import background, native

WITHOUT = """
import sys
from ooc_gemm.storage.io import native
native.LIBRARY = native.SOURCES[0]
import numpy as np, ooc_gemm, zarr
from ooc_gemm.storage.io import background, files
assert not background.THERE and not files.in_background(sys.argv[1])
x = np.arange(900.0).reshape(30, 30)
ooc_gemm.multiply(x, x, sys.argv[1] + "/c.zarr", device="cpu")
assert np.array_equal(zarr.open_array(sys.argv[1] + "/c.zarr")[:], x @ x)
"""


def test_it_was_compiled_where_there_is_a_compiler():
    if native.compiler() is None or sys.platform != "linux":
        pytest.skip("there is no C compiler")
    assert background.THERE


def test_it_is_compiled_beside_its_source(tmp_path, monkeypatch):
    if native.compiler() is None:
        pytest.skip("there is no C compiler")
    monkeypatch.setattr(native, "LIBRARY", tmp_path / "made.so")
    assert native.load() is None
    assert native.compile_library() == tmp_path / "made.so"
    assert native.load() is not None
    assert [path.name for path in tmp_path.iterdir()] == ["made.so"]
    monkeypatch.setattr(native, "_VERSION", 0)
    assert native.load() is None  # of another source


@pytest.mark.parametrize("what", ["no compiler", "not C"])
def test_what_cannot_be_compiled_is_left_out(tmp_path, monkeypatch, capsys, what):
    monkeypatch.setattr(native, "LIBRARY", tmp_path / "made.so")
    if what == "no compiler":
        monkeypatch.setenv("CC", "no-such-compiler")
    elif native.compiler() is None:
        pytest.skip("there is no C compiler")
    else:
        monkeypatch.setattr(native, "SOURCES", (tmp_path / "odd.c",))
        (tmp_path / "odd.c").write_text("this is no C\n")
    assert native.compile_library() is None
    assert ("made.so does not compile" in capsys.readouterr().err) == (what == "not C")
    assert not list(tmp_path.glob("made*"))


def test_the_package_without_it(tmp_path):
    subprocess.run([sys.executable, "-c", WITHOUT, str(tmp_path)], timeout=200, check=True)


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_sanitizers_find_nothing(tmp_path, sanitizer):
    found = native.compiler()
    if found is None:
        pytest.skip("there is no C compiler")
    driver = Path(cupy_on_cpu.__file__).with_name("transfers_driver.c")
    flags = "-std=gnu11", "-g", "-O1", f"-fsanitize={sanitizer}", "-pthread", f"-I{native.SOURCES[0].parent}"
    program, empty = tmp_path / "driver", tmp_path / "empty.c"
    empty.write_text("int main(void) { return 0; }\n")
    done = subprocess.run([found, *flags, "-o", program, empty], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"the compiler has no such sanitizer: {done.stderr[-200:]}")
    subprocess.run([found, *flags, "-o", program, driver], check=True)
    (tmp_path / "files").mkdir()
    said = subprocess.run([program, tmp_path / "files"], capture_output=True, text=True, timeout=200)
    assert (said.returncode, said.stderr) == (0, "")
    copies, events, errors, largest, renamed = map(int, said.stdout.split())
    assert (events, errors) == (600, 0)
    assert renamed == len(list((tmp_path / "files").glob("*.new"))) > 0
    assert copies > events
    assert largest == 1005, "the last user's"
