"""What the client tells vLLM servers by what they say they hold. The servers here say what a test has them say."""

from __future__ import annotations

from typing import Any, Final

import pytest

from deltacast.delta.errors import InputError, TransportError
from deltacast.engines.vllm.client import VllmClient
from http_workers import port_without_server
from vllm_stand_ins import RankServer, rank_servers

FINISH: Final = "/finish_weight_update"
RESET: Final[tuple[str, Any]] = ("/reset_prefix_cache?reset_running_requests=true", {})


def test_each_server_is_labelled_with_the_version_that_it_serves() -> None:
    """Also where one is a version behind; who serves none keeps its label. All caches are reset."""
    ahead, behind, none = (
        RankServer({"version": 8}, {"version": 8}),
        RankServer({"version": 7}),
        RankServer({"serves": False}),
    )
    with rank_servers(ahead, behind, none) as client:
        client.finish_weight_update()
    assert ahead.calls == [(FINISH, {"weight_version": "8"}), RESET]
    assert behind.calls == [(FINISH, {"weight_version": "7"}), RESET]
    assert none.calls == [(FINISH, {}), RESET]


@pytest.mark.parametrize(
    ("second", "serves"),
    [
        ({"version": 3}, True),
        ({"version": 4}, False),
        ({"version": 3, "serves": False}, False),
        ({"version": 3, "run_id": "another"}, False),
        ({"version": 3, "digest": "xxh3_128:ff"}, False),
    ],
)
def test_a_server_serves_what_all_of_its_ranks_serve(second: dict[str, Any], serves: bool) -> None:
    """Ranks that hold different versions, under one number or not, or one that holds none: it holds none."""
    server = RankServer({"version": 3}, second)
    with rank_servers(server) as client:
        [status] = client.status()
    assert (status.serves, status.version) == (serves, 3 if serves else None)


def test_a_server_that_serves_nothing_whole_is_not_resumed() -> None:
    """It stays paused and is named with its ranks' errors; the others go on."""
    good, bad = RankServer({"version": 3}), RankServer({"serves": False, "error": "RuntimeError: out of memory"})
    with (
        rank_servers(good, bad) as client,
        pytest.raises(TransportError, match=r"stays paused.*rank 0.*memory") as err,
    ):
        client.call("resume")
    assert bad.url in str(err.value)
    assert (good.calls, bad.calls) == ([("/resume", {})], [])


def test_a_server_that_still_has_its_own_checkpoint_is_resumed_without_a_label() -> None:
    """What vLLM loaded itself is whole, though it is no version."""
    server = RankServer({})
    with rank_servers(server) as client:
        client.finish_weight_update()
        client.call("resume")
    assert server.calls == [(FINISH, {}), RESET, ("/resume", {})]


def test_a_handshake_that_a_worker_refused_is_an_error() -> None:
    """The server said 200: an exception there would have put its ranks out of step."""
    server = RankServer({"error": "AuthenticationError: wrong secret"})
    with (
        rank_servers(server) as client,
        pytest.raises(TransportError, match=r"init_weight.* failed.*wrong secret"),
    ):
        client.init_transfer_engine({})
    assert server.calls == [("/init_weight_transfer_engine", {"init_info": {}})]


def test_a_handshake_labels_what_it_brought() -> None:
    """The version of the seed is the server's label before the first update."""
    server = RankServer({"version": 0})
    with rank_servers(server) as client:
        client.init_transfer_engine({})
    assert server.calls[1:] == [("/start_weight_update", {}), (FINISH, {"weight_version": "0"}), RESET]


@pytest.mark.parametrize(
    ("says", "error"),
    [
        ((200, {"results": [{"nonce": "of another call", "serves": True, "version": 1, "error": ""}]}), "restart"),
        ((200, {"results": [None]}), "no status.*worker-extension-cls"),
        ((200, {"results": []}), "restart"),
        ((200, "not a dict"), "no status.*worker-extension-cls"),
        ((500, {"error": "no such method"}), "status 500.*no such method.*worker-extension-cls"),
    ],
)
def test_a_server_that_does_not_answer_the_question_serves_nothing(says: tuple[int, Any], error: str) -> None:
    """Ranks out of step, another backend, no extension: each has an error that says what to do."""
    server = RankServer({"version": 1})
    server.says = says
    with rank_servers(server) as client:
        [status] = client.status()
        assert not status.serves
        with pytest.raises(TransportError, match=error):
            client.call("resume")


