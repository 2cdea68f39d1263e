"""`deltacast verify CKPT URL`, against servers that say by hand-made fingerprints what they hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from command_line import Run, RunJson
from golden_checkpoint import GOLDEN, GOLDEN_FINGERPRINTS, GOLDEN_STATE_DIGEST
from http_workers import port_without_server
from vllm_stand_ins import RankServer, rank_servers


def golden_rows(**other: str) -> list[Any]:
    fingerprints = GOLDEN_FINGERPRINTS | other
    return [
        [name, list(shape), [[0, size] for size in shape], fingerprints[name]] for name, (_, shape, _) in GOLDEN.items()
    ]


def test_a_server_that_holds_the_checkpoint_is_said_to(base: Path, run: Run, run_json: RunJson) -> None:
    """Two ranks with all of it; the token comes with the question."""
    rank = {"parts": golden_rows(), "version": 7}
    server = RankServer(rank, rank)
    with rank_servers(server):
        document = run_json("verify", base, server.url, "--token", "secret")
        output = run("verify", base, server.url, "--token", "secret").stdout
    assert document == {
        "identical": True,
        "a": {"checkpoint": str(base), "state_digest": GOLDEN_STATE_DIGEST, "num_parameters": len(GOLDEN)},
        "b": {"server": server.url, "version": 7, "num_ranks": 2, "num_parameters": len(GOLDEN)},
        "num_differing_parameters": 0,
        "differences": [],
    }
    assert GOLDEN_STATE_DIGEST in output
    assert f"{server.url}, 2 ranks" in output
    assert server.tokens == {"Bearer secret"}


def test_what_a_server_holds_otherwise_is_named(base: Path, run: Run, run_json: RunJson) -> None:
    """Other bits, ranks that disagree, a parameter that is missing, and one that is unknown."""
    first = {"parts": [row for row in golden_rows(router="0" * 16) if row[0] != "one"]}
    second = {"parts": [*golden_rows(router="0" * 16, bool="0" * 16)[1:], ["new", [1], [[0, 1]], "0" * 16]]}
    server = RankServer(first, second)
    with rank_servers(server):
        document = run_json("verify", base, server.url, code=1)
        output = run("verify", base, server.url, "--limit", 1, code=1).stdout
    assert document["identical"] is False
    kinds = {difference["name"]: difference["kind"] for difference in document["differences"]}
    assert kinds == {"bool": "replicas", "one": "missing", "router": "bits", "new": "unknown"}
    router = next(one for one in document["differences"] if one["name"] == "router")
    assert router["detail"] == f"{GOLDEN_FINGERPRINTS['router']} -> {'0' * 16}, at ranks 0, 1"
    assert "parameters that differ  4 (3 not shown" in output
    assert "d2b0d0efc90fd7fc at rank 0, 0000000000000000 at rank 1" in output


@pytest.mark.parametrize(
    ("says", "error"),
    [
        ((200, {"results": [{"nonce": "of another call", "error": ""}]}), "restart this server"),
        ((404, "no such route"), "status 404"),
        ((401, "who are you?"), "who are you"),
        ((200, {"results": [None]}), "worker-extension-cls"),
    ],
)
def test_a_server_that_cannot_be_asked_is_no_verdict(
    base: Path, run_json: RunJson, says: tuple[int, Any], error: str
) -> None:
    """The exit code is that of a peer that failed."""
    server = RankServer({})
    server.says = says
    with rank_servers(server):
        document = run_json("verify", base, server.url, code=4)
    assert error in document["error"]["message"]


def test_a_server_whose_model_is_not_what_it_says_is_a_mismatch(base: Path, run_json: RunJson) -> None:
    """A rank has found it out itself; it names no fingerprints."""
    server = RankServer({"parts": golden_rows()}, {"damaged": "the running model holds other weights"})
    with rank_servers(server):
        error = run_json("verify", base, server.url, code=1)["error"]
    assert error["message"] == f"{server.url}: rank 1: the running model holds other weights"


def test_a_server_that_is_not_there_and_a_bad_url_are_said(base: Path, run_json: RunJson) -> None:
    """Which of the two it is, the exit code says."""
    with port_without_server() as absent:
        assert absent in run_json("verify", base, absent, code=4)["error"]["message"]
    assert "not a server's URL" in run_json("verify", base, "http://", code=2)["error"]["message"]
