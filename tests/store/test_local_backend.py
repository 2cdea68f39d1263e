"""What only a folder store can: order of flushes, disks that refuse, links, processes. Right values: the disk's own."""

from __future__ import annotations

import errno
import multiprocessing
import os
import resource
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from deltacast.delta.errors import MissingObjectError, ObjectExistsError, StoreError
from deltacast.store.backends import open_backend
from deltacast.store.backends.local import LocalBackend
from store_writers import race

WRITERS = Path(__file__).resolve().parents[1] / "support" / "store_writers.py"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An empty folder."""
    folder = tmp_path / "store"
    folder.mkdir()
    return folder


@pytest.fixture
def backend(root: Path) -> LocalBackend:
    """A store in it."""
    return LocalBackend(root)


def drafts(root: Path) -> list[Path]:
    return list((root / ".tmp").iterdir()) if (root / ".tmp").exists() else []


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """Records what the process asks of the disk, in order, with drafts called `draft` and folders ending with a /."""
    calls: list[str] = []
    opened: dict[int, str | Path] = {}

    def told(path: str | Path | int) -> str:
        where = Path(opened[path] if isinstance(path, int) else path)
        return "draft" if where.parent.name == ".tmp" else where.name + "/" * where.is_dir()

    def spy(function: str, num_paths: int) -> None:
        real = getattr(os, function)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            before = [told(path) for path in args[:num_paths]]
            result = real(*args, **kwargs)
            if function == "open":
                opened[result] = args[0]
            else:
                calls.append(" ".join([function, *before]))
            return result

        monkeypatch.setattr(os, function, wrapped)

    for function, num_paths in {"open": 0, "fsync": 1, "link": 2, "rename": 2, "unlink": 1, "mkdir": 1}.items():
        spy(function, num_paths)

    def taken() -> list[str]:
        found, calls[:] = calls[:], []
        return found

    return taken


class TestDurability:
    def test_data_is_flushed_before_the_name_and_the_name_before_return(
        self, backend: LocalBackend, record: Callable[[], list[str]]
    ) -> None:
        """File, then link, then folder; folders above it once. Nothing else could survive a power cut at any point."""
        backend.create("a/b/c", b"1")
        assert record() == [
            "mkdir .tmp", "fsync store/", "fsync draft", "mkdir a", "fsync store/", "mkdir b", "fsync a/",
            "link draft c", "unlink draft", "fsync b/",
        ]  # fmt: skip
        backend.create("a/b/d", b"1")
        assert record() == ["fsync draft", "link draft d", "unlink draft", "fsync b/"]
        backend.write("a/b/e", [b"1", b"2"])
        assert record() == ["fsync draft", "link draft e", "unlink draft", "fsync b/"]
        backend.replace("a/b/e", b"1")
        assert [call for call in record() if not call.startswith("unlink")] == [
            "fsync draft", "rename draft e", "fsync b/",
        ]  # fmt: skip
        backend.delete("a/b/e")
        assert record() == ["unlink e", "fsync b/"]

    def test_a_folder_that_another_made_is_flushed_too(self, root: Path, record: Callable[[], list[str]]) -> None:
        """Who made it may have died before it was on the disk."""
        (root / ".tmp").mkdir()
        (root / "a").mkdir()
        record()
        LocalBackend(root).create("a/b", b"1")
        assert record() == ["fsync store/", "fsync draft", "fsync store/", "link draft b", "unlink draft", "fsync a/"]

    def test_an_object_that_is_there_is_flushed_too(self, root: Path, record: Callable[[], list[str]]) -> None:
        """Its writer may have died between link and flush, and now two versions rest on it."""
        (root / "a").write_bytes(b"12")
        backend = LocalBackend(root)
        backend.now_s()
        record()
        backend.write("a", [b"12"])
        assert record()[-1] == "fsync store/"
        with pytest.raises(ObjectExistsError):
            backend.create("a", b"12")
        assert record() == ["fsync draft", "fsync store/", "unlink draft"]

    def test_a_hint_waits_for_no_disk(self, backend: LocalBackend, record: Callable[[], list[str]]) -> None:
        """It is renamed into its place, and nothing is flushed for it."""
        backend.now_s()
        record()
        backend.hint("HEAD", b"7\n")
        assert [call for call in record() if not call.startswith("unlink")] == ["rename draft HEAD"]

    def test_a_new_root_and_its_parents_are_flushed(self, tmp_path: Path, record: Callable[[], list[str]]) -> None:
        """Each folder that is made is flushed in the one above it."""
        LocalBackend(tmp_path / "x" / "y", create=True)
        assert record() == ["mkdir x", f"fsync {tmp_path.name}/", "mkdir y", "fsync x/"]


class TestDisk:
    @staticmethod
    def _in_a_mount_namespace(use: str, root: Path) -> list[str]:
        command = ["unshare", "--mount", "--map-root-user", sys.executable, "-P", str(WRITERS), use, str(root)]
        probe = f"mount -t tmpfs none /mnt && {sys.executable} -c ''"
        try:
            subprocess.run([*command[:3], "sh", "-c", probe], check=True, capture_output=True, timeout=20)
        except (OSError, subprocess.CalledProcessError) as err:
            pytest.skip(f"no file system can be mounted here for a test: {err}")
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    def test_a_full_and_a_read_only_disk_are_named(self, root: Path) -> None:
        """A real file system of 256 KiB: nothing is left of what did not fit, and what was there can be read."""
        full, held, late, deleted, clock, still, small = self._in_a_mount_namespace("small", root)
        assert "No space left on device. Free space there" in full
        assert str(root / ".tmp") in full
        assert held == ".tmp small"
        assert "Read-only file system. The file system is read-only" in late
        assert f"cannot delete {root / 'small'}: Read-only file system" in deleted
        assert "Read-only file system" in clock
        assert (still, small) == (".tmp fits small", "b'1234'")

    def test_drafts_on_another_file_system_are_named(self, root: Path) -> None:
        """No hard link leads from one file system to another."""
        split, held = self._in_a_mount_namespace("split", root)
        assert "Invalid cross-device link: expected a file system with hard links, one for the whole folder" in split
        assert held == ".tmp"

    def test_a_file_that_is_too_large_is_named(self, backend: LocalBackend, root: Path) -> None:
        """The limit of this process is real; the draft is gone."""
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        try:
            with pytest.raises(StoreError, match=r"File too large.*ulimit"):
                backend.write("a", [bytes(60_000)] * 2)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert (drafts(root), list(backend.list(""))) == ([], [])

    @pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK])
    def test_a_file_system_without_hard_links_is_named(
        self, backend: LocalBackend, root: Path, monkeypatch: pytest.MonkeyPatch, code: int
    ) -> None:
        """With the folder, and what to do; nothing is there, also under no other name."""

        def refuse(*_: object) -> None:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(os, "link", refuse)
        with pytest.raises(StoreError, match=f"hard links.*{root}/a has none.*or in a bucket"):
            backend.create("a/b", b"1")
        assert (drafts(root), list(backend.list(""))) == ([], [])

    @pytest.mark.parametrize(("call", "code"), [("write", errno.EIO), ("fsync", errno.EIO), ("write", errno.EDQUOT),
                                                ("open", errno.EACCES), ("link", errno.EIO)])  # fmt: skip
    def test_any_failing_call_is_named_and_leaves_nothing(
        self, backend: LocalBackend, root: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
    ) -> None:
        """The path, what the system said, what to do."""
        backend.now_s()

        def refuse(*_: object) -> None:
            raise OSError(code, os.strerror(code))

        with monkeypatch.context() as patched:
            patched.setattr(os, call, refuse)
            with pytest.raises(StoreError, match=f"{root}.*: {os.strerror(code)}[.] [A-Z]"):
                backend.create("a", b"1")
        assert (drafts(root), list(backend.list(""))) == ([], [])

    def test_a_write_that_the_kernel_takes_in_parts_is_whole(
        self, backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Three bytes at a time, as a signal or a size limit of the kernel may have it."""
        real = os.write
        monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:3]))
        assert backend.write("a", [b"0123456789", b"", b"abc"]) == 13
        assert backend.read("a") == b"0123456789abc"

    def test_a_file_in_the_way_of_a_folder_is_named(self, backend: LocalBackend, root: Path) -> None:
        """Neither written, read nor listed through, and not taken for an empty folder."""
        (root / "versions").write_bytes(b"in the way")
        calls: list[Callable[[], object]] = [
            lambda: backend.create("versions/1", b"1"),
            lambda: backend.read("versions/1"),
            lambda: list(backend.list("versions/")),
        ]
        for call in calls:
            with pytest.raises(StoreError, match=r"Not a directory.*move it away") as caught:
                call()
            assert not isinstance(caught.value, MissingObjectError)
        assert drafts(root) == []

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
    def test_a_folder_that_may_not_be_written_is_named(self, backend: LocalBackend, root: Path) -> None:
        """It can still be read."""
        backend.create("a", b"1")
        root.chmod(0o555)
        try:
            with pytest.raises(StoreError, match=r"Permission denied.*Give this user"):
                LocalBackend(root).create("b/c", b"1")
            assert backend.read("a") == b"1"
        finally:
            root.chmod(0o755)


