"""Servers that hold real worker engines, and everything else that may answer at a port."""

from __future__ import annotations

import asyncio
import datetime as dt
import ipaddress
import json
import os
import signal
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from deltacast.delta.errors import InputError, RoundAbortedError, TransportError
from deltacast.engines.base import Client, ServingStatus
from deltacast.engines.clients import HttpClient
from engine_processes import Policy, weights_of
from engine_setups import trainer_of, wait_for_connection
from http_workers import (
    TOKEN,
    HttpWorker,
    RawServer,
    http_reply,
    http_workers,
    port_without_server,
    silent_server,
)

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def started() -> Iterator[list[HttpWorker]]:
    with http_workers(7, 8) as workers:
        yield workers


@pytest.fixture
def servers(started: list[HttpWorker]) -> Iterator[list[HttpWorker]]:
    """Two servers that fail nowhere and were asked nothing."""
    yield started
    for server in started:
        server.ask("fail", {})
        server.ask("asked")


def client_of(servers: list[HttpWorker], *others: str, **options: Any) -> HttpClient:
    urls = [server.url for server in servers]
    return HttpClient([*urls, *others], **{"token": TOKEN, "timeout_s": 20.0, "connect_timeout_s": 0.2, **options})


def failure_of(client: HttpClient) -> str:
    with pytest.raises(TransportError) as caught:
        client.start_weight_update()
    return str(caught.value)


def test_servers_are_seeded_and_follow_every_round(servers: list[HttpWorker]) -> None:
    """Three verified rounds; the calls are vLLM's, at vLLM's paths."""
    policy, client = Policy(0), client_of(servers)
    before = threading.active_count()
    with trainer_of(policy, client, 2) as trainer:
        for step in range(3):
            policy.step(step)
            report = trainer.send_weights(optimizer_step=step)
            assert (report.committed, report.num_verified, report.error) == (True, 2, "")
            for server in servers:
                assert server.ask("weights") == weights_of(policy)
                assert server.ask("status").version == step + 1
    for server in servers:
        assert server.ask("asked") == [
            "/init_weight_transfer_engine",
            *["/start_weight_update", "/update_weights", "/finish_weight_update"] * 3,
        ]
    assert isinstance(client, Client)
    assert threading.active_count() == before


def test_an_error_names_every_server_that_failed_and_those_that_did_it(servers: list[HttpWorker]) -> None:
    """One of each: status and text of a 500, a server that hangs, one that is not there; a good one."""
    good, bad = servers
    bad.ask("fail", {"/start_weight_update": "CUDA error: an illegal memory access"})
    with silent_server() as silent, port_without_server() as absent:
        client = client_of(servers, silent, absent, timeout_s=1.0)
        started = time.monotonic()
        message = failure_of(client)
        took_s = time.monotonic() - started
    assert message.startswith("POST /start_weight_update failed at 3 of 4: ")
    assert f"{bad.url}: status 500: CUDA error: an illegal memory access" in message
    assert f"{silent}: no answer within 1 s" in message
    assert f"{absent}: ConnectError: " in message
    assert message.endswith(f"done at: {good.url}")
    assert [answer.worker for answer in client.answers if not answer.error] == [good.url]
    assert good.ask("asked") == ["/start_weight_update"]
    assert took_s < 10  # the one that hangs is given its second, and nobody else waits


def test_a_wrong_token_is_refused_and_not_told(servers: list[HttpWorker]) -> None:
    """Every server says 401, and nothing was done there."""
    client = client_of(servers, token="somebody-else")
    message = failure_of(client)
    assert message.count("status 401: who are you?") == 2
    assert "somebody-else" not in message
    assert [server.ask("asked") for server in servers] == [[], []]


def test_a_server_that_fails_at_the_update_aborts_the_round_for_all(servers: list[HttpWorker]) -> None:
    """Its worker was never called, so nobody moves, and it is dropped; without it the next round is as any other."""
    policy, client = Policy(0), client_of(servers)
    with trainer_of(policy, client, 2, timeout_s=2.0) as trainer:
        before = weights_of(policy)
        servers[1].ask("fail", {"/update_weights": "scheduler is gone"})
        policy.step(0)
        with pytest.raises((RoundAbortedError, TransportError), match="status 500: scheduler is gone"):
            trainer.send_weights()
        assert [server.ask("weights") for server in servers] == [before, before]
        assert servers[0].ask("asked")[-1] == "/finish_weight_update"
        client.servers = [servers[0].url]
        assert trainer.send_weights().committed
        assert servers[0].ask("weights") == weights_of(policy)


