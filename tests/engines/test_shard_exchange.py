"""What ranks of one server tell one another: over Gloo, from threads of this process."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from functools import partial

import pytest

from deltacast.delta.errors import DeadlineError, StateError, TransportError
from deltacast.engines.shard_exchange import Exchange
from shard_processes import gloo, together

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def trio() -> Iterator[list[Exchange]]:
    """Three ranks that have met."""
    with tempfile.TemporaryDirectory() as folder:
        groups = together(*(partial(gloo, folder, rank, 3, 20.0) for rank in range(3)))
        yield [Exchange(group, timeout_s=3.0) for group in groups]


def gathered(topic: str, said: Mapping[Exchange, bytes]) -> list[object]:
    """Have ranks gather a topic side by side; what each heard, or raised."""
    return together(*(partial(one.gather, topic, payload) for one, payload in said.items()))


def test_every_rank_hears_all_of_them(trio: list[Exchange]) -> None:
    """Empty messages and large ones, by rank, again and again."""
    said = [b"", b"b" * 3_000_000, b"c"]
    for topic in ("first", "second"):
        assert gathered(topic, dict(zip(trio, said, strict=True))) == [said, said, said]


def test_a_rank_that_takes_no_part_waits_for_nobody_and_is_named(trio: list[Exchange]) -> None:
    """Its reason reaches whoever waits; the next topic is whole again."""
    trio[1].turn("round 1").excuse(ValueError("no room"))
    heard = gathered("round 1", {trio[0]: b"sums", trio[2]: b"sums"})
    assert [str(err) for err in heard] == ["rank 1 of this server takes no part: no room"] * 2
    assert all(isinstance(err, StateError) for err in heard)
    assert gathered("round 2", dict.fromkeys(trio, b"x")) == [[b"x"] * 3] * 3


def test_what_comes_of_a_topic_that_was_given_up_is_dropped(trio: list[Exchange]) -> None:
    """So that ranks which left at different points meet in the next."""
    for number in range(40):
        trio[0].turn(f"given up {number}").excuse("left")
        trio[1].post(f"given up {number}", b"what nobody waits for")
    for topic in ("next", "and next"):
        assert gathered(topic, dict.fromkeys(trio, b"x")) == [[b"x"] * 3] * 3


def test_a_turn_speaks_once(trio: list[Exchange]) -> None:
    """What was said stands; a later excuse is not heard."""
    turns = [one.turn("round 1") for one in trio]
    together(*(partial(turn.gather, b"sums") for turn in turns))
    for turn in turns:
        turn.excuse("rolled back")
    assert gathered("round 2", dict.fromkeys(trio, b"x")) == [[b"x"] * 3] * 3


def test_a_silent_rank_is_named_in_time_and_the_group_is_of_no_more_use(trio: list[Exchange]) -> None:
    """Nobody waits for longer than the timeout, now or later."""
    heard = gathered("round 1", {trio[0]: b"x", trio[2]: b"x"})
    assert any(isinstance(err, DeadlineError) and "rank 1 did not answer in time" in str(err) for err in heard)
    assert all(isinstance(err, TransportError) for err in heard)
    with pytest.raises(TransportError, match="Restart the server"):
        trio[0].gather("round 2", b"x")
    trio[0].turn("round 3").excuse("left")
