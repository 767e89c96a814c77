"""Inputs in files of NumPy and HDF5 and in zip archives: right, within the memory limit, and refused in one
sentence."""

import json
import os
import shutil
import subprocess
import sys
import zipfile

import numpy as np
import pytest
import zarr
from conftest import make, ooc

import ooc_gemm
from ooc_gemm import InputError, Operand, StoreError
from ooc_gemm.storage.read import other_files

CPU = {"device": "cpu", "memory_limit": "1GiB"}
A = np.random.default_rng(1).integers(-9, 9, (300, 200)).astype("f4")
B = np.random.default_rng(2).integers(-9, 9, (200, 100)).astype("f4")


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def h5(path, **options):
    h5py = pytest.importorskip("h5py")
    with h5py.File(path, "w") as file:
        x = file.create_dataset("deep/x", data=A, **options)
        file["deep/sample"] = np.arange(300)
        file["deep/sample"].make_scale("sample")
        x.dims[0].attach_scale(file["deep/sample"])
        x.dims[1].label = "gene"
        file["deep/line"] = A[0]
    return path


def archive(path):
    """A group of a matrix and a vector."""
    with zarr.storage.ZipStore(path, mode="w") as store:
        group = zarr.open_group(store, mode="w")
        group.create_array("x", data=A, chunks=(70, 60), shards=(140, 120))
        group.create_array("deep/line", data=A[0])


ORDERS = {
    "C": lambda: A,
    "Fortran": lambda: np.asfortranarray(A),
    "big-endian": lambda: A.astype(">f4"),
    "Fortran, big-endian": lambda: np.asfortranarray(A.astype(">i2")),
}


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
@pytest.mark.parametrize("order", ORDERS)
def test_files_of_numpy_are_read_as_they_lie(here, monkeypatch, order, version):
    monkeypatch.setattr("ooc_gemm.storage.read.npy.UNIT_BYTES", 300)  # rows are read in parts
    with open("a.npy", "wb") as file:
        np.lib.format.write_array(file, ORDERS[order](), version=version)
    np.save("b.npy", B)
    result = ooc_gemm.multiply("a.npy", here / "b.npy", "c", chunks=(64, 64), **CPU)
    assert np.array_equal(result.array[...], A @ B)
    assert result.bytes_read == result.plan.bytes_read
    assert result.plan.ledger["lazy inputs"] == 0
    assert ooc_gemm.verify("a.npy", "b.npy", "c").ok
    assert np.array_equal(ooc_gemm.gram(f"file://{here}/a.npy", transpose=True, **CPU).array, A.T @ A)


@pytest.mark.parametrize("order", "CF")
@pytest.mark.parametrize("rows", [40, 25])
def test_axes_of_numpys_files_are_those_of_the_array(here, order, rows):
    """Also in statistics, and where a square array would hide that they are taken for each other."""
    x = np.random.default_rng(1).normal(size=(rows, 40)) * np.arange(1, 41) + np.arange(rows)[:, None]
    np.save("x.npy", np.asarray(x, order=order))
    near = {"rtol": 1e-10, "atol": 1e-8}
    for rowvar in (False, True):
        assert np.allclose(
            ooc_gemm.cov("x.npy", rowvar=rowvar, **CPU).array, np.cov(x, rowvar=rowvar), **near
        )
        found = ooc_gemm.corrcoef("x.npy", rowvar=rowvar, **CPU).array
        assert np.allclose(found, np.corrcoef(x, rowvar=rowvar), **near)
    for axis, mean in (("rows", x.mean(1, keepdims=True)), ("columns", x.mean(0, keepdims=True))):
        left = Operand("x.npy", center=axis)
        assert np.allclose(
            ooc_gemm.gram(left, transpose=True, **CPU).array, (x - mean).T @ (x - mean), **near
        )
        assert np.allclose(ooc_gemm.multiply(left, x.T, **CPU).array, (x - mean) @ x.T, **near)
    some = ooc_gemm.threshold("x.npy", least=0.2, metric="cosine", **CPU)
    length = np.linalg.norm(x, axis=1, keepdims=True)
    assert some.count == 2 * (np.tril((x / length) @ (x / length).T, -1) >= 0.2).sum()


