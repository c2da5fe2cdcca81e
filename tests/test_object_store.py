"""Objects in an object store appear whole, are read by range, and what refuses is named in one line. The server is moto's, on loopback."""

import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import google_crc32c
import numpy as np
import obstore
import pytest
from capture_fixtures import ROOT
from s3_server import BUCKET, folder_contents

import cache.objects
from cache.objects import REMOVING
from cache.spans import Span
from cache.store import open_store
from cache.write import existing_manifest
from pipeline.cli import main
from schemas.errors import CacheError, DflashError, OptionError, StoreFault

# One store


def test_objects_appear_whole_and_are_read_by_range(s3, monkeypatch):
    monkeypatch.setattr(cache.objects, "PART_BYTES", 5 << 20)
    store, draw = open_store(f"s3://{BUCKET}/one/hs.zarr/"), np.random.default_rng(0)
    assert store.vacant()
    large = draw.bytes((12 << 20) + 12345)
    parts = [large[start : start + (1 << 20)] for start in range(0, len(large), 1 << 20)]
    for key, pieces in (("large", parts), ("a/small", [b"abc", memoryview(b"defg")]), ("a/empty", [])):
        whole = b"".join(pieces)
        record = store.put(key, iter(pieces))
        assert (record.bytes, record.crc32c) == (len(whole), f"{google_crc32c.value(whole):08x}")
        assert store.get(key) == whole
        assert store.size(key) == len(whole)
    assert store.sizes() == {"large": len(large), "a/small": 7, "a/empty": 0}
    assert store.sizes("a") == {"a/small": 7, "a/empty": 0}
    assert store.sizes("a/sm") == {}, "prefixes are whole names"
    assert list(store.get_each(["a/small", "none", "a/empty"])) == [b"abcdefg", None, b""]
    spans = [Span("large", int(at), 1 << 16) for at in draw.integers(0, 12 << 20, 40)] + [Span("large", -100, 100)]
    for span, data in zip(spans, store.read(spans), strict=True):
        assert data == large[span.offset : span.offset + span.size or None]
    short = [Span("a/small", 5, 10), Span("a/small", 50, 10), Span("a/small", -20, 20)]
    assert [bytes(data) for data in store.read(short)] == [b"fg", b"", b"abcdefg"]
    with pytest.raises(FileNotFoundError, match="No such file"):
        list(store.read([Span("none", 0, 1)]))
    with store.local(["large", "a/small", "none"]) as folder:
        assert folder_contents(folder) == {"large": large, "a/small": b"abcdefg"}
    assert not folder.exists()
    for key in ("a/small", "a/small", "never"):
        store.delete(key)
    assert (store.get("a/small"), store.size("a/small")) == (None, None)
    assert store.where("a/small") == f"s3://{BUCKET}/one/hs.zarr/a/small"


def test_an_object_that_must_be_new_is_never_replaced(s3):
    store = open_store(f"s3://{BUCKET}/new")
    assert store.put_new("plan", [b"fi", memoryview(b"rst")])
    assert not store.put_new("plan", [b"second"])
    assert store.get("plan") == b"first"


def test_ranges_of_one_read_are_under_way_together(s3, monkeypatch):
    store = open_store(f"s3://{BUCKET}/together")
    store.put("object", [bytes(range(64))])
    together, get_range = threading.Barrier(4, timeout=20), obstore.get_range

    def waits_for_three_others(*arguments, **named):
        together.wait()
        return get_range(*arguments, **named)

    monkeypatch.setattr(obstore, "get_range", waits_for_three_others)
    assert [bytes(data) for data in store.read([Span("object", at, 1) for at in range(8)])] == [
        b"%c" % at for at in range(8)
    ]


def test_a_fault_while_sending_leaves_the_old_object_and_no_upload(s3, monkeypatch):
    monkeypatch.setattr(cache.objects, "PART_BYTES", 5 << 20)
    store = open_store(f"s3://{BUCKET}/fault")
    store.put("object", [b"old"])

    def parts(count):
        for _ in range(count):
            yield bytes(1 << 20)
        raise OSError(5, "cannot be read")

    for count in (1, 12):
        with pytest.raises(OSError, match="cannot be read"):
            store.put("object", parts(count))
    assert store.get("object") == b"old"
    assert s3.uploads() == 0


def test_an_object_that_arrives_short_is_an_error(s3, monkeypatch):
    store = open_store(f"s3://{BUCKET}/short")
    put = obstore.put
    monkeypatch.setattr(obstore, "put", lambda client, key, data, **named: put(client, key, data[:-1], **named))
    with pytest.raises(DflashError, match="4 bytes were sent, 3 arrived"):
        store.put("object", [b"abcd"])
    assert store.get("object") is None


KILLED_UPLOAD = """
import os, signal, sys
import cache.objects
from cache.store import open_store
cache.objects.PART_BYTES = 5 << 20
def parts():
    for number in range(20):
        yield bytes(1 << 20)
        if number == 17:
            os.kill(os.getpid(), signal.SIGKILL)
open_store(sys.argv[1]).put("object", parts())
"""


def test_a_killed_upload_leaves_no_object(s3):
    url = f"s3://{BUCKET}/killed-upload"
    done = subprocess.run([sys.executable, "-c", KILLED_UPLOAD, url], cwd=ROOT, check=False)
    assert done.returncode == -9
    store = open_store(url)
    assert store.size("object") is None
    assert store.vacant(), "what a killed process had sent is no object"


