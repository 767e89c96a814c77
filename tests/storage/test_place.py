"""Places: a local folder and an object store do the same for whoever reads and writes arrays."""

import os
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from ooc_gemm.storage.format import unfinished
from ooc_gemm.storage.io import folder, listing, requests
from ooc_gemm.storage.io.answers import Answers
from ooc_gemm.storage.io.folder import Folder
from ooc_gemm.storage.io.objects import Objects
from ooc_gemm.storage.io.place import Place
from ooc_gemm.storage.io.stamps import identity


@pytest.fixture(params=["folder", "objects"])
def place(request, tmp_path) -> Place:
    (tmp_path / "c" / "1").mkdir(parents=True)
    if request.param == "folder":
        return Folder(tmp_path)
    obstore = pytest.importorskip("obstore")
    return Objects(obstore.store.LocalStore(tmp_path), "", Answers(None), "x")


def test_a_file_is_put_found_and_deleted(place):
    assert place.read("c/1/2", 10) is None
    assert place.stamp("c/1/2") == (0, 0)
    stamp = place.put("c/1/2", b"0123456789")
    assert stamp == place.stamp("c/1/2")
    assert stamp[0] == 10
    assert place.read("c/1/2", 10) == b"0123456789"
    assert place.read("c/1/2", 4) == b"01234", "one byte more than was asked for"
    assert place.put("c/1/2", b"other") != stamp
    assert place.read("c/1/2", 10) == b"other"
    place.put("c/1/3", b"")
    assert place.read("c/1/3", 10) == b""
    assert place.stamp("c/1/3") != (0, 0)
    place.delete(["c/1/2", "c/1/3"])
    assert place.read("c/1/2", 10) is None
    if isinstance(place, Folder):
        place.delete(["c/1/2"])


def test_files_are_read_in_parts(place):
    place.put("c/1/2", bytes(range(100)))
    with place.open("c/1/2") as file:
        assert file.size == 100
        into = np.zeros(20, np.uint8)
        file.read(into, 30)
        assert into.tolist() == [*range(30, 50)]
        assert file.read_range(np.zeros(4096, np.uint8), 95, 5).tolist() == [*range(95, 100)]
        with pytest.raises(OSError, match=r"became shorter|gives 10 bytes instead of 20"):
            file.read(into, 90)
    with pytest.raises(FileNotFoundError), place.open("c/1/4") as file:
        _ = file.size


@pytest.mark.parametrize("library", [True, False])
def test_files_are_listed_by_pattern(place, monkeypatch, library):
    if not library:
        monkeypatch.setattr(listing, "_library", None)
    keys = (
        "c/1/2",
        "c/1/02",
        "c/01/2",
        "c/1/-3",
        "c/1/9" + "0" * 18,
        "c/1/2.pending",
        "c/10/3",
        "c/x/3",
        "zarr.json",
        "0.1",
        "c/d/4/5",
    )
    for key in keys:
        os.makedirs(Path(place.root if isinstance(place, Folder) else ".", key).parent, exist_ok=True)
        place.put(key, key.encode())

    def listed(pattern):
        found = [
            (pattern.replace("*", "{}").format(*numbers), tuple(stamp))
            for places, some in place.listed(pattern)
            for numbers, stamp in zip(places.tolist(), some.tolist(), strict=True)
        ]
        assert len(dict(found)) == len(found)
        return dict(found)

    found = listed("c/*/*")
    assert set(found) == {"c/1/2", "c/10/3"}
    assert {key: stamp[:2] for key, stamp in found.items()} == {key: place.stamp(key) for key in found}
    if isinstance(place, Folder):
        assert {key: stamp[2] for key, stamp in found.items()} == {
            key: identity(os.stat(place.path(key))) for key in found
        }
    assert set(listed("*.*")) == {"0.1"}
    assert set(listed("zarr.json")) == {"zarr.json"}
    assert listed("*/*") == listed("zarr.*") == listed("none/*") == listed("none") == {}
    assert sorted(place.all_keys()) == sorted(keys)