def test_a_server_that_fails_at_init_fails_it_at_once(servers: list[HttpWorker]) -> None:
    """The other is waiting to be admitted, which would take `join_timeout_s`: it is not waited for."""
    servers[1].ask("fail", {"/init_weight_transfer_engine": "no such engine"})
    started = time.monotonic()
    with (
        pytest.raises(TransportError, match="status 500: no such engine"),
        trainer_of(Policy(0), client_of(servers), 2, join_timeout_s=40.0),
    ):
        raise AssertionError("it was admitted")
    assert time.monotonic() - started < 20


def test_who_takes_part_in_an_update_is_not_waited_for_once_another_failed() -> None:
    """An update ends together: a server that waits for one that failed would be waited for in vain."""
    with silent_server() as silent, RawServer(http_reply("500 Oh", b"no")) as failing:
        client = HttpClient([silent, failing.url])
        with pytest.raises(TransportError, match=rf"2 of 2: {silent}: still at it .*; {failing.url}: status 500: no"):
            client.update_weights({})


def test_a_server_that_pulls_is_waited_for_though_another_failed() -> None:
    """Each pulls by itself; whoever let it go would have it resumed in the middle of its writing."""
    with silent_server() as silent, RawServer(http_reply("500 Oh", b"no")) as failing:
        client = HttpClient([silent, failing.url], update_timeout_s=0.5)
        with pytest.raises(TransportError, match=rf"{silent}: no answer within 0\.5 s; {failing.url}: status 500: no"):
            client.update_weights({"pull": {}})


def test_a_server_that_died_is_dropped_by_setting_the_servers(servers: list[HttpWorker]) -> None:
    """The trainer goes on with the other, which is the only one that is called from then on."""
    policy = Policy(0)
    with http_workers(5) as dying:
        client, url = client_of([servers[0], *dying]), dying[0].url
        with trainer_of(policy, client, 2, timeout_s=3.0) as trainer:
            dying.pop().stop()
            policy.step(0)
            with pytest.raises(TransportError, match=rf"failed at 1 of 2: {url}: ConnectError"):
                trainer.send_weights()
            client.servers = [servers[0].url]
            assert trainer.send_weights().num_verified == 1
    assert servers[0].ask("weights") == weights_of(policy)
    assert servers[0].ask("status").status is ServingStatus.SERVING


def test_a_server_that_comes_late_is_told_by_a_client_of_its_own(servers: list[HttpWorker]) -> None:
    """The next round admits it; from then on it is one of the servers."""
    policy, (first, late) = Policy(0), servers
    client = client_of([first])
    with trainer_of(policy, client, 1) as trainer:
        joining = threading.Thread(
            target=client_of([late]).init_transfer_engine, args=(dict(trainer.worker_init_info),)
        )
        joining.start()
        wait_for_connection(trainer)
        for step in range(2):
            policy.step(step)
            assert trainer.send_weights().num_verified == 2
            assert late.ask("weights") == weights_of(policy)
            joining.join()
            client.servers = [first.url, late.url]
    assert late.ask("asked")[0] == "/init_weight_transfer_engine"


@pytest.mark.parametrize(
    ("reply", "endless", "error"),
    [
        (b"\x00\xff garbage \r\n\r\n", b"", "RemoteProtocolError: "),
        (b"", b"", "RemoteProtocolError: Server disconnected without sending a response"),
        (http_reply("200 OK", b"{}")[:-1], b"", "RemoteProtocolError: peer closed connection"),
        (http_reply("500 Internal Server Error", b"x" * 10_000), b"", "status 500: " + "x" * 2033 + "..."),
        (http_reply("500 Internal Server Error", b"\xff\xfe"), b"", "status 500: \ufffd\ufffd"),
        (http_reply("307 Temporary Redirect", b"", "Location: http://127.0.0.1:1/"), b"", "status 307"),
        (b"HTTP/1.1 500 Oh\r\n\r\nno", b"no" * 5000, "status 500: " + "no" * 1016 + "n..."),
        (b"HTTP/1.1 500 Oh\r\n", b"X: " + b"y" * 1000 + b"\r\n", "RemoteProtocolError: "),
    ],
    ids=["garbage", "nothing", "cut short", "long", "not utf-8", "redirect", "endless body", "endless headers"],
)
def test_whatever_a_server_answers_is_a_short_error(reply: bytes, endless: bytes, error: str) -> None:
    """Garbage is named, and no more than 2 KiB of an answer is kept, however much comes."""
    with RawServer(reply, endless=endless) as server:
        client = HttpClient([server.url], timeout_s=20.0)
        assert f"{server.url}: {error}" in failure_of(client)
        assert len(client.answers[0].error.encode()) <= 2048


