"""Credentials of object stores and web servers: nothing that is said, drawn or stored may show one."""

import http.server
import signal
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import s3
import zarr
from conftest import ooc
from long_runs import interrupted, long_run
from shelf import keys, put, start

from ooc_gemm.storage.read import addresses

pytestmark = pytest.mark.skipif(bool(s3.missing()), reason=s3.missing() or "-")

MiB = 1 << 20
RNG = np.random.default_rng(11)
A, B = RNG.integers(-9, 9, (300, 400)).astype("f4"), RNG.integers(-9, 9, (400, 260)).astype("f4")


@pytest.fixture
def long(shelf, monkeypatch, proxy):
    """A, B, and how to make C in many chunks, slowly."""
    return long_run(shelf, RNG)


def test_credentials_from_the_usual_files(shelf, monkeypatch, tmp_path, proxy):
    put(f"{shelf}/a", A)
    for name in s3.environment(0):
        if name != "AWS_EC2_METADATA_DISABLED":
            monkeypatch.delenv(name)
    done = ooc("plan", f"{shelf}/a", f"{shelf}/a", "--transpose-b")
    assert done.code == 2
    assert f"{shelf}/a needs credentials, and there are none; set AWS_ACCESS_KEY_ID" in done.err
    folder = tmp_path / ".aws"
    folder.mkdir()
    (folder / "credentials").write_text(
        f"[work]\naws_access_key_id = {s3.KEY}\naws_secret_access_key = {s3.SECRET}\n"
    )
    endpoint = f"endpoint_url = http://127.0.0.1:{proxy.port}"
    (folder / "config").write_text(f"[profile work]\nregion = us-east-1\n{endpoint}\n")
    monkeypatch.setenv("AWS_PROFILE", "work")
    assert ooc("plan", f"{shelf}/a", f"{shelf}/a", "--transpose-b").code == 0
    monkeypatch.setenv("AWS_PROFILE", "play")
    done = ooc("plan", f"{shelf}/a", f"{shelf}/a", "--transpose-b")
    assert done.code == 2
    assert "a cannot be asked for: The config profile (play) could not be found; repair ~/.aws" in done.err


@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT"])
@pytest.mark.parametrize("value", ["localhost:9000", ""])
def test_an_endpoint_that_is_no_address(shelf, monkeypatch, name, value):
    """The client would panic."""
    monkeypatch.setenv(name, value)
    done = ooc("plan", f"{shelf}/a", f"{shelf}/a")
    assert done.code == 2
    assert f"{shelf}/a cannot be reached: {name} is {value!r}, and addresses begin with http" in done.err
    assert len(done.err.splitlines()) == 1


@pytest.mark.slow
def test_credentials_are_nowhere(long, shelf, proxy, monkeypatch):
    args, _ = long
    interrupted(args, proxy, signal.SIGTERM)
    left = b"".join(
        addresses.objects_at(f"{shelf}/c").read(key, MiB) for key in keys(f"{shelf}/c") if key[0] != "c"
    )
    done = ooc(*args, "--resume", "-v", "--trace", "trace.json", "--json")
    assert done.code == 0
    said = [left.decode(), done.out, done.err, Path("trace.json").read_text()]
    said.append(addresses.objects_at(f"{shelf}/c").read("zarr.json", MiB).decode())
    assert '"ooc-gemm"' in said[-1]
    proxy.fault = lambda method, path: 403 if "/a/c/" in path else None
    said += failing(*args, "-f", "-v")
    proxy.fault = lambda method, path: None
    wrong = "wrong/secret+that-nobody-sees"
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", wrong)
    said += failing(*args, "-f", "-v")
    assert "cannot be reached" in said[-1]
    for text in said:
        for secret in (s3.KEY, s3.SECRET, wrong):
            assert secret not in text


def failing(*args):
    process = start(*args)
    out, err = process.communicate(timeout=200)
    assert process.returncode in (1, 2), err
    assert "Traceback" in err
    return [out, err]


@pytest.mark.parametrize("url", [f"s3://{s3.KEY}:pass-word@shelf/a", "s3://shelf/a?token=pass-word"])
def test_credentials_in_an_address(proxy, url):
    done = ooc("multiply", url, url, "c", "-v")
    assert done.code == 2
    assert "credentials do not belong in this address" in done.err
    assert "pass-word" not in done.err
    assert s3.KEY not in done.err


class Files(http.server.SimpleHTTPRequestHandler):
    """Files, for those who know the password and the token."""

    def do_GET(self):
        known = self.headers.get("Authorization") == "Basic YW5uOnMzLXBhc3M="  # ann:s3-pass
        if not known or not self.path.endswith("?sig=token-word"):
            self.send_error(403, f"{self.path} is not for {self.headers.get('Authorization')}")
        else:
            super().do_GET()

    do_HEAD = do_GET

    def send_head(self):
        if self.command == "HEAD":
            found = Path(self.translate_path(self.path))
            self.send_response(200 if found.is_file() else 404)
            self.send_header("Content-Length", str(found.stat().st_size if found.is_file() else 0))
            self.send_header("Last-Modified", self.date_time_string())
            self.end_headers()
            return None
        return super().send_head()

    def log_message(self, *args):
        pass


@pytest.mark.slow
def test_the_web(proxy, tmp_path):
    zarr.create_array("a", data=A, chunks=(100, 100))
    zarr.create_array("b", data=B, chunks=(100, 100), fill_value=7)
    Path("b/c/0/0").unlink()
    served = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Files, directory=str(tmp_path)))
    threading.Thread(target=served.serve_forever, daemon=True).start()
    port = served.server_address[1]
    try:
        a, b = (f"http://ann:s3-pass@127.0.0.1:{port}/{name}?sig=token-word" for name in "ab")
        result = ooc("multiply", a, b, "c", "-d", "cpu", "-v", "--trace", "trace.json")
        assert result.code == 0, result.err
        other = B.copy()
        other[:100, :100] = 7
        assert np.array_equal(zarr.open_array("c")[:], A.astype("f8") @ other)
        texts = [result.out, result.err, Path("c/zarr.json").read_text(), Path("trace.json").read_text()]
        wrong = a.replace("token-word", "other-word")
        done = ooc("multiply", wrong, b, "d", "-d", "cpu", "-v")
        assert done.code == 2
        assert f"http://***@127.0.0.1:{port}/a?*** cannot be reached" in done.err
        texts += [done.out, done.err]
    finally:
        served.shutdown()
        served.server_close()
    for text in texts:
        for secret in ("s3-pass", "token-word", "other-word", "YW5uOnMzLXBhc3M="):
            assert secret not in text