@pytest.mark.parametrize("library", [True, False])
def test_many_files_of_a_folder_are_listed(tmp_path, monkeypatch, library):
    if not library:
        monkeypatch.setattr(listing, "_library", None)
    count = 2 * listing._FILES + 5
    for number in range(count):
        (tmp_path / f"{number}.{2 * number}").touch()
    found = [(places.copy(), len(stamps)) for places, stamps in Folder(tmp_path).listed("*.*")]
    assert [len(places) for places, _ in found] == [stamps for _, stamps in found]
    places = np.concatenate([places for places, _ in found])
    assert places[places[:, 0].argsort()].tolist() == [[number, 2 * number] for number in range(count)]
    with pytest.raises(PermissionError) if os.geteuid() else nullcontext():
        (tmp_path / "c").mkdir(0)
        list(Folder(tmp_path).listed("c/*"))


@pytest.mark.parametrize("library", [True, False])
@pytest.mark.parametrize("many", [7, 8])
def test_many_folders_are_looked_into(tmp_path, monkeypatch, library, many):
    """By several threads, each of which hands on what it has found, where they hold many files each."""
    threads = []
    monkeypatch.setattr(folder, "MANY", many)
    monkeypatch.setattr(
        folder, "side_by_side", lambda works: threads.append(works) or requests.side_by_side(works)
    )
    if not library:
        monkeypatch.setattr(listing, "_library", None)
    down, across, want = 5 * folder.SHARE * folder.THREADS // 2 + 3, 7, []
    for i in range(down):
        (tmp_path / "c" / str(i)).mkdir(parents=True)
        for j in range(across):
            (tmp_path / "c" / str(i) / f"{j}.x").write_bytes(bytes(1 + i * across + j))
            want.append([i, j, 1 + i * across + j])
    found = [np.hstack([places, stamps[:, :1]]) for places, stamps in Folder(tmp_path).listed("c/*/*.x")]
    assert sorted(np.concatenate(found).tolist()) == want
    assert bool(threads) == (many == across)
    if os.geteuid():
        (tmp_path / "c" / "3").chmod(0)
        with pytest.raises(PermissionError):
            list(Folder(tmp_path).listed("c/*/*.x"))


def test_a_folder_lists_links_that_lead_nowhere_as_nothing(tmp_path):
    (tmp_path / "c" / "0").mkdir(parents=True)
    (tmp_path / "c" / "0" / "0").symlink_to(tmp_path / "nowhere")
    (tmp_path / "c" / "1").symlink_to(tmp_path / "nowhere")
    place = Folder(tmp_path)
    assert [places for some, _ in place.listed("c/*/*") for places in some] == []
    assert place.folders("c/*/*") == [f"{tmp_path}/c", f"{tmp_path}/c/0", f"{tmp_path}/c/1"]
    assert place.folders("*.*") == []


ARRAY = b'{"zarr_format": 3, "node_type": "array", "shape": [1, 1]}'
HEAD = b'{"version": 1}\n'


@pytest.mark.parametrize(
    ("files", "begun", "partial"),
    [
        ({}, False, False),
        ({"zarr.json.partial": ARRAY}, True, True),
        ({".zarray.partial": b'{"zarr_format": 2, "shape": [1, 1]}'}, True, True),
        ({"zarr.json.partial": ARRAY, "zarr.json": ARRAY}, False, False),
        ({"zarr.json.partial": ARRAY, "zarr.json": ARRAY, "ooc-gemm.journal": HEAD}, True, False),
        ({"zarr.json.partial": b"somebody else's"}, False, False),
        ({"zarr.json.partial": b'{"zarr_format": 3, "node_type": "group"}'}, False, False),
        ({"zarr.json.partial": b"damaged", "ooc-gemm.journal": HEAD}, True, True),
        ({"ooc-gemm.journal": HEAD}, True, False),
        ({"ooc-gemm.journal": HEAD[:5]}, True, False),
        ({"ooc-gemm.journal": b"somebody else's"}, False, False),
    ],
)
def test_what_a_run_has_begun_is_told_alike_in_folders_and_stores(place, files, begun, partial):
    for key, data in files.items():
        place.put(key, data)
    assert unfinished.is_begun(place) is begun
    assert unfinished.is_partial(place) is partial


def test_an_array_that_was_set_aside_is_of_an_unfinished_c(tmp_path):
    place = Folder(tmp_path)
    (tmp_path / unfinished.ASIDE).mkdir()
    assert not unfinished.is_partial(place)
    place.put(f"{unfinished.ASIDE}/zarr.json", ARRAY)
    assert unfinished.is_partial(place)
    assert not unfinished.is_partial(Folder(tmp_path / ("x" * 300)))  # no such folder can be
