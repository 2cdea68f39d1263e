"""`bench_store`: rows that make sense; speed itself is not tested."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltacast.bench.store import bench_store
from deltacast.delta.errors import InputError
from deltacast.store.version_store import VersionStore


def test_rows_are_of_the_store_that_was_made(tmp_path: Path) -> None:
    """Sizes and counts are those of the files, times are positive, and progress counts every version's weights."""
    done: list[int] = []
    rows = list(bench_store(tmp_path, chains=(2, 9), num_elements=20_000, percent=2, repeats=2, progress=done.append))
    assert [row.num_updates for row in rows] == [2, 9]
    assert done == [rows[0].weights_bytes] * 9
    with VersionStore.open(tmp_path / "store") as store:
        sizes = [record.update.object.num_bytes for record in store.log() if record.update is not None]
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
    assert (len(sizes), sum(sizes)) == (9, rows[1].replayed_bytes)
    assert rows[1].update_bytes == pytest.approx(sum(sizes[:7]) / 7)
    assert (rows[0].folded_objects, rows[1].folded_objects) == (2, 2)
    assert rows[0].folded_bytes == rows[0].replayed_bytes == sum(sizes[7:])
    assert rows[1].folded_bytes < rows[1].replayed_bytes
    assert all(min(row.publish_s, row.fold_s, row.write_s, row.folded_s, row.replayed_s) > 0 for row in rows)


@pytest.mark.parametrize("options", [{"chains": ()}, {"chains": (0,)}, {"repeats": 0}, {"percent": 101}])
def test_nonsense_is_refused(tmp_path: Path, options: dict[str, object]) -> None:
    """By name, before anything is made."""
    with pytest.raises(InputError, match="nothing to measure"):
        list(bench_store(tmp_path, **options))  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