def test_an_endless_answer_of_success_is_a_success() -> None:
    """The status came first; the rest is not worth waiting for."""
    with RawServer(b"HTTP/1.1 200 OK\r\n\r\n", endless=b"thanks " * 1000) as server:
        HttpClient([server.url], timeout_s=20.0).start_weight_update()


def test_an_answer_that_drips_ends_with_the_time() -> None:
    """Each byte comes in time, the whole never does: the timeout is the whole call's."""
    drips = threading.Event()

    class Dripping(RawServer):
        def _answer(self, sock: Any) -> None:
            while not drips.wait(0.05):
                sock.sendall(b"H")

    with Dripping(b"") as server:
        started = time.monotonic()
        assert "no answer within 0.5 s" in failure_of(HttpClient([server.url], timeout_s=0.5))
        assert time.monotonic() - started < 10
        drips.set()


def test_a_request_that_may_have_arrived_is_not_sent_again() -> None:
    """The server reads it and closes: whether it acted nobody knows, so it must not be asked to act twice."""
    with RawServer(b"") as server:
        failure_of(HttpClient([server.url], connect_timeout_s=10.0))
        assert len(server.requests) == 1


def test_a_connection_that_is_refused_is_tried_again() -> None:
    """A server that comes up within `connect_timeout_s` is reached, and hears the request once."""
    with RawServer(http_reply("200 OK", b"{}")) as ready, port_without_server() as absent:
        client = HttpClient([absent, ready.url], connect_timeout_s=0.5)
        started = time.monotonic()
        failure_of(client)
        assert 0.3 < time.monotonic() - started < 10
        assert len(ready.requests) == 1


def test_a_server_that_is_away_is_waited_for_only_once() -> None:
    """Others may be paused while it is tried: the calls after the first give it a second each at most."""
    with RawServer(http_reply("200 OK", b"{}")) as ready, port_without_server() as absent:
        client = HttpClient([absent, ready.url], connect_timeout_s=4.0)
        failure_of(client)
        started = time.monotonic()
        for _ in range(4):
            failure_of(client)
        assert time.monotonic() - started < 10


def test_what_is_sent_is_json_as_vllm_reads_it() -> None:
    """Method, path, headers and body of each call, off the wire; nothing is pickled."""
    with RawServer(http_reply("200 OK", b"{}")) as server:
        client = HttpClient([f"{server.url}/prefix/"], token=TOKEN, paths={"finish_weight_update": "/done"})
        client.init_transfer_engine({"host": "h", "port": 1})
        client.start_weight_update()
        client.update_weights({"call": 3})
        client.finish_weight_update()
        client.call("pause", mode="keep", clear_cache=False)
        client.call("wake_up", tags=["weights", "kv_cache"])
    assert [(head.splitlines()[0], json.loads(body)) for head, body in server.requests] == [
        ("POST /prefix/init_weight_transfer_engine HTTP/1.1", {"init_info": {"host": "h", "port": 1}}),
        ("POST /prefix/start_weight_update HTTP/1.1", {}),
        ("POST /prefix/update_weights HTTP/1.1", {"update_info": {"call": 3}}),
        ("POST /prefix/done HTTP/1.1", {}),
        ("POST /prefix/pause?mode=keep&clear_cache=false HTTP/1.1", {}),
        ("POST /prefix/wake_up?tags=weights&tags=kv_cache HTTP/1.1", {}),
    ]
    for head, _ in server.requests:
        assert "Content-Type: application/json" in head
        assert f"Authorization: Bearer {TOKEN}" in head


def test_what_is_not_json_is_refused_before_anything_is_sent() -> None:
    """A tensor, bytes or a NaN has no JSON."""
    with RawServer(http_reply("200 OK", b"{}")) as server:
        client = HttpClient([server.url])
        for value in (b"bytes", float("nan"), object()):
            with pytest.raises(InputError, match="must be JSON"):
                client.update_weights({"value": value})
        assert server.requests == []


