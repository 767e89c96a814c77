"""`--scheduler local:N`: nobody but the process that started a cluster can talk to it."""

import contextlib
import os
import signal
import socket
import ssl
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import zarr
from conftest import make, ooc

distributed = pytest.importorskip("distributed")
pytest.importorskip("cryptography")

import dask  # noqa: E402
from distributed.security import Security  # noqa: E402

from ooc_gemm.dask import workers  # noqa: E402
from ooc_gemm.dask.local_cluster import connected  # noqa: E402

pytestmark = [
    pytest.mark.slow,  # it starts clusters
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def listening():
    """The addresses on which this process and its children accept connections."""
    me = psutil.Process()
    return {
        found.laddr
        for process in (me, *me.children(recursive=True))
        for found in process.net_connections("tcp")
        if found.status == psutil.CONN_LISTEN
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where everything temporary of the cluster goes."""
    found = tmp_path_factory.mktemp("temporary")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(found))
        patch.setattr(tempfile, "tempdir", None)
        yield found
    tempfile.tempdir = None


@pytest.fixture(scope="module")
def keys(folder):
    """How the files with keys, and their folders, could be accessed when each of them was used."""
    modes = []
    load = ssl.SSLContext.load_cert_chain

    def loaded(self, certificate, key=None, *more):
        modes.extend(stat.S_IMODE(os.stat(os.path.dirname(path)).st_mode) for path in (certificate, key))
        load(self, certificate, key, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl.SSLContext, "load_cert_chain", loaded)
        yield modes


@pytest.fixture(scope="module")
def cluster(folder, keys):
    """The client of a cluster, and the addresses where it listens."""
    # Workers that were threads of this process, in other files, have left their folders there.
    sys.path[:] = [path for path in sys.path if "dask-scratch-space" not in path]
    before = listening()
    # As users have it (`pytest_configure`).
    usual = dask.config.set({"distributed.worker.profile.enabled": True})
    with usual, connected("local:2", "1GiB", "cpu") as (client, _):
        yield client, listening() - before


def answered(address, context=None):
    """What an address sends to somebody who connects; distributed's servers introduce themselves."""
    with socket.create_connection(address, timeout=20) as connection:
        connection.settimeout(20)
        with contextlib.suppress(OSError):
            if context is None:
                connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
                return connection.recv(100)
            with context.wrap_socket(connection) as encrypted:
                return encrypted.recv(100)
    return b""


def trusting(security=None):
    """A TLS client that believes every server, with the certificate of a client where one is given."""
    context = (
        security.get_connection_args("client")["ssl_context"] if security else ssl.create_default_context()
    )
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def test_every_port_asks_for_the_certificate(cluster):
    client, addresses = cluster
    assert len(addresses) >= 5, "of the scheduler, two nannies and two workers"
    mine = trusting(client.security)
    for address in addresses:
        assert address.ip == "127.0.0.1"
        assert answered(address, mine), "this probe tells who is let in"
        assert answered(address) == b""
        assert answered(address, trusting()) == b""
        assert answered(address, trusting(Security.temporary())) == b""


STRANGER = """
import sys
import distributed
from distributed.security import Security
address = sys.argv[1]
security = Security.temporary() if address.startswith("tls") else None
try:
    with distributed.Client(address, security=security, timeout=3) as client:
        print("connected", client.run_on_scheduler(lambda: "ran"))
except (OSError, TypeError):
    print("refused")
"""


@pytest.mark.parametrize("scheme", ["tcp", "tls"])
def test_another_process_cannot_run_anything(cluster, scheme):
    client, _ = cluster
    address = client.scheduler.address
    assert address.startswith("tls://127.0.0.1:")
    said = subprocess.run(
        [sys.executable, "-c", STRANGER, address.replace("tls", scheme)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert said.stdout.strip() == "refused", said.stderr


def modules_from():
    """The folders from which this process imports modules."""
    return [path or os.getcwd() for path in sys.path]


def test_modules_come_from_no_folder_that_others_can_write(cluster, folder):
    client, _ = cluster
    for paths in (modules_from(), *client.run(modules_from).values()):
        for path in paths:
            if Path(path).is_relative_to(folder):
                inside = [Path(path), *Path(path).parents]
                closed = [one for one in inside if one.is_relative_to(folder) and one != folder]
                assert any(stat.S_IMODE(one.stat().st_mode) == 0o700 for one in closed), path
            else:
                assert "dask-scratch-space" not in path


def test_keys_lie_in_no_file_that_others_can_read(cluster, folder, keys):
    assert len(keys) >= 4
    assert set(keys) == {0o700}
    secret = cluster[0].security.tls_client_key.encode()
    assert b"PRIVATE KEY" in secret
    for path in folder.rglob("*"):
        assert not path.is_file() or secret[40:120] not in path.read_bytes()
    for process in psutil.Process().children(recursive=True):
        for name in ("cmdline", "environ"):
            assert secret[40:120] not in Path(f"/proc/{process.pid}/{name}").read_bytes()


def callbacks(dask_worker):
    return set(dask_worker.periodic_callbacks)


def test_nothing_profiles_the_workers(cluster):
    """Which would look at their threads while the engine starts some."""
    for found in cluster[0].run(callbacks).values():
        assert "heartbeat" in found
        assert "profile" not in found


def test_a_product_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    (tmp_path / "temporary").mkdir()
    values = np.random.default_rng(0).integers(-9, 9, (60, 60)).astype("f4")
    a = make(tmp_path / "a", values, chunks=(20, 20))
    before = listening()
    done = ooc("multiply", a, a, tmp_path / "c", "-d", "cpu", "--scheduler", "local:2", "-M", "900MiB")
    assert done.code == 0, done.err
    assert np.array_equal(zarr.open_array(tmp_path / "c")[:], values @ values)
    assert list((tmp_path / "temporary").iterdir()) == []
    assert listening() <= before


SLOW_START = """\
import sys, time
if any("spawn_main" in word for word in sys.orig_argv):
    time.sleep(2)
"""


@pytest.mark.parametrize(("children", "slow"), [(1, False), (2, False), (3, False), (2, True), (3, True)])
def test_ctrl_c_while_it_starts_is_one_line(tmp_path, children, slow):
    """It reaches all processes of a terminal. Those that start slowly, and have not yet read what fills a
    pipe, would find that what they need is gone."""
    (tmp_path / "path").mkdir()
    long = [f"/none/{number}/{'x' * 3000}" for number in range(30)] if slow else []
    (tmp_path / "path" / "sitecustomize.py").write_text(SLOW_START if slow else "")
    a = make(tmp_path / "a", np.ones((4, 4), "f4"))
    args = ["multiply", a, a, str(tmp_path / "c"), "-d", "cpu", "--scheduler", "local:2"]
    process = subprocess.Popen(
        [sys.executable, "-m", "ooc_gemm.cli", *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path / "path"), *sys.path, *long])},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    while len(psutil.Process(process.pid).children()) < children:
        time.sleep(0.01)
    time.sleep(0.2)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    said = "Interrupted: an output that was begun stays unfinished; run again with --resume to go on"
    assert (process.returncode, out, err.strip()) == (130, "", said)


def test_workers_that_do_not_start(tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "TIMEOUT", 2)
    begun = distributed.SpecCluster
    monkeypatch.setattr(
        distributed,
        "SpecCluster",
        lambda nannies, *args, **options: begun(
            {
                name: one | {"options": one["options"] | {"preload": ["no_such_module"]}}
                for name, one in nannies.items()
            },
            *args,
            **options,
        ),
    )
    a = make(tmp_path / "a", np.ones((4, 4), "f4"))
    done = ooc("multiply", a, a, tmp_path / "c", "--scheduler", "local:2")
    said = "Error: the worker processes of local:2 cannot be started (Nanny failed to start.); give fewer"
    assert (done.code, said in done.err, "Traceback" in done.err) == (1, True, False), done.err
    done = ooc("multiply", a, a, tmp_path / "c", "--scheduler", f"tcp://127.0.0.1:{free_port()}")
    assert (done.code, done.err.startswith("Error: no scheduler answers at tcp://127.0.0.1:")) == (2, True)


def test_a_script_is_told_how_to_use_processes(tmp_path):
    """They import it."""
    a = make(tmp_path / "a", np.ones((4, 4), "f4"))
    text = f"with ooc_gemm.dask.on('local:2'):\n    ooc_gemm.gram({a!r}, {str(tmp_path / 'c')!r})\n"
    (tmp_path / "bad.py").write_text(f"import ooc_gemm\n{text}")
    done = subprocess.run([sys.executable, tmp_path / "bad.py"], capture_output=True, text=True)
    assert "it has to use them below if __name__ == '__main__':" in done.stderr.strip().splitlines()[-1]
    text = "".join(f"    {line}\n" for line in text.splitlines())
    (tmp_path / "good.py").write_text(f"import ooc_gemm\nif __name__ == '__main__':\n{text}")
    subprocess.run([sys.executable, tmp_path / "good.py"], check=True)
    assert np.array_equal(zarr.open_array(tmp_path / "c")[:], np.full((4, 4), 4))


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def test_without_cryptography(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "cryptography"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    a = make(tmp_path / "a", np.ones((4, 4), "f4"))
    done = ooc("multiply", a, a, tmp_path / "c", "--scheduler", "local:2")
    assert done.code == 2
    assert "pip install 'ooc-gemm[distributed]'" in done.err
    assert not (tmp_path / "c").exists()
