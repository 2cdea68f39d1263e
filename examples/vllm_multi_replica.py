"""Keep two vLLM servers at the trainer's bits; one is killed, comes back, and catches up beside the other.

    python examples/vllm_multi_replica.py    # CPU or GPU; needs vllm and deltacast[http], no network; about a minute

Serves the tiny random model of vllm_http_sync.py twice, and "trains" it as that does. Whenever both servers are there,
they must say the same version and the trainer's digest. Between, one of them is killed: the trainer's next call names
it and fails, and goes on with the other once it is taken off. A new server knows only the checkpoint on disk. A client
of its own tells it of the trainer, which lets it in at one of its next steps and brings it to its version; the other
server is sent that step and nothing else. At the end both give the same greedy tokens and log-probabilities. Ends with
status 0 only if all that is so.
"""

from __future__ import annotations

import itertools
import signal
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from transformers import Qwen3ForCausalLM
from vllm_http_sync import TRANSFER, complete, make_model, serving, train

from deltacast import ModuleSource, TrainerInitInfo, trainer_engine
from deltacast.delta.errors import TransportError
from deltacast.engines.clients import PausingClient
from deltacast.engines.report import RoundReport
from deltacast.engines.trainer import RoundTrainer
from deltacast.engines.vllm.client import VllmClient


class Run:
    """A trainer of servers, and its steps."""

    def __init__(self, policy: Qwen3ForCausalLM, servers: list[str]) -> None:
        self.policy, self.steps = policy, itertools.count(1)
        self.client = VllmClient(servers, connect_timeout_s=1.0)  # who is dead is called several times before the end
        self.trainer: RoundTrainer = trainer_engine("sparse_nccl").trainer_init(
            TrainerInitInfo(num_workers=len(servers)), ModuleSource(policy), PausingClient(self.client)
        )

    def step(self) -> RoundReport:
        """Take one optimizer step and send it."""
        step = next(self.steps)
        train(self.policy, step)
        report = self.trainer.send_weights(optimizer_step=step)
        print(report.line())
        return report

    def prove(self) -> None:
        """Ask every server what it holds; raises unless that is the trainer's version, by its digest."""
        held = {(rank["version"], rank["digest"]) for status in self.client.status() for rank in status.ranks}
        assert held == {(self.trainer.baseline.version, self.trainer.baseline.digest)}, held
        print(f"{len(self.client.servers)} servers hold version {self.trainer.baseline.version}")

    def notice_the_death_of(self, server: str) -> None:
        """Take a step that fails and names the dead server, and take it off."""
        try:
            self.step()
        except TransportError as err:
            said = str(err)
        else:
            raise AssertionError("a call to a dead server did not fail")
        print(said)
        assert server in said
        self.client.servers = [other for other in self.client.servers if other != server]

    def let_in(self, server: str) -> None:
        """Train on until a new server has come in and caught up."""
        alone = PausingClient(VllmClient([server]))
        with ThreadPoolExecutor(1) as pool:
            joining = pool.submit(alone.init_transfer_engine, dict(self.trainer.worker_init_info))
            report = self.step()
            while not report.seeded and not joining.done():
                report = self.step()
            joining.result()
        assert report.num_verified == 2
        [caught_up] = report.seeded
        print(f"came in: {caught_up}")
        self.client.servers = [*self.client.servers, server]


def main() -> None:
    """Run it; raises if anything is not as promised."""
    with tempfile.TemporaryDirectory(prefix="vllm_multi_replica-") as scratch:
        model = Path(scratch, "model")
        policy = make_model(model)
        with serving(model, *TRANSFER) as one:
            with serving(model, *TRANSFER, end=signal.SIGKILL) as other:
                run = Run(policy, [one, other])
                assert run.step().num_verified == 2
                run.prove()
            run.notice_the_death_of(other)
            assert run.step().num_verified == 1
            with serving(model, *TRANSFER) as again:
                run.let_in(again)
                assert run.step().num_verified == 2
                run.prove()
                run.trainer.shutdown()
                assert complete(again, model) == complete(one, model), "the two servers differ"
    print("both servers give the same tokens and the same log-probabilities")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that its servers end too
    main()
