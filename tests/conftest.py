"""How the suite shares few cores among many processes."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; child processes inherit it

WITH_DEADLINES = frozenset({"bench", "demo", "engines", "soak"})


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    """Run tests whose processes wait for one another one after the other: side by side they miss their deadlines."""
    for item in items:
        if Path(item.path).relative_to(Path(__file__).parent).parts[0] in WITH_DEADLINES:
            item.add_marker(pytest.mark.xdist_group("deadlines"))
