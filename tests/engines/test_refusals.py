"""A worker that is not READY, among so many that the others' payload would come through it."""

from __future__ import annotations

import time

import pytest

from deltacast.delta.errors import RoundAbortedError
from engine_processes import Policy, weights_of
from engine_setups import in_process, trainer_of


@pytest.mark.timeout(60)
@pytest.mark.parametrize("number", range(4))
def test_a_worker_that_refuses_keeps_nobody_waiting_for_payload(number: int) -> None:
    """The round ends at once, all are still there, and the next goes through."""
    policy, served = Policy(0), [Policy(0) for _ in range(4)]
    with in_process(*served) as (workers, client), trainer_of(policy, client, 4) as trainer:
        workers[number]._undo_budget_bytes = 0
        policy.step(1)
        begun = time.monotonic()
        with pytest.raises(RoundAbortedError, match="undo would exceed its budget"):
            trainer.send_weights()
        assert time.monotonic() - begun < 10.0  # and not the 20 s of the group
        workers[number]._undo_budget_bytes = None
        assert trainer.send_weights().num_verified == 4
        assert [weights_of(module) for module in served] == [weights_of(policy)] * 4
