"""Arrays on a web server, which lists nothing."""

import http.server
import re
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import zarr

import ooc_gemm
from ooc_gemm.storage.io import answers

VALUES = np.random.default_rng(11).integers(1, 9, (190, 170)).astype("f4")
INDEX_BYTES = 4 * 16 + 4


class Ranges(http.server.SimpleHTTPRequestHandler):
    """Serves files, and parts of files, of which it notes the sizes, and which ones it was asked for."""

    def do_GET(self):
        file = Path(self.translate_path(self.path))
        data, part = file.read_bytes() if file.is_file() else b"", self.headers["Range"]
        self.send_response(404 if not file.is_file() else 206 if part else 200)
        if part and file.is_file():
            first, last = re.fullmatch(r"bytes=(\d*)-(\d*)", part).groups()
            start, last = (int(first), int(last)) if first else (len(data) - int(last), len(data) - 1)
            self.send_header("Content-Range", f"bytes {start}-{last}/{len(data)}")
            data = data[start : last + 1]
            self.server.sizes.append(len(data))
            self.server.parts.add((self.path, part))
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Last-Modified", self.date_time_string())
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    do_HEAD = do_GET

    def log_message(self, *args):
        pass


@pytest.mark.parametrize("compressors", [None, zarr.codecs.ZstdCodec(), zarr.codecs.Crc32cCodec()])
def test_the_index_of_a_shard_is_read_once(tmp_path, monkeypatch, compressors):
    monkeypatch.setattr(answers, "abandoned", threading.Event())
    values, other = VALUES.copy(), VALUES[:170].copy()
    values[:100, 100:] = 0  # a shard that is not stored
    values[100:150, :50] = 0  # a chunk that is not
    options = {"chunks": (50, 50), "shards": (100, 100), "compressors": compressors}
    other[100:, :100] = 0  # another
    zarr.create_array(tmp_path / "a", data=values, **options)
    zarr.create_array(tmp_path / "b", data=other, **options)
    served = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Ranges, directory=str(tmp_path)))
    served.sizes, served.parts = [], set()
    threading.Thread(target=served.serve_forever, daemon=True).start()
    try:
        address = f"http://127.0.0.1:{served.server_address[1]}"
        result = ooc_gemm.multiply(f"{address}/a", f"{address}/b", device="cpu")
    finally:
        served.shutdown()
        served.server_close()
    assert np.array_equal(result.array, values @ other)
    assert result.bytes_read == result.plan.bytes_read
    assert served.sizes.count(INDEX_BYTES) == 3 + 3
    assert len(served.parts) == (3 + 4 + 3 + 4) + (3 + 4 + 4 + 4)
    assert sum(served.sizes) == 6 * INDEX_BYTES + result.bytes_read  # with what is read twice, in two blocks
