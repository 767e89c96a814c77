"""C inside groups with consolidated metadata: what they say of it is true at any time."""

import json
import os
import shutil
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest
import s3
import zarr
from conftest import make, ooc
from interruption import interrupted

import ooc_gemm
from ooc_gemm.storage.io import answers
from ooc_gemm.storage.read import addresses
from ooc_gemm.storage.write import consolidated, publication

pytestmark = pytest.mark.filterwarnings("ignore::zarr.errors.ZarrUserWarning")

A, B, OLD = (
    np.random.default_rng(7).integers(-9, 9, shape).astype("f4") for shape in ((60, 50), (50, 40), (60, 40))
)
CPU = ("-d", "cpu")


def consolidate(group, version=3):
    zarr.consolidate_metadata(group, zarr_format=version)


@pytest.fixture(params=[3, 2])
def version(request):
    return request.param


@pytest.fixture
def here(tmp_path, monkeypatch, version):
    """a and b; groups g and g/sub, both consolidated, with arrays c and other in g/sub."""
    monkeypatch.chdir(tmp_path)
    make("a", A, chunks=(20, 20), compressors=None)
    make("b", B, chunks=(20, 20), compressors=None)
    group = zarr.create_group("g", zarr_format=version)
    group.create_group("sub")
    make("g/sub/c", OLD, chunks=(20, 20), attributes={"mine": 1}, zarr_format=version)
    make("g/sub/other", np.arange(6.0), chunks=(3,), zarr_format=version)
    consolidate("g/sub", version)
    consolidate("g", version)
    return tmp_path


def through(group, path):
    """An array as its group has it; None where the group has none."""
    opened = zarr.open_consolidated(group, mode="r")
    try:
        return opened[path]
    except KeyError:
        return None


def other_is_there():
    assert (through("g", "sub/other")[...] == np.arange(6)).all()
    assert (through("g/sub", "other")[...] == np.arange(6)).all()


OPTIONS = {"force": {"force": True, "chunks": (30, 10), "out_dtype": "f8"}, "beta": {"beta": 2}}


@pytest.mark.parametrize("how", OPTIONS)
def test_an_unfinished_c_is_not_seen_through_its_groups(here, monkeypatch, version, how):
    interrupted(monkeypatch, 2, "a", "b", "g/sub/c", **OPTIONS[how])
    assert (through("g", "sub/c"), through("g/sub", "c")) == (None, None)
    other_is_there()
    consolidate("g", version)  # somebody does
    ooc_gemm.multiply("a", "b", "g/sub/c", resume=True)
    expected = A @ B + (2 * OLD if how == "beta" else 0)
    assert np.array_equal(zarr.open_array("g/sub/c", mode="r")[...], expected)
    other_is_there()
    for seen in (through("g", "sub/c"), through("g/sub", "c")):
        if version == 2 and how == "force":  # a group of version 2 holds no array of version 3
            assert seen is None
        else:
            assert np.array_equal(seen[...], expected)
            assert seen.attrs["ooc-gemm"]["options"]["alpha"] == "1.0"
            assert ("mine" in seen.attrs) == (how == "beta")


@pytest.mark.parametrize("command", ["multiply", "random"])
def test_a_new_array_is_seen(here, version, command):
    args = ["multiply", "a", "b", "g/sub/new", *CPU] if command == "multiply" else ["random", "g/sub/new"]
    args += ["--shape", "60,40"] if command == "random" else []
    before = Path("g", "zarr.json" if version == 3 else ".zmetadata").stat().st_mode
    assert ooc(*args).code == 0
    other_is_there()
    assert Path("g", "zarr.json" if version == 3 else ".zmetadata").stat().st_mode == before
    if version == 3:
        want = zarr.open_array("g/sub/new", mode="r")[...]
        assert np.array_equal(through("g", "sub/new")[...], want)
        assert np.array_equal(through("g/sub", "new")[...], want)
    # Where the groups between have no entry there is no place for one.
    assert ooc("multiply", "a", "b", "g/nowhere/deep/new", *CPU).code == 0
    other_is_there()


def tree(group, below=""):
    """The paths of everything below an open group."""
    for name, one in group.members():
        yield f"{below}{name}"
        if isinstance(one, zarr.Group):
            yield from tree(one, f"{below}{name}/")


def both(group):
    """What a group lists with its consolidated metadata, and without."""
    opened = [zarr.open_group(group, mode="r", use_consolidated=use) for use in (True, False)]
    for one in set(tree(opened[0])):
        opened[0][one]
    return [sorted(tree(one)) for one in opened]


def keys(group, version):
    found = json.loads(Path(group, "zarr.json" if version == 3 else ".zmetadata").read_text())
    return list((found["consolidated_metadata"] if version == 3 else found)["metadata"])


