"""What every object backend does, and what only one of them can. Right values: plain dicts, files and hand-written.

`backend` is a folder, memory or an S3 service (moto); a test that takes it says what all three do.
"""

from __future__ import annotations

import importlib.util
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from deltacast.delta.errors import InputError, MissingObjectError, ObjectExistsError, StoreError
from deltacast.store.backends import open_backend
from deltacast.store.backends.memory import MemoryBackend
from deltacast.store.objects import ObjectBackend, ObjectInfo
from s3_service import BUCKET, environment, s3_service

needs_s3 = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("obstore", "moto")), reason="obstore or moto is not installed"
)
KINDS = ["local", "memory", pytest.param("remote", marks=needs_s3)]
BAD_NAMES = [
    "", "/", "/a", "a/", "a//b", ".", "..", "../a", "a/..", "a/../b", ".hidden", "a/.hidden", "-a", "a b", "a\\b",
    "a\0b", "a\n", "ä", "a" * 201, "a/b/c/d/e", "/".join(["a" * 100] * 3) + "/.b", "C:x", "a%2e", "~",
]  # fmt: skip


@pytest.fixture(scope="session")
def service() -> Iterator[str]:
    """One S3 service for all tests of the session."""
    with s3_service() as endpoint:
        yield endpoint


@pytest.fixture(params=KINDS)
def url(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty place of each kind."""
    nonce = f"{tmp_path.parent.name}-{tmp_path.name}"
    if request.param == "remote":
        for name, value in environment(request.getfixturevalue("service")).items():
            monkeypatch.setenv(name, value)
    return {"local": str(tmp_path / "store"), "memory": f"memory://{nonce}", "remote": f"s3://{BUCKET}/{nonce}/store"}[
        request.param
    ]


@pytest.fixture
def backend(url: str) -> Iterator[ObjectBackend]:
    """A backend on an empty place."""
    made = open_backend(url, create=True)
    yield made
    made.close()


def names(found: Iterator[ObjectInfo]) -> list[str]:
    return [info.name for info in found]


def random_bytes(num_bytes: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(num_bytes)


def at_once(*calls: Callable[[], None]) -> None:
    """Run calls in threads that start together; raise what one of them raised."""
    start = threading.Barrier(len(calls))

    def run(call: Callable[[], None]) -> None:
        start.wait(30)
        call()

    with ThreadPoolExecutor(len(calls)) as pool:
        for done in [pool.submit(run, call) for call in calls]:
            done.result(60)


class TestCreate:
    @pytest.mark.parametrize("data", [b"", b"{}", bytearray(b"12"), memoryview(b"123"), random_bytes(1 << 20)])
    def test_what_is_created_is_read_back(self, backend: ObjectBackend, data: bytes) -> None:
        """Whole, also through another backend of the same place; an empty object is one."""
        backend.create("versions/00000000000000000001.json", data)
        assert backend.read("versions/00000000000000000001.json") == bytes(data)
        assert open_backend(backend.url).read("versions/00000000000000000001.json") == bytes(data)
        assert backend.stat("versions/00000000000000000001.json").num_bytes == len(data)

    def test_an_object_is_created_once(self, backend: ObjectBackend) -> None:
        """A second create fails, even with the same bytes, and the first stays."""
        backend.create("a", b"first")
        for data in (b"second", b"first", b""):
            with pytest.raises(ObjectExistsError, match="already"):
                backend.create("a", data)
        assert backend.read("a") == b"first"
        backend.delete("a")
        backend.create("a", b"third")
        assert backend.read("a") == b"third"

    def test_of_racing_threads_exactly_one_wins_each_name(self, backend: ObjectBackend) -> None:
        """Fifty names, two threads with a backend each; what is there is what the winner wrote."""
        wins: dict[str, list[bytes]] = {f"versions/{number}": [] for number in range(50)}

        def race(mine: ObjectBackend, data: bytes) -> None:
            for name, winners in wins.items():
                try:
                    mine.create(name, data)
                except ObjectExistsError:
                    continue
                winners.append(data)

        at_once(lambda: race(backend, b"me"), lambda: race(open_backend(backend.url), b"you"))
        assert {name: [backend.read(name)] for name in wins} == wins


class TestWrite:
    def test_many_pieces_make_one_object(self, backend: ObjectBackend) -> None:
        """Pieces of every size, empty ones and other views among them, one after the other."""
        sizes = [0, 1, 4095, 4096, 0, 70_000, 3]
        pieces = [random_bytes(size, seed) for seed, size in enumerate(sizes)]
        words = np.arange(1000, dtype="<u4")
        assert backend.write("updates/x.dcu", [*pieces, words.data]) == sum(sizes) + 4000
        assert backend.read("updates/x.dcu") == b"".join(pieces) + words.tobytes()

    def test_no_piece_at_all_makes_an_empty_object(self, backend: ObjectBackend) -> None:
        """Zero bytes are content too."""
        assert backend.write("updates/x.dcu", iter(())) == 0
        assert backend.read("updates/x.dcu") == b""

    def test_one_buffer_may_carry_every_piece(self, backend: ObjectBackend) -> None:
        """Pieces are not kept: 40 MiB go through one buffer of 2 MiB that is filled again and again."""
        buffer = bytearray(2 << 20)

        def pieces() -> Iterator[memoryview]:
            for number in range(20):
                buffer[:] = bytes([number]) * len(buffer)
                yield memoryview(buffer)

        assert backend.write("snapshots/1-x/weights-1.safetensors", pieces()) == 40 << 20
        out = bytearray(40 << 20)
        backend.read_into("snapshots/1-x/weights-1.safetensors", 0, memoryview(out))
        assert out == b"".join(bytes([number]) * (2 << 20) for number in range(20))
        assert backend.read("snapshots/1-x/weights-1.safetensors") == out

    def test_pieces_may_come_from_the_store_itself(self, backend: ObjectBackend) -> None:
        """A copy reads while it writes, and nobody sees it before it is whole."""
        backend.create("source", random_bytes(1 << 20))

        def pieces() -> Iterator[bytes]:
            for _ in range(36):
                yield backend.read("source")
                assert names(backend.list("")) == ["source"]

        assert backend.write("target", pieces()) == 36 << 20
        assert backend.read("target") == random_bytes(1 << 20) * 36

    @pytest.mark.parametrize("num_pieces", [0, 1, 40])
    def test_pieces_that_fail_leave_nothing(self, backend: ObjectBackend, num_pieces: int) -> None:
        """Whatever they raise is passed on as it is, and no object is there; nor is the old one changed."""
        backend.create("there", b"old")

        def pieces() -> Iterator[bytes]:
            for _ in range(num_pieces):
                yield bytes(1 << 20)
            raise FileNotFoundError("the caller's own")

        for name in ("new", "there"):
            with pytest.raises(FileNotFoundError, match="the caller's own") as caught:
                backend.write(name, pieces())
            assert not isinstance(caught.value, StoreError)
        assert names(backend.list("")) == ["there"]
        assert backend.read("there") == b"old"

    def test_writing_the_same_object_again_makes_it_young(self, backend: ObjectBackend, tmp_path: Path) -> None:
        """So a collector that goes by age does not take what a publish in flight found there."""
        backend.write("updates/x.dcu", [b"12", b"34"])
        if (file := backend.path("updates/x.dcu")) is not None:
            os.utime(file, (1000, 1000))
        before = backend.stat("updates/x.dcu").modified_s
        assert backend.write("updates/x.dcu", [b"1234"]) == 4
        assert backend.read("updates/x.dcu") == b"1234"
        after = backend.stat("updates/x.dcu").modified_s
        assert after > 1_600_000_000
        assert after >= before

    @pytest.mark.parametrize("size", [0, 3, 5, 17 << 20])
    def test_an_object_of_another_size_is_not_written_over(self, backend: ObjectBackend, size: int) -> None:
        """The name says what the bytes are, so one of the two is damaged: the one that is there stays."""
        backend.create("updates/x.dcu", b"1234")
        with pytest.raises(StoreError, match=f"expected {size} bytes, found 4 bytes"):
            backend.write("updates/x.dcu", [bytes(size)])
        assert backend.read("updates/x.dcu") == b"1234"

    def test_racing_writes_of_one_object_all_succeed(self, backend: ObjectBackend) -> None:
        """Two publishers of one update do not disturb each other."""
        data = random_bytes(100_000)

        def publish() -> None:
            for _ in range(5):
                assert backend.write("updates/x.dcu", [data]) == len(data)

        at_once(*[publish] * 4)
        assert backend.read("updates/x.dcu") == data


class TestReplace:
    def test_replace_makes_an_object_or_writes_over_one(self, backend: ObjectBackend) -> None:
        """Longer or shorter, the last bytes are there, whole."""
        for write in (backend.replace, backend.hint):
            for data in (b"first", b"", b"a longer second", b"3"):
                write("HEAD", data)
                assert backend.read("HEAD") == data
        assert names(backend.list("")) == ["HEAD"]

    def test_a_reader_sees_the_old_or_the_new_bytes_whole(self, backend: ObjectBackend) -> None:
        """Never a mixture, never none, while a writer replaces them."""
        values = {bytes([number]) * (1000 + number) for number in range(30)}
        backend.replace("HEAD", bytes([0]) * 1000)
        written = threading.Event()

        def write() -> None:
            try:
                for value in sorted(values):
                    backend.replace("HEAD", value)
            finally:
                written.set()

        def read() -> None:
            while not written.is_set():
                assert backend.read("HEAD") in values

        at_once(write, read)
        assert backend.read("HEAD") == max(values)


class TestRead:
    def test_what_is_not_there_is_missing(self, backend: ObjectBackend) -> None:
        """By every way of reading, below a folder that exists too; a folder is no object."""
        backend.create("a/b", b"1")
        for name in ("b", "a", "a/c", "c/d/e"):
            with pytest.raises(MissingObjectError, match=name):
                backend.read(name)
            with pytest.raises(MissingObjectError, match=name):
                backend.stat(name)
            for size in (0, 1):
                with pytest.raises(MissingObjectError, match=name):
                    backend.read_into(name, 0, memoryview(bytearray(size)))

    def test_any_range_can_be_read(self, backend: ObjectBackend) -> None:
        """Into the caller's memory, from the first byte to the last, and nothing beside it."""
        data = random_bytes(10_000)
        backend.create("a", data)
        for start, size in [(0, 10_000), (0, 0), (10_000, 0), (0, 1), (9_999, 1), (4_095, 2), (1, 9_998)]:
            out = bytearray(b"\xee" * (size + 20))
            backend.read_into("a", start, memoryview(out)[10 : 10 + size])
            assert out == b"\xee" * 10 + data[start : start + size] + b"\xee" * 10, (start, size)

    def test_memory_of_wider_words_is_filled_by_bytes(self, backend: ObjectBackend) -> None:
        """A view of 16-bit words is as good as one of bytes."""
        backend.create("a", bytes(range(100)))
        out = np.zeros(20, dtype="<u2")
        backend.read_into("a", 3, out.data)
        assert out.tobytes() == bytes(range(3, 43))

    @pytest.mark.parametrize(("start", "size"), [(0, 101), (99, 2), (100, 1), (5000, 1), (0, 20 << 20)])
    def test_reading_beyond_the_end_fails(self, backend: ObjectBackend, start: int, size: int) -> None:
        """A short object never passes for a whole one."""
        backend.create("a", bytes(100))
        with pytest.raises(StoreError) as caught:
            backend.read_into("a", start, memoryview(bytearray(size)))
        assert not isinstance(caught.value, MissingObjectError)
        assert "a" in str(caught.value)


class TestList:
    ALL = ("a", "b/a", "b/c-d", "b/c.d", "b/c/d", "b/c/e/f", "b/c0", "b/cc", "bb/a", "c")

    @pytest.fixture
    def filled(self, backend: ObjectBackend) -> ObjectBackend:
        for name in reversed(self.ALL):
            backend.create(name, name.encode())
        return backend

    @pytest.mark.parametrize("prefix", ["", "b/", "b/c/", "b/c/e/", "bb/", "none/", "none/b/"])
    def test_objects_come_by_name(self, filled: ObjectBackend, prefix: str) -> None:
        """Those below the folder, folders below it too, and above `after`: as `sorted` has strings."""
        for after in ("", *self.ALL, "b/c/zz", "b/zz", "zz"):
            found = [(info.name, info.num_bytes) for info in filled.list(prefix, after=after)]
            expected = [name for name in sorted(self.ALL) if name.startswith(prefix) and name > after]
            assert found == [(name, len(name)) for name in expected], after

    def test_a_listing_says_what_stat_says(self, filled: ObjectBackend) -> None:
        """Size and age, give or take the fraction of a second that a service's header leaves out."""
        for info in filled.list(""):
            stat = filled.stat(info.name)
            assert (info.name, info.num_bytes) == (stat.name, stat.num_bytes)
            assert info.modified_s == pytest.approx(stat.modified_s, abs=1)

    def test_thousands_of_objects_are_listed(self, backend: ObjectBackend) -> None:
        """More than one page of a service's listing, in order over the seams."""
        expected = [f"versions/{number:020}.json" for number in range(1100)]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda name: backend.replace(name, b""), expected))
        assert names(backend.list("versions/")) == expected
        assert names(backend.list("versions/", after=expected[1090])) == expected[1091:]

    def test_objects_may_go_while_they_are_listed(self, filled: ObjectBackend) -> None:
        """A listing that is half read goes on; nothing is listed twice."""
        found = filled.list("")
        seen = [next(found).name]
        for name in self.ALL[1::2]:
            filled.delete(name)
        seen += names(found)
        assert seen == sorted(set(seen))
        assert set(self.ALL[::2]) <= set(seen)

    @pytest.mark.parametrize("prefix", ["a", "/", "../", ".tmp/", "a//", "a/../", "/a/"])
    def test_only_folders_are_listed(self, backend: ObjectBackend, prefix: str) -> None:
        """What is no folder's name is refused when list is called, not when it is read."""
        with pytest.raises(InputError):
            backend.list(prefix)
        with pytest.raises(InputError):
            backend.list("a/", after=prefix.rstrip("/") + "//")