@pytest.mark.parametrize("options", [{}, {"chunks": (70, 60), "compression": "gzip", "shuffle": True}])
def test_datasets_of_hdf5_are_read_by_their_path(here, options):
    h5("a.h5", **options)
    for spelled in ("a.h5::/deep/x", "a.h5::deep/x", f"{here}/a.h5::/deep/x", here / "a.h5::/deep/x"):
        result = ooc_gemm.multiply(spelled, B, "c", force=True, **CPU)
        assert np.array_equal(result.array[...], A @ B)
        assert result.array.metadata.dimension_names == ("sample", "dim_1")
    assert ooc_gemm.gram("a.h5::/deep/x", "g", transpose=True, **CPU).array.metadata.dimension_names == (
        "gene_0",
        "gene_1",
    )
    assert ooc("multiply", "a.h5::/deep/x", "a.h5::/deep/x", "k", "--transpose-b", "-d", "cpu").code == 0
    assert np.array_equal(zarr.open_array("k")[...], A @ A.T)
    assert np.allclose(ooc_gemm.cov("a.h5::/deep/x", memory_limit="1GiB").array, np.cov(A), atol=1e-3)


@pytest.mark.parametrize("version", [2, 3])
def test_zip_archives_of_zarr(here, version):
    """As ZipStore writes them, and as folders are packed."""
    make("a.zarr", A, chunks=(70, 60), zarr_format=version)
    shutil.make_archive("inside", "zip", "a.zarr")
    shutil.make_archive("outside", "zip", ".", "a.zarr")
    archive("group.zip")
    for spelled in (
        "inside.zip",
        here / "inside.zip",
        "outside.zip::a.zarr",
        "group.zip::/x",
        "group.zip::x",
    ):
        result = ooc_gemm.multiply(spelled, B, "c", force=True, **CPU)
        assert np.array_equal(result.array[...], A @ B)
        assert result.bytes_read > 0
    assert ooc("multiply", "group.zip::x", "inside.zip", "k", "--transpose-b", "-d", "cpu").code == 0
    assert ooc("verify", "group.zip::x", "inside.zip", "k", "--transpose-b").code == 0
    assert ooc_gemm.gram("group.zip::x", "g", **CPU).bytes_read > 0
    assert ooc_gemm.gram("group.zip::x", "g", resume=True, **CPU).bytes_read == 0
    line = ooc_gemm.multiply(ooc_gemm.Operand(A, weights="group.zip::deep/line"), B, **CPU).array
    np.testing.assert_allclose(line, (A * A[0]) @ B, rtol=1e-4, atol=1e-2)
    archive("group.zip")
    with pytest.raises(InputError, match=r"group\.zip::x was changed since"):
        ooc_gemm.gram("group.zip::x", "g", resume=True, **CPU)


@pytest.mark.parametrize("shards", [None, (300, 200)])
def test_what_unpacks_to_more_than_a_chunk_is_not_unpacked(here, monkeypatch, shards):
    make("a.zarr", A, chunks=(300, 200), shards=shards)
    with zipfile.ZipFile("a.zip", "w", zipfile.ZIP_DEFLATED) as file:
        file.write("a.zarr/zarr.json", "zarr.json")
        with file.open("c/0/0", "w") as chunk:
            for _ in range(64):
                chunk.write(bytes(1 << 20))
    read = []
    plain = zipfile.ZipExtFile.read
    monkeypatch.setattr(zipfile.ZipExtFile, "read", lambda *given: read.append(plain(*given)) or read[-1])
    with pytest.raises(StoreError, match=r"a\.zip: chunk c/0/0 cannot be read or decoded"):
        ooc_gemm.multiply("a.zip", B, "c", **CPU)
    assert max(map(len, read)) < 1 << 20


def test_packed_variables_are_decoded_as_their_attributes_say(here):
    h5py = pytest.importorskip("h5py")
    with h5py.File("a.nc", "w") as file:  # as NetCDF-4 stores them
        x = file.create_dataset("t", data=((A - 10) / 0.5).astype("i2"))
        x[3, 4] = -99
        x.attrs.update(scale_factor=np.array([0.5]), add_offset=10.0, _FillValue=np.array([-99], "i2"))
    right = A.copy()
    right[3, 4] = 0
    found = ooc_gemm.multiply(ooc_gemm.Operand("a.nc::/t", decode_cf=True), B, **CPU)
    assert np.array_equal(found.array, right @ B)
    with pytest.warns(UserWarning, match="scale_factor"):
        ooc_gemm.multiply("a.nc::/t", B, **CPU)


def test_vectors_and_statistics_take_files(here):
    np.save("x.npy", A)
    np.save("y.npy", A @ np.ones(200, "f4"))
    h5("x.h5")
    found = ooc_gemm.lstsq("x.npy", "y.npy", memory_limit="1GiB")
    np.testing.assert_allclose(found.array, 1, rtol=1e-4)
    assert np.array_equal(
        ooc_gemm.pca("x.npy", 2, memory_limit="1GiB").singular_values,
        ooc_gemm.pca(make("x", A, chunks=(99, 99)), 2, memory_limit="1GiB").singular_values,
    )
    np.save("w.npy", A[0] ** 2)
    weighted = [ooc_gemm.multiply(ooc_gemm.Operand(A, weights=w), B, **CPU) for w in ("w.npy", A[0] ** 2)]
    assert np.array_equal(weighted[0].array, weighted[1].array)
    line = ooc_gemm.multiply(ooc_gemm.Operand(A, weights="x.h5::/deep/line"), B, **CPU).array
    np.testing.assert_allclose(line, (A * A[0]) @ B, rtol=1e-4, atol=1e-2)


