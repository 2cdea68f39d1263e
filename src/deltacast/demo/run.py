"""The demo itself: train, publish, sample from what the workers hold, and check independently at the end."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

from deltacast.delta.checkpoint import write_checkpoint
from deltacast.delta.module_source import ModuleSource
from deltacast.delta.sources import ServingDType
from deltacast.demo.fleet import Fleet
from deltacast.demo.grpo import Rollout
from deltacast.demo.setting import Setting
from deltacast.engines.base import TrainerInitInfo
from deltacast.engines.registry import trainer_engine
from deltacast.engines.report import RoundReport

__all__ = ["DemoOptions", "DemoResult", "StepRow", "run_demo"]

_TIMEOUT_S = 120.0
_NUM_EXAMINED = 128


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What `deltacast demo` was asked for."""

    steps: int = 30
    workers: int = 2
    seed: int = 0
    model: Path | None = None


@dataclass(frozen=True, slots=True)
class StepRow:
    """One step: the reward of samples from the workers' present weights, then the update that followed.

    Attributes:
        step: from 1.
        reward: mean over all samples of the step.
        report: the round that published the step's weights.
        step_s: the whole step: sampling, training, publishing.
    """

    step: int
    reward: float
    report: RoundReport
    step_s: float


@dataclass(slots=True)
class DemoResult:
    """What is left to say at the end.

    Attributes:
        rows: every step.
        first_reward, final_reward: mean reward of the workers' weights before the first and after the last step,
            on the same prompts.
        num_judged: completions that those two are the mean of.
        num_parameters, num_weights, dense_bytes: of the policy that is served.
        seeded: workers that were brought to the trainer's weights at the start.
        verified: what `deltacast verify` said of each worker's dump: its exit code, 0 if all bits are equal.
        digest: state digest of the trainer's dump.
    """

    rows: list[StepRow] = field(default_factory=list)
    first_reward: float = 0.0
    final_reward: float = 0.0
    num_judged: int = 0
    num_parameters: int = 0
    num_weights: int = 0
    dense_bytes: int = 0
    seeded: tuple[str, ...] = ()
    verified: dict[str, int] = field(default_factory=dict)
    digest: str = ""

    @property
    def sent_bytes(self) -> int:
        """Bytes of all updates."""
        return sum(row.report.sent_bytes for row in self.rows)


def run_demo(options: DemoOptions, result: DemoResult) -> Iterator[str | StepRow]:
    """Run the demo, yielding a line for each thing done before the first step, then a row per step.

    Args:
        options: what was asked for.
        result: filled in on the way; complete once the iterator is exhausted.

    Raises:
        DeltacastError: a worker died, or a round failed. No process is left, however this ends.
    """
    torch.set_num_threads(1)
    setting = Setting(options.model, options.seed)
    with Fleet(setting, options.workers, _TIMEOUT_S) as fleet, tempfile.TemporaryDirectory() as folder:
        yield f"{options.workers} workers started, each with {setting.worker_weights}"
        learner = setting.make_learner()
        yield learner.description
        source = ModuleSource(learner.model.module, serving_dtype=ServingDType(default="bfloat16", keep=()))
        info = TrainerInitInfo(num_workers=options.workers, timeout_s=_TIMEOUT_S, audit=4)
        trainer = trainer_engine("sparse_nccl").trainer_init(info, source, fleet)
        try:
            metas = source.metas()
            result.num_parameters = len(metas)
            result.num_weights = sum(meta.numel for meta in metas)
            result.dense_bytes = sum(meta.nbytes for meta in metas)
            yield f"every worker holds the trainer's weights, {result.dense_bytes:,} bytes, verified by digest"
            examined = learner.draw_prompts(_NUM_EXAMINED)
            result.num_judged = _NUM_EXAMINED * setting.num_samples
            result.first_reward = _mean_reward(fleet.sample(examined))
            for step in range(1, options.steps + 1):
                started = time.perf_counter()
                reward = learner.learn(fleet.sample(learner.draw_prompts(setting.num_prompts)))
                report = trainer.send_weights(optimizer_step=step)
                row = StepRow(step, reward, report, time.perf_counter() - started)
                result.rows.append(row)
                yield row
            result.final_reward = _mean_reward(fleet.sample(examined))
            _check_independently(fleet, source, Path(folder), result)
        finally:
            trainer.shutdown()


def _mean_reward(rollouts: list[Rollout]) -> float:
    return float(torch.cat([rollout.rewards for rollout in rollouts]).mean())


def _check_independently(fleet: Fleet, source: ModuleSource, folder: Path, result: DemoResult) -> None:
    """Compare files with files, in processes that know nothing of this run."""
    mine = folder / "trainer.safetensors"
    write_checkpoint(mine, source.metas(), source.tensors())
    command = [sys.executable, "-m", "deltacast"]
    for path in fleet.dump(folder):
        ran = subprocess.run([*command, "verify", mine, path, "--json"], capture_output=True, check=False)  # noqa: S603
        result.verified[path.stem] = ran.returncode
    ran = subprocess.run([*command, "digest", mine, "--json"], capture_output=True, check=True)  # noqa: S603
    result.digest = str(json.loads(ran.stdout)["state_digest"])