def deep_group(version):
    """Make groups of several levels, whose names zarr sorts in a way of its own."""
    group = zarr.open_group("deep", mode="w", zarr_format=version)
    for path in ("a/x/p", "b/y/q", "a/x/c", "a-b/w", "Ab/z", "a/v", "top", "Bc"):
        group.create_array(path, data=OLD, chunks=(20, 20))
    group.create_group("b/empty/er")
    consolidate("deep/a", version)
    consolidate("deep", version)


@pytest.mark.parametrize("c", ["a/x/c", "a/v", "Ab/z", "top", "b/y/q"])
@pytest.mark.parametrize("options", [{"beta": 2}, {"force": True}], ids=["updated", "replaced"])
def test_an_array_that_is_written_hides_no_others(here, version, c, options):
    deep_group(version)
    seen, order = both("deep"), keys("deep", version)
    assert seen[0] == seen[1]
    ooc_gemm.multiply("a", "b", f"deep/{c}", device="cpu", **options)
    seen, kept = both("deep"), version == 3 or "beta" in options
    # A group of version 2 holds no array of version 3.
    assert seen[0] == [one for one in seen[1] if kept or one != c]
    assert keys("deep", version) == [one for one in order if kept or one.rpartition("/")[0] != c]
    if c.startswith("a/"):
        assert both("deep/a")[0] == [one for one in both("deep/a")[1] if kept or f"a/{one}" != c]


@pytest.mark.parametrize("version", [3])
@pytest.mark.parametrize("c", ["a/c", "a/x/d", "new", "b/new/newer/c", "b/empty/er/c", "B2/c"])
def test_a_new_array_hides_no_others(here, c, version):
    deep_group(3)
    ooc_gemm.multiply("a", "b", f"deep/{c}", device="cpu")
    seen = both("deep")
    assert seen[0] == seen[1]
    assert c in seen[0]
    order = keys("deep", 3)
    consolidate("deep")
    assert keys("deep", 3) == order


@pytest.mark.parametrize("version", [3])
def test_groups_whose_names_differ_in_case(here, version):
    group = zarr.open_group("deep", mode="w")
    for path in ("a/v", "A/w", "a/x"):
        group.create_array(path, data=OLD)
    consolidate("deep")  # where zarr 3.1 loses a/v
    ooc_gemm.multiply("a", "b", "deep/a/y", device="cpu")
    assert both("deep")[0] == ["A", "A/w", "a", "a/v", "a/x", "a/y"]


@pytest.mark.parametrize("version", [3])
def test_a_finished_c_uncovers_what_it_has_hidden(here, version):
    """What was written before C entered its groups in order is put right by resume=True."""
    deep_group(3)
    ooc_gemm.multiply("a", "b", "deep/a/new", device="cpu")
    path = Path("deep/zarr.json")
    found = json.loads(path.read_text())
    entries = found["consolidated_metadata"]["metadata"]
    entries["a/new"] = entries.pop("a/new")
    path.write_text(json.dumps(found))
    ooc_gemm.multiply("a", "b", "deep/a/new", device="cpu", resume=True)
    seen = both("deep")
    assert seen[0] == seen[1]


def test_a_finished_c_enters_its_groups_when_the_line_is_run_again(here, version):
    ooc_gemm.multiply("a", "b", "g/sub/c", force=True)
    documents = [Path("g/zarr.json"), Path("g/sub/zarr.json")] if version == 3 else []
    for path in documents:  # as where the run was killed right before
        found = json.loads(path.read_text())
        found["consolidated_metadata"]["metadata"] = {
            key: value for key, value in found["consolidated_metadata"]["metadata"].items() if "c" not in key
        } | {key: v for key, v in found["consolidated_metadata"]["metadata"].items() if key.endswith("other")}
        path.write_text(json.dumps(found))
    ooc_gemm.multiply("a", "b", "g/sub/c", resume=True)
    other_is_there()
    if version == 3:
        assert np.array_equal(through("g", "sub/c")[...], A @ B)


def test_a_refused_run_changes_no_group(here, monkeypatch):
    before = contents()
    assert ooc("multiply", "a", "b", "g/sub/c", *CPU).code == 2
    assert ooc("multiply", "a", "b", "g/sub/c", *CPU, "-f", "-M", "1MiB").code == 2
    with monkeypatch.context() as patch:
        patch.setattr(publication.Publication, "begin", fail)
        assert ooc("multiply", "a", "b", "g/sub/c", *CPU, "-f").code == 2
    assert contents() == before


def contents():
    """Of all files; consolidated metadata may be laid out differently."""
    found = {path: path.read_bytes() for path in Path("g").rglob("*") if path.is_file()}
    return {path: json.loads(x) if path.name in consolidated.DOCUMENTS else x for path, x in found.items()}


def fail(*args, **options):
    raise OSError(28, "No space left on device")