def test_a_run_is_continued_only_if_its_files_are_the_same(here):
    np.save("a.npy", A)
    h5("b.h5")
    ooc_gemm.multiply("a.npy", "b.h5::/deep/x", "c", transpose_b=True, **CPU)
    again = ooc_gemm.multiply("a.npy", "b.h5::deep/x", "c", transpose_b=True, resume=True, **CPU)
    assert again.bytes_read == 0
    np.save("a.npy", A + 1)
    with pytest.raises(InputError, match=r"a\.npy was changed since"):
        ooc_gemm.multiply("a.npy", "b.h5::/deep/x", "c", transpose_b=True, resume=True, **CPU)


def wrong(here):
    """Addresses of files that are no matrices, and what is said of them."""
    np.save("a.npy", A)
    whole = (here / "a.npy").read_bytes()
    (here / "short.npy").write_bytes(whole[:-1])
    (here / "head.npy").write_bytes(whole[:30])
    (here / "lies.npy").write_bytes(whole.replace(b"(300, 200)", b"[" * 9 + b"]"))
    (here / "later.npy").write_bytes(whole[:6] + b"\x09" + whole[7:])
    np.save("objects.npy", np.array([[1, "a"], [None, 2]], object), allow_pickle=True)
    np.save("texts.npy", np.array([["a", "b"]]))
    np.save("deep.npy", np.zeros((2, 3, 4)))
    np.savez("many.npz", A)
    (here / "old.nc").write_bytes(b"CDF\x01" + bytes(100))
    (here / "text.csv").write_text("1,2\n3,4\n")
    os.mkfifo("pipe.npy")
    archive("group.zip")
    (here / "short.zip").write_bytes((here / "group.zip").read_bytes()[:-50])
    with zipfile.ZipFile("texts.zip", "w") as file:
        file.write("text.csv")
    h5("a.h5")
    (here / "short.h5").write_bytes((here / "a.h5").read_bytes()[:-5000])
    return {
        "short.npy": "short.npy is cut off: it holds 239999 bytes of an array of 240000",
        "head.npy": "head.npy is no file that NumPy has written",
        "lies.npy": "lies.npy is no file that NumPy has written",
        "later.npy": "later.npy is no file that NumPy has written",
        "objects.npy": "objects.npy holds pickled Python objects, which are not loaded",
        "texts.npy": "texts.npy holds <U1, which cannot be multiplied",
        "deep.npy": r"deep.npy has shape \(2, 3, 4\), but a matrix has two dimensions",
        "many.npz": "many.npz is a zip archive.*numpy.save",
        "old.nc": "old.nc is a NetCDF file of version 3.*nccopy",
        "text.csv": "text.csv is not a Zarr array",
        "pipe.npy": "pipe.npy is a pipe or a device",
        "group.zip": r"group.zip is a Zarr group; name one of the arrays in it, such as group.zip::x. "
        r"It holds x \(300×200\), deep/line \(200\)$",
        "group.zip::y": "group.zip::y is not in that archive; .* such as group.zip::x",
        "group.zip::deep/line": r"group.zip::deep/line has shape \(200,\), but a matrix has two dimensions",
        "short.zip": "short.zip is no whole zip archive",
        "texts.zip": "texts.zip is a zip archive that holds no Zarr array",
        "a.npy::/x": "a.npy is neither an HDF5 file nor a zip archive",
        "none.h5::/x": "none.h5::/x does not exist",
        "short.h5::/deep/x": "short.h5::/deep/x cannot be opened as HDF5",
        "a.h5": r"a.h5 is an HDF5 group, not a dataset; name one of its datasets, such as a.h5::/deep/x. "
        r"It holds deep/x \(300×200\), deep/line \(200\), deep/sample \(300\)$",
        "a.h5::/deep": "is an HDF5 group, not a dataset",
        "a.h5::/nothing": "a.h5 holds no /nothing; name one of its datasets",
        "a.h5::/deep/line": r"a.h5::/deep/line has shape \(200,\), but a matrix has two dimensions",
    }