class TestDelete:
    def test_a_deleted_object_is_gone(self, backend: ObjectBackend) -> None:
        """And only that one; deleting it again, or what never was, is no error."""
        backend.create("a/b", b"1")
        backend.create("a/c", b"2")
        for _ in range(2):
            backend.delete("a/b")
            backend.delete("never/was")
        assert names(backend.list("")) == ["a/c"]
        with pytest.raises(MissingObjectError):
            backend.read("a/b")


class TestTime:
    def test_age_is_measured_by_the_clock_that_dates_objects(self, backend: ObjectBackend) -> None:
        """An object just written is young, and never much younger than zero."""
        backend.create("a", b"1")
        age_s = backend.now_s() - backend.stat("a").modified_s
        assert -1.5 < age_s < 60
        assert backend.now_s() - backend.stat("a").modified_s < 60

    def test_the_clock_leaves_no_object(self, backend: ObjectBackend) -> None:
        """However the backend learns the time, a listing stays as it is."""
        backend.now_s()
        assert names(backend.list("")) == []

    def test_there_is_nothing_to_sweep_after_whole_writes(self, backend: ObjectBackend) -> None:
        """Objects are not swept, however old."""
        backend.create("a", b"1")
        backend.write("b", [b"2"])
        assert backend.sweep(-100.0) == 0
        assert names(backend.list("")) == ["a", "b"]