def test_the_runs_secret_is_in_no_error() -> None:
    """A server that answers a body with that body, as FastAPI does to one it does not like, makes it public."""
    secret = "ab" * 32
    with RawServer(http_reply("422 Unprocessable", f'"input": {{"secret": "{secret}"}}'.encode())) as server:
        with pytest.raises(TransportError) as caught:
            HttpClient([server.url], token=TOKEN).init_transfer_engine({"secret": secret})
        assert secret not in str(caught.value)
        assert 'status 422: "input": {"secret": "[hidden]"}' in str(caught.value)


def test_it_can_be_called_where_an_event_loop_runs() -> None:
    """As in a notebook, or an async trainer."""

    async def main(url: str) -> None:
        HttpClient([url]).start_weight_update()

    with RawServer(http_reply("200 OK", b"{}")) as server:
        asyncio.run(main(server.url))
        assert len(server.requests) == 1


def test_an_interrupt_waits_for_the_requests_that_are_on_their_way() -> None:
    """Ctrl-C while a server works on a call, a resume say: the interrupt comes, and the server was not cut off."""
    answered: list[bool] = []

    class Interrupting(RawServer):
        def _answer(self, sock: Any) -> None:
            os.kill(os.getpid(), signal.SIGINT)
            super()._answer(sock)
            answered.append(True)

    with Interrupting(http_reply("200 OK", b"{}")) as server, pytest.raises(KeyboardInterrupt):
        HttpClient([server.url]).call("resume")
    assert answered == [True]


def test_proxies_of_the_environment_get_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls carry a token and a secret; they go to the servers that were named and nowhere else."""
    with RawServer(http_reply("200 OK", b"{}")) as server, RawServer(http_reply("200 OK", b"{}")) as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy.url)
        monkeypatch.setenv("ALL_PROXY", proxy.url)
        monkeypatch.delenv("NO_PROXY", raising=False)
        HttpClient([server.url]).start_weight_update()
        assert (len(server.requests), len(proxy.requests)) == (1, 0)


def test_certificates_are_verified_unless_told_otherwise(tmp_path: Path) -> None:
    """One that nobody vouches for is refused; with a context that knows it, or without verifying, it is taken."""
    certificate = self_signed(tmp_path)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate)
    with RawServer(http_reply("200 OK", b"{}"), tls=tls) as server:
        assert "CERTIFICATE_VERIFY_FAILED" in failure_of(HttpClient([server.url], connect_timeout_s=0.2))
        assert server.requests == []
        HttpClient([server.url], verify=ssl.create_default_context(cafile=certificate)).start_weight_update()
        HttpClient([server.url], verify=False).start_weight_update()
        assert len(server.requests) == 2


def self_signed(folder: Path) -> Path:
    """Write a certificate for 127.0.0.1 and its key into one file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
    today = dt.datetime.now(dt.UTC)
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(today - dt.timedelta(days=1))
        .not_valid_after(today + dt.timedelta(days=1))
        .add_extension(address, critical=False)
        .sign(key, hashes.SHA256())
    )
    plain = serialization.NoEncryption()
    pem = serialization.Encoding.PEM
    file = folder / "certificate.pem"
    file.write_bytes(certificate.public_bytes(pem) + key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    return file


@pytest.mark.parametrize(
    ("servers", "options", "error"),
    [
        ([], {}, "bad servers"),
        ("http://a", {}, "bad servers"),
        (["http://a", "http://a/"], {}, "bad servers"),
        (["a:8000"], {}, "not a server's URL"),
        (["http://a:99999"], {}, "not a server's URL"),
        (["http://a?x=1"], {}, "not a server's URL"),
        (["http://a\n"], {}, "not a server's URL"),
        (["http://user:word@a"], {}, "credentials"),
        (["http://user:word@a:99999"], {}, "credentials"),
        ("http://user:word@a", {}, "bad servers"),
        (["http://a"], {"token": "two words"}, "bad token"),
        (["http://a"], {"token": ""}, "bad token"),
        (["http://a"], {"paths": {"pause": "pause"}}, "bad path"),
        (["http://a"], {"paths": {"pause": "/pause?mode=keep"}}, "bad path"),
        (["http://a"], {"timeout_s": 0}, "timeout_s must be positive"),
        (["http://a"], {"update_timeout_s": float("nan")}, "update_timeout_s must be positive"),
    ],
)
def test_bad_arguments_are_refused_and_no_secret_is_told(servers: Any, options: dict[str, Any], error: str) -> None:
    """Before anything is sent, and without a password in the message."""
    with pytest.raises(InputError, match=error) as caught:
        HttpClient(servers, **options)
    assert "word" not in str(caught.value)