def test_what_is_no_matrix_is_said_in_one_sentence(here):
    for spec, said in wrong(here).items():
        with pytest.raises(InputError, match=said) as raised:
            ooc_gemm.plan(spec, B, **CPU)
        assert "\n" not in str(raised.value)
    found = ooc("multiply", "short.npy", "a.npy", "c", "-d", "cpu")
    assert (found.code, found.err.count("\n")) == (2, 1)
    with pytest.raises(InputError, match=r"a\.h5::/c is inside of a file, and C is written as a Zarr array"):
        ooc_gemm.multiply(A, B, "a.h5::/c", **CPU)
    assert not os.path.exists("a.h5::")


def test_a_file_that_is_cut_off_during_the_run_is_an_error(here, monkeypatch):
    np.save("a.npy", A)
    opened = other_files.open_npy

    def cut(*given):
        found = opened(*given)
        os.truncate("a.npy", 1000)
        return found

    monkeypatch.setattr(other_files, "open_npy", cut)
    with pytest.raises(StoreError, match=r"a\.npy was cut off since it was opened"):
        ooc_gemm.multiply("a.npy", B, "c", **CPU)


def test_h5py_is_asked_for_where_it_is_missing(here, monkeypatch):
    h5("a.h5")
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(InputError, match=r"read with h5py; install that with pip install 'ooc-gemm\[hdf5\]'"):
        ooc_gemm.plan("a.h5::/deep/x", B, **CPU)


@pytest.mark.parametrize("kind", ["bfloat16", {"name": "bfloat16"}])
def test_bfloat16_is_refused(here, kind):
    make("a", A, chunks=(99, 99))
    described = json.loads((here / "a/zarr.json").read_text())
    (here / "a/zarr.json").write_text(json.dumps({**described, "data_type": kind}))
    with pytest.raises(InputError, match="a holds bfloat16, which cannot be multiplied; convert it"):
        ooc_gemm.plan("a", B, **CPU)


PEAK = """
import os, sys
import numpy as np
import ooc_gemm
limit = int(sys.argv[1]) << 20
result = ooc_gemm.multiply(sys.argv[2], sys.argv[3], sys.argv[4], memory_limit=limit, device="cpu")
print(result.peak_host_bytes, limit, os.path.getsize(sys.argv[2].partition("::")[0]))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the peak is measured in /proc")
@pytest.mark.parametrize("kind", ["C", "Fortran", "HDF5"])
def test_the_limit_holds_for_files(here, kind):
    large = np.random.default_rng(3).random((9000, 6000), "f4")
    if kind == "HDF5":
        h5py = pytest.importorskip("h5py")
        with h5py.File("a.h5", "w") as file:
            file.create_dataset("x", data=large, chunks=(1000, 1000), compression="lzf")
    else:
        np.save("a.npy", large if kind == "C" else np.asfortranarray(large))
    np.save("b.npy", large[:6000, :64].copy())
    spec = "a.h5::/x" if kind == "HDF5" else "a.npy"
    done = subprocess.run(
        [sys.executable, "-c", PEAK, "190", spec, "b.npy", "c"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    peak, limit, size = map(int, done.stdout.split())
    assert peak <= limit < size
    np.testing.assert_allclose(zarr.open_array("c")[:], large @ large[:6000, :64], rtol=1e-3, atol=1e-2)


def test_chunk_references_are_an_input_as_an_open_array(here):
    h5py, fsspec = pytest.importorskip("h5py"), pytest.importorskip("fsspec")
    described = {"zarr_format": 2, "shape": [300, 200], "chunks": [70, 60], "dtype": "<f4", "order": "C"}
    described |= {"filters": [{"id": "shuffle", "elementsize": 4}], "compressor": {"id": "zlib", "level": 4}}
    refs = {".zgroup": '{"zarr_format": 2}', "x/.zarray": json.dumps({**described, "fill_value": 0.0})}
    with h5py.File(h5("a.h5", chunks=(70, 60), compression="gzip", shuffle=True)) as file:
        stored = file["deep/x"].id
        for chunk in map(stored.get_chunk_info, range(stored.get_num_chunks())):
            row, col = chunk.chunk_offset
            refs[f"x/{row // 70}.{col // 60}"] = [str(here / "a.h5"), chunk.byte_offset, chunk.size]
    local = {"remote_protocol": "file", "remote_options": {"asynchronous": True}}
    system = fsspec.filesystem("reference", fo={"version": 1, "refs": refs}, asynchronous=True, **local)
    store = zarr.storage.FsspecStore(system, read_only=True, path="")
    x = zarr.open_group(store, mode="r", zarr_format=2)["x"]
    assert np.array_equal(ooc_gemm.multiply(x, B, "c", **CPU).array[...], A @ B)
