"""Actors of a real local Ray that hold real worker engines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from deltacast.delta.errors import InputError, TransportError
from deltacast.engines.base import Client
from deltacast.engines.clients import PausingClient, RayClient
from engine_processes import Policy, weights_of
from engine_setups import trainer_of
from ray_faults import FaultyActor
from ray_workers import RayWorker, local_ray

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def actors() -> Iterator[list[Any]]:
    with local_ray():
        made = [ray.remote(num_cpus=0)(RayWorker).remote(seed) for seed in (7, 8)]
        yield made


@pytest.fixture
def faulty(actors: list[Any]) -> Iterator[list[Any]]:
    """Three actors; none is left afterwards."""
    made: list[Any] = [ray.remote(num_cpus=0)(FaultyActor).remote() for _ in range(3)]
    yield made
    for actor in made:
        ray.kill(actor)


def test_actors_are_seeded_and_follow_every_round(actors: list[Any]) -> None:
    """Three verified rounds over Gloo, paused around each by the actors' own names."""
    policy, client = Policy(0), RayClient(actors, methods={"pause": "pause_generation"})
    with trainer_of(policy, PausingClient(client), 2) as trainer:
        for step in range(3):
            policy.step(step)
            report = trainer.send_weights()
            assert (report.committed, report.num_verified, report.error) == (True, 2, "")
            assert ray.get([actor.weights.remote() for actor in actors]) == [weights_of(policy)] * 2
    assert isinstance(client, Client)
    for calls in ray.get([actor.calls.remote() for actor in actors]):
        assert calls == [
            *["pause keep", "init", "resume"],
            *["pause keep", "start", "update", "finish", "resume"] * 3,
        ]


def test_actors_that_raise_die_or_hang_are_named(faulty: list[Any]) -> None:
    """With what they raised and no traceback, within one timeout for all, and apart from those that did it."""
    dead, hanging, good = faulty
    with pytest.raises(TransportError) as caught:
        RayClient([good]).finish_weight_update()
    message = f"finish_weight_update failed at 1 of 1: {good}: ValueError: no such rank | done at: none"
    assert str(caught.value) == message
    with pytest.raises(TransportError, match=rf"die failed at 1 of 1: {re.escape(str(dead))}: ActorDiedError: "):
        RayClient([dead]).call("die")
    hanging.receive_weights.remote({})
    client = RayClient(faulty, timeout_s=1.0)
    with pytest.raises(TransportError, match="start_weight_update failed at 2 of 3: ") as caught:
        client.start_weight_update()
    assert f"{dead}: ActorDiedError" in str(caught.value)
    assert f"{hanging}: did not end within 1 s" in str(caught.value)
    assert str(caught.value).endswith(f"done at: {good}")
    assert [answer.worker for answer in client.answers if not answer.error] == [str(good)]


def test_who_takes_part_in_an_update_is_not_waited_for_once_another_failed(faulty: list[Any]) -> None:
    """An update ends together: an actor that waits for one that failed would be waited for in vain."""
    dead, hanging, _ = faulty
    ray.kill(dead)
    client = RayClient([hanging, dead])
    with pytest.raises(TransportError, match=rf"2 of 2: {re.escape(str(hanging))}: still at it when another failed; "):
        client.update_weights({})


def test_an_actor_without_the_methods_is_refused(actors: list[Any]) -> None:
    """When the client is made, and before anybody is called."""
    with pytest.raises(InputError, match=r"no method 'nothing'. Say what it calls it with `methods`."):
        RayClient(actors, methods={"start_weight_update": "nothing"})
    with pytest.raises(InputError, match="no actors"):
        RayClient([])
    with pytest.raises(InputError, match="timeout_s must be positive"):
        RayClient(actors, timeout_s=0)
    with pytest.raises(InputError, match="no method 'hibernate'"):
        RayClient(actors).call("hibernate")