def test_no_call_is_made_before_every_server_is_healthy() -> None:
    """One is starting: it says 503 twice, and is asked again; whatever the first call is, here a pause."""
    starting, ready = RankServer(), RankServer()
    starting.health = [503, 503, 200]
    with rank_servers(starting, ready, token="secret", start_timeout_s=30.0) as client:
        client.call("pause", mode="keep")
        assert starting.health == [200]
        starting.health = [500]  # asked no more
        client.call("resume_nothing")
    assert starting.calls == ready.calls == [("/pause?mode=keep", {}), ("/resume_nothing", {})]
    assert starting.tokens == ready.tokens == {"Bearer secret"}


def test_a_server_that_does_not_get_well_in_time_is_named() -> None:
    """With what it said last; the call was sent to none, and the next one waits again."""
    sick, ready = RankServer(), RankServer()
    sick.health = [503]
    with rank_servers(sick, ready, start_timeout_s=0.5) as client:
        for _ in range(2):
            with pytest.raises(
                TransportError, match=f'GET /health failed at 1 of 2: {sick.url}: status 503: "starting"'
            ):
                client.call("pause")
    assert ready.calls == []


def test_a_server_that_is_not_there_is_named_after_the_time_that_it_had() -> None:
    """Nobody listens at its port."""
    with port_without_server() as absent, pytest.raises(TransportError, match=f"GET /health failed .* {absent}"):
        VllmClient([absent], start_timeout_s=0.5, connect_timeout_s=0.2).start_weight_update()
    with pytest.raises(InputError, match="start_timeout_s must be positive"):
        VllmClient([absent], start_timeout_s=0)


def test_every_rank_is_asked_for_what_it_holds() -> None:
    """Rows become parts with their ranks, and the version is the ranks' if they agree."""
    row = ["w", [4, 2], [[0, 2], [0, 2]], "00000000000000ff"]
    two, apart = RankServer({"parts": [row], "version": 3}, {"parts": [], "version": 3}), RankServer({"version": 3}, {})
    with rank_servers(two, apart) as client:
        first, second = client.parts()
    assert (first.server, first.num_ranks, first.version) == (two.url, 2, 3)
    [part] = first.parts
    assert (part.rank, part.name, part.shape, part.box, part.fingerprint) == (0, "w", (4, 2), ((0, 2), (0, 2)), 255)
    assert (second.version, second.parts) == (None, ())


def test_many_parts_are_read_to_the_end() -> None:
    """A large model's are megabytes."""
    rows = [[f"layers.{number}.w", [1], [[0, 1]], f"{number:016x}"] for number in range(40_000)]
    with rank_servers(RankServer({"parts": rows})) as client:
        [held] = client.parts()
    assert len(held.parts) == 40_000
    assert held.parts[-1].fingerprint == 39_999


@pytest.mark.parametrize(
    "row",
    [None, "wsbf", ["w", [4], [[0, 4]]], ["w", [4], [[0, 4]], 12], ["w", [4.5], [[0, 4]], "0" * 16],
     [7, [4], [[0, 4]], "0" * 16], ["w", [4], [[0, 4, 5]], "0" * 16], ["w", [4], [[-1, 4]], "0" * 16],
     ["w", 4, [[0, 4]], "0" * 16], ["w", [True], [[0, 1]], "0" * 16], ["w", [4], [[0, 4]], "0" * 15]],
)  # fmt: skip
def test_what_is_no_part_is_refused(row: Any) -> None:
    """Whatever a server says comes from outside."""
    server = RankServer({"parts": [row]})
    with rank_servers(server) as client, pytest.raises(TransportError, match="not a part of a parameter"):
        client.parts()


def test_a_rank_that_cannot_say_what_it_holds_is_an_error() -> None:
    """With its words."""
    server = RankServer({}, {"error": "RuntimeError: out of memory"})
    with rank_servers(server) as client, pytest.raises(TransportError, match="rank 1: RuntimeError: out of memory"):
        client.parts()