def test_a_group_that_cannot_be_changed(here, version):
    document = "g/zarr.json" if version == 3 else "g/.zmetadata"
    if subprocess.run(["chattr", "+i", document], capture_output=True).returncode:
        pytest.skip("files cannot be made immutable here")
    try:
        done = ooc("multiply", "a", "b", "g/sub/c", *CPU, "-f")
        assert (done.code, "cannot be begun: a group above it holds" in done.err) == (2, True), done
        assert done.err.count("\n") == 1
        assert np.array_equal(through("g", "sub/c")[...], OLD)
        done = ooc("multiply", "a", "b", "g/sub/new", *CPU)
        assert done.code == 0
        assert ("consolidate them again" in done.err) == (version == 3)
        other_is_there()
    finally:
        subprocess.run(["chattr", "-i", document], check=True)


@pytest.mark.parametrize("spelled", ["link/sub/c", "linked-c", "./g/../g/sub/c", "g/sub/linked"])
def test_links(here, monkeypatch, spelled):
    """C is seen through the groups above its place, and above the path that is given."""
    Path("link").symlink_to("g")
    Path("linked-c").symlink_to("g/sub/c")
    if spelled == "g/sub/linked":
        shutil.copytree("g/sub/c", "elsewhere")
        Path("g/sub/linked").symlink_to("../../elsewhere")
        for group in ("g/sub", "g"):
            consolidate(group, 2 if Path("g/.zgroup").exists() else 3)
    key = "linked" if spelled.endswith("/linked") else "c"
    interrupted(monkeypatch, 2, "a", "b", spelled, beta=2)
    assert (through("g", f"sub/{key}"), through("g/sub", key)) == (None, None)
    ooc_gemm.multiply("a", "b", spelled, resume=True)
    assert np.array_equal(through("g", f"sub/{key}")[...], A @ B + 2 * OLD)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"consolidated_metadata": 7}', '{"metadata": [1]}'])
def test_documents_that_hold_none(here, text):
    for name in consolidated.DOCUMENTS:
        Path(name).write_text(text + ' "consolidated_metadata" "metadata"' * (text == "{"))
    done = ooc("multiply", "a", "b", "new", *CPU)
    assert done.code == 0, done
    assert [Path(name).read_text()[: len(text)] for name in consolidated.DOCUMENTS] == [text, text]


@pytest.mark.parametrize("trap", ["pipe", "device", "link", "folder"])
def test_documents_that_are_no_files(here, trap):
    for name in consolidated.DOCUMENTS:
        if trap == "pipe":
            os.mkfifo(name)
        elif trap == "folder":
            Path(name).mkdir()
        else:
            Path(name).symlink_to("/dev/zero" if trap == "device" else "nowhere")
    assert ooc("multiply", "a", "b", "new", *CPU).code == 0


def test_a_document_that_is_too_long(here, monkeypatch):
    monkeypatch.setattr(consolidated, "MAX_BYTES", 100)
    done = ooc("multiply", "a", "b", "g/sub/c", *CPU, "-f")
    assert (done.code, "takes more than" in done.err) == (2, True), done
    assert np.array_equal(zarr.open_array("g/sub/c", mode="r")[...], OLD)


def test_two_runs_below_one_group(here):
    """Neither loses what the other has written."""
    errors = []

    def run(name):
        try:
            for _ in range(3):
                ooc_gemm.multiply(A, B, f"g/{name}", device="cpu", force=True)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(f"new-{i}",)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    other_is_there()
    if Path("g/zarr.json").exists():
        for i in range(3):
            assert np.array_equal(through("g", f"new-{i}")[...], A @ B)


# ------------------------------------------------------------------------------------------ object stores


@pytest.mark.parametrize("how", OPTIONS)
def test_groups_in_an_object_store(server, here, monkeypatch, version, how):
    for name, value in s3.environment(server).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(answers, "abandoned", threading.Event())
    top = f"s3://{s3.BUCKET}/{how}-{version}"
    group = zarr.create_group(addresses.remote_place(top), zarr_format=version, overwrite=True)
    for name, values in (("c", OLD), ("other", B)):
        made = group.create_array(
            f"sub/{name}", shape=values.shape, dtype="f4", chunks=(20, 20), overwrite=True
        )
        made[...] = values
    group.require_group("sub")
    zarr.consolidate_metadata(addresses.remote_place(top), zarr_format=version)

    def seen(path):
        try:
            return zarr.open_consolidated(addresses.remote_place(top), mode="r")[path][...]
        except KeyError:
            return None

    assert np.array_equal(seen("sub/c"), OLD)
    looked = []
    options = {**OPTIONS[how], "device": "cpu"}
    run = ooc_gemm.multiply(
        "a", "b", f"{top}/sub/c", progress=lambda *_: looked.append(seen("sub/c")), **options
    )
    assert run.m == 60
    assert len(looked) > 1
    assert all(one is None for one in looked[:-1])  # the last call is when all is written
    expected = A @ B + (2 * OLD if how == "beta" else 0)
    assert np.array_equal(seen("sub/other"), B)
    if version == 2 and how == "force":
        assert seen("sub/c") is None
    else:
        assert np.array_equal(seen("sub/c"), expected)