class TestFolder:
    def test_there_must_be_a_folder(self, tmp_path: Path) -> None:
        """Unless it is to be made; a file is none."""
        with pytest.raises(MissingObjectError, match="no such folder"):
            open_backend(tmp_path / "none")
        (tmp_path / "file").write_bytes(b"")
        for create in (False, True):
            with pytest.raises(StoreError, match="file"):
                LocalBackend(tmp_path / "file", create=create)
        assert LocalBackend(tmp_path / "a" / "b", create=True).url == str(tmp_path / "a" / "b")
        assert LocalBackend(tmp_path / "a" / "b", create=True).url == str(tmp_path / "a" / "b")

    def test_a_path_and_a_file_url_are_the_same_place(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Spaces escaped or not; a relative path stays where it was when the process changes its folder."""
        open_backend(tmp_path / "a b", create=True).create("x", b"1")
        monkeypatch.chdir(tmp_path)
        places = [open_backend(f"file://{tmp_path}/a%20b"), open_backend(f"file://localhost{tmp_path}/a%20b"),
                  open_backend("a b"), open_backend(Path("a b"))]  # fmt: skip
        monkeypatch.chdir("/")
        assert [place.read("x") for place in places] == [b"1"] * 4

    def test_objects_are_plain_files_with_the_usual_rights(self, backend: LocalBackend, root: Path) -> None:
        """Others of the group can read them as the umask has it; `path` is the file."""
        before = os.umask(0o027)
        try:
            backend.create("a/b", b"1234")
        finally:
            os.umask(before)
        assert backend.path("a/b") == root / "a" / "b"
        assert (root / "a" / "b").read_bytes() == b"1234"
        assert stat.S_IMODE((root / "a" / "b").stat().st_mode) == 0o640

    def test_what_is_no_object_is_not_listed(self, backend: LocalBackend, root: Path) -> None:
        """Hidden files, drafts, names that no object can have, sockets and empty folders."""
        backend.create("a/b", b"1")
        for name in (".DS_Store", "a/.nfs0001", "a/c d", "a/~", "-x", "ä"):
            (root / name).write_bytes(b"x")
        (root / "e" / "f").mkdir(parents=True)
        (root / "p" / "q" / "r" / "s").mkdir(parents=True)
        (root / "p" / "q" / "r" / "s" / "too-deep").write_bytes(b"x")
        os.mkfifo(root / "fifo")
        backend.write("g", self._seen_while_writing(backend))
        assert [info.name for info in backend.list("")] == ["a/b", "g"]

    @staticmethod
    def _seen_while_writing(backend: LocalBackend) -> Iterator[bytes]:
        yield b"1"
        assert [info.name for info in backend.list("")] == ["a/b"]

    def test_symbolic_links_are_not_followed(self, backend: LocalBackend, root: Path, tmp_path: Path) -> None:
        """A link out of the store is no object and no folder, for reading, writing, listing and deleting."""
        outside = tmp_path / "outside"
        outside.mkdir()
        (outside / "b").write_bytes(b"secret")
        (root / "a").symlink_to(outside)
        (root / "c").symlink_to(outside / "b")
        calls: list[Callable[[], object]] = [
            lambda: backend.read("a/b"),
            lambda: backend.stat("a/b"),
            lambda: backend.create("a/d", b"1"),
            lambda: backend.replace("a/b", b"1"),
            lambda: backend.delete("a/b"),
            lambda: backend.list("a/"),
            lambda: backend.read("c"),
            lambda: backend.stat("c"),
        ]
        for call in calls:
            with pytest.raises(StoreError):
                call()
        with pytest.raises(ObjectExistsError):
            backend.create("c", b"1")
        with pytest.raises(StoreError, match="not what its name says"):
            backend.write("c", [b"secret"])
        assert list(backend.list("")) == []
        backend.replace("c", b"mine")
        assert (backend.read("c"), (outside / "b").read_bytes()) == (b"mine", b"secret")
        assert list(outside.iterdir()) == [outside / "b"]

    def test_drafts_go_nowhere_else_through_a_link(self, backend: LocalBackend, root: Path, tmp_path: Path) -> None:
        """Also if the hidden folder itself is one."""
        (tmp_path / "outside").mkdir()
        (root / ".tmp").symlink_to(tmp_path / "outside")
        with pytest.raises(StoreError, match="leads out of the store"):
            backend.create("a", b"1")
        assert list((tmp_path / "outside").iterdir()) == []

    def test_a_store_may_be_reached_by_a_link(self, backend: LocalBackend, root: Path, tmp_path: Path) -> None:
        """Only links below the root are refused."""
        backend.create("a/b", b"1")
        (tmp_path / "link").symlink_to(root)
        assert LocalBackend(tmp_path / "link").read("a/b") == b"1"

    def test_a_mapped_object_survives_its_replacement(self, backend: LocalBackend) -> None:
        """Replacing makes a new file: who holds the old one keeps its bytes."""
        backend.replace("a", b"old")
        with backend.path("a").open("rb") as file:
            backend.replace("a", b"new")
            assert file.read() == b"old"
        assert backend.read("a") == b"new"


def test_sweep_removes_old_drafts_only(backend: LocalBackend, root: Path) -> None:
    """One of a dead writer goes, also if it has its name already; a young one and objects stay, however old."""
    backend.create("a", b"1")
    dead, linked, young = (root / ".tmp" / name for name in ("dead", "linked", "young"))
    dead.write_bytes(b"half")
    young.write_bytes(b"half")
    linked.hardlink_to(root / "a")
    now = backend.now_s()
    for path in (dead, linked):
        os.utime(path, (now - 1000, now - 1000))
    assert backend.sweep(2000.0) == 0
    assert backend.sweep(900.0) == 2
    assert drafts(root) == [young]
    assert backend.read("a") == b"1"


def test_a_draft_that_was_swept_away_is_said_to_be(backend: LocalBackend, root: Path) -> None:
    """A collector took a writer that was held up for a dead one: the write fails, says so, and can be repeated."""

    def pieces() -> Iterator[bytes]:
        yield b"half"
        (draft,) = drafts(root)
        draft.unlink()
        yield b"whole"

    with pytest.raises(StoreError, match=r"cannot write .*updates/a: its draft was swept away.*min_age_s"):
        backend.write("updates/a", pieces())
    assert list(backend.list("")) == []
    assert backend.write("updates/a", [b"whole"]) == 5


def test_a_link_in_place_of_the_drafts_leads_nowhere(backend: LocalBackend, root: Path, tmp_path: Path) -> None:
    """Swapped in while a process lives: nothing is written through it, and nothing behind it is removed."""
    backend.create("a", b"1")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_bytes(b"old")
    os.utime(outside / "precious", (1, 1))
    (root / ".tmp").rmdir()
    (root / ".tmp").symlink_to(outside)
    for act in (lambda: backend.sweep(0.0), lambda: backend.create("b", b"2"), backend.now_s):
        with pytest.raises(StoreError, match="leads out of the store"):
            act()
    assert [path.name for path in outside.iterdir()] == ["precious"]


def test_of_racing_processes_exactly_one_wins_each_name(root: Path) -> None:
    """Three processes, two hundred names: every name has one winner, and holds the winner's bytes."""
    context = multiprocessing.get_context("spawn")
    names, start, won = [f"versions/{number:020}.json" for number in range(200)], context.Barrier(3), context.Queue()
    children = [context.Process(target=race, args=(str(root), names, writer, start, won)) for writer in range(3)]
    for child in children:
        child.start()
    wins = dict(won.get(timeout=60) for _ in children)
    for child in children:
        child.join(60)
        assert child.exitcode == 0
    assert sorted(name for mine in wins.values() for name in mine) == names
    backend = LocalBackend(root)
    assert [info.name for info in backend.list("versions/")] == names
    for writer, mine in wins.items():
        assert {backend.read(name) for name in mine} <= {f"{writer}".encode() * 1000}
    assert drafts(root) == []