# Refusals

NO_CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": None,
    "AWS_SECRET_ACCESS_KEY": None,
    "AWS_METADATA_ENDPOINT": "http://127.0.0.1:9",
}


@pytest.mark.parametrize(
    ("path", "environment", "code", "rule"),
    [
        ("s3://nowhere/hs.zarr", {}, 2, "has no bucket 'nowhere': create it"),
        ("s3:///hs.zarr", {}, 2, "no bucket is named"),
        ("s3://", {}, 2, "no bucket is named"),
        ("https://somewhere/hs.zarr", {}, 2, "https:// is no place for a cache"),
        (f"s3://{BUCKET}/hs.zarr", {"AWS_ENDPOINT_URL": "nonsense"}, 2, "AWS_ENDPOINT_URL='nonsense' is no address"),
        (
            f"s3://{BUCKET}/hs.zarr",
            {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"},
            1,
            r"http://127\.0\.0\.1:9 cannot be reached",
        ),
        (f"s3://{BUCKET}/hs.zarr", NO_CREDENTIALS, 2, "no credentials for .*: set AWS_ACCESS_KEY_ID"),
        (f"s3://{BUCKET}/hs.zarr", {"AWS_ACCESS_KEY_ID": None}, 2, "no credentials for .*: set AWS_ACCESS_KEY_ID"),
        (f"s3://{BUCKET}/nothing", {}, 2, "no hidden-state cache .no zarr.json there"),
    ],
)
def test_a_wrong_place_is_one_line_that_names_it(s3, monkeypatch, capsys, path, environment, code, rule):
    for name, value in environment.items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    for words in (["verify", path], ["train", "--cache", path, "--draft", "dflash"], ["inspect", path]):
        with pytest.raises(SystemExit) as caught:
            main(words)
        assert caught.value.code == code
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert line.startswith(f"error: {path}")
        assert re.search(rule, line), line


class Answers(BaseHTTPRequestHandler):
    """Answers as told, whatever is asked."""

    codes: tuple[int, ...] = ()
    asked = 0

    def do_GET(self):
        place = min(Answers.asked, len(Answers.codes) - 1)
        code, Answers.asked = Answers.codes[place], Answers.asked + 1
        name = {403: "AccessDenied", 404: "NoSuchKey", 500: "InternalError", 503: "SlowDown"}[code]
        body = f"<Error><Code>{name}</Code><Message>no</Message></Error>".encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def answers(s3, monkeypatch):
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        yield Answers
        server.shutdown()


@pytest.mark.parametrize(
    ("codes", "error", "rule"),
    [
        ((403,), OptionError, r"refuses \(AccessDenied\): check the credentials"),
        ((500,), StoreFault, r"fails \(InternalError\): run the same command again"),
        ((503, 503, 404), None, ""),
    ],
)
def test_who_is_refused_and_who_is_waited_for(answers, codes, error, rule):
    answers.codes, answers.asked = codes, 0
    if error is None:
        open_store(f"s3://{BUCKET}/busy")
    else:
        with pytest.raises(error, match=rule) as caught:
            open_store(f"s3://{BUCKET}/busy")
        assert "\n" not in str(caught.value)
    assert answers.asked <= 4, "the first contact gives up soon"


def test_a_store_that_goes_away_in_the_middle_is_one_line(answers, monkeypatch):
    monkeypatch.setattr(cache.objects, "LATER", ({}, 1, 2))
    answers.codes, answers.asked = (404, 503), 0
    store = open_store(f"s3://{BUCKET}/gone")
    for work in (lambda: store.get("x"), lambda: list(store.read([Span("x", 0, 9)])), store.sizes):
        with pytest.raises(
            StoreFault, match=rf"s3://{BUCKET}/gone: .* fails \(SlowDown\): run the same command again"
        ) as caught:
            work()
        assert "\n" not in str(caught.value)


def test_a_prefix_that_holds_something_else_is_refused(s3):
    url = f"s3://{BUCKET}/others"
    assert existing_manifest(url) is None
    obstore.put(s3.store(), "others/thesis.txt", b"mine")
    obstore.put(s3.store(), "others-too/x", b"mine")
    with pytest.raises(CacheError, match=r"holds something else \('thesis.txt'\): give a new or empty place"):
        existing_manifest(url)
    assert existing_manifest(f"s3://{BUCKET}/others-t") is None
    with pytest.raises(CacheError, match="something else"):
        existing_manifest(f"s3://{BUCKET}")


def test_a_removal_that_was_killed_is_gone_on_with(s3, monkeypatch):
    store = open_store(f"s3://{BUCKET}/removed")
    for key in ("zarr.json", "hidden/1/c/0/0", "shards/000000.json"):
        store.put(key, [b"{}"])
    with monkeypatch.context() as patch:
        patch.setattr(cache.objects.ObjectStore, "sizes", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            store.remove()
    assert store.get("zarr.json") is None, "from the first moment on nobody takes it for a cache"
    assert store.sizes().keys() == {REMOVING, "hidden/1/c/0/0", "shards/000000.json"}
    assert store.vacant()
    store.clean_workspaces()
    assert store.sizes() == {}
    store.put("zarr.json", [b"{}"])
    store.put(REMOVING, [])
    store.clean_workspaces()
    assert store.sizes() == {"zarr.json": 2}, "a removal that never began removes nothing"