@pytest.mark.parametrize("name", BAD_NAMES, ids=ascii)
def test_no_method_takes_what_is_no_name(backend: ObjectBackend, name: str) -> None:
    """Each refuses it before it touches anything."""
    calls: list[Callable[[], object]] = [
        lambda: backend.create(name, b"1"),
        lambda: backend.write(name, [b"1"]),
        lambda: backend.replace(name, b"1"),
        lambda: backend.read(name),
        lambda: backend.read_into(name, 0, memoryview(bytearray(1))),
        lambda: backend.stat(name),
        lambda: backend.delete(name),
        lambda: backend.list(name + "/"),
    ]
    for call in calls[: -1 if not name or (name.endswith("a") and name == "a") else None]:
        with pytest.raises(InputError):
            call()
    assert names(backend.list("")) == []


def test_a_backend_says_where_it_is(url: str) -> None:
    """Its url opens the same place again, closing is allowed twice, and repr names the place and no secret."""
    backend = open_backend(url, create=True)
    backend.create("a", b"1")
    assert backend.url == url
    assert url.rpartition("/")[2] in repr(backend)
    assert "secret" not in repr(backend) + backend.url
    backend.close()
    backend.close()
    assert open_backend(url).read("a") == b"1"
    assert backend.path("a") is None or backend.path("a") == Path(url) / "a"


@pytest.mark.parametrize(
    "url",
    ["http://host/x", "s4://bucket", "memory://", "memory://a/b", "file://other.host/x", "file:///x?y", "s3://",
     "s3://key:hunter2@bucket/x", "s3://bucket/x?secret=hunter2", "s3://bucket/../x", "s3://bucket//x", "gs://a b"],
)  # fmt: skip
def test_a_wrong_url_is_refused_and_no_secret_repeated(url: str) -> None:
    """Also by a scheme that is known."""
    pytest.importorskip("obstore")
    with pytest.raises(InputError) as caught:
        open_backend(url)
    assert "hunter2" not in str(caught.value)


def test_memory_is_shared_by_name_and_dated_by_its_clock(tmp_path: Path) -> None:
    """Two backends of one name hold the same objects, another name none; ages follow the clock that was passed."""
    now = [1000.0]
    one, two = (MemoryBackend(f"{tmp_path.parent.name}-shared", clock=lambda: now[0]) for _ in range(2))
    one.create("a", b"1")
    now[0] = 1500.0
    assert two.stat("a") == ObjectInfo("a", 1, 1000.0)
    assert two.now_s() == 1500.0
    assert names(MemoryBackend(f"{tmp_path.parent.name}-other").list("")) == []
