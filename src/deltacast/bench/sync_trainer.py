"""Rank 0 of `bench sync`: measure the machine, then every way on every link, and compare all bits after each."""

from __future__ import annotations

import gc
import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import torch

from deltacast.bench.shapes import model_metas
from deltacast.bench.sync_memory import MemoryMeter
from deltacast.bench.sync_methods import Dense, Ours, Peer, Sample, Setup, Way
from deltacast.bench.sync_ranks import Say, Workers, device_of
from deltacast.bench.sync_rows import Facts, SyncOptions, SyncRow
from deltacast.bench.sync_weights import LiveWeights
from deltacast.engines.control import Deadline
from deltacast.engines.group import PayloadGroup, Rendezvous

__all__ = ["measure"]

_HOST: Final = "127.0.0.1"
_PROBED_WORDS: Final = 1 << 29  # 1 GiB
_PROBES: Final = 5


def measure(options: SyncOptions, workers: Workers, say: Say) -> None:
    """Say `Facts`, then one `SyncRow` per way and link, and before each round a text that tells what comes.

    Raises:
        VerificationError: after some way, a worker's bits were not the trainer's.
        DeltacastError: a round failed.
    """
    say("making the weights")
    device = device_of(0, options.world)
    weights = LiveWeights(model_metas(options.model, options.scale), device, options.seed)
    group = _meet(options, workers, device, options.phase_s(weights.nbytes))
    say("measuring the bounds")
    facts = _facts(weights, workers, group)
    say(facts)
    for percent in options.percents:
        measured: SyncRow | None = None
        for link in (None, *options.links_gbits):
            setup = Setup(options, weights, workers, group, percent, link)
            if measured is None:
                measured = _row(setup, Dense, facts, say)
                say(measured)
            else:
                say(_computed(measured, link, facts))
            for make in _sparse_ways(options, link):
                say(_row(setup, make, facts, say))
    group.close()


def _sparse_ways(options: SyncOptions, link: float | None) -> Iterator[Callable[[Setup], Way]]:
    yield Peer
    for wire in options.wires:
        yield partial(Ours, wire=wire, audit=options.audit)
    if link is None and "raw" in options.wires and options.audit != "full":  # what it costs depends on no link
        yield partial(Ours, wire="raw", audit="full")


def _row(setup: Setup, make: Callable[[Setup], Way], facts: Facts, say: Say) -> SyncRow:
    """Measure one way, and hold the workers' bits against ours afterwards."""
    setup.workers.ask("begin")
    meter = MemoryMeter(setup.group.device)
    way = make(setup)
    samples = []
    try:
        for number in range(setup.options.repeats + 1):
            say(f"{setup.percent:g} % changed, {facts.link_name(setup.link_gbits)}: {way.method}, round {number}")
            samples.append(_round(setup, way, meter))
    finally:
        way.close()
    worker_extra = [size for size in setup.workers.ask("end") if size is not None]
    extra = meter.extra_bytes(way.held_bytes), max(worker_extra, default=None)
    setup.workers.tell("compare")
    setup.weights.compare(setup.group, Deadline(setup.timeout_s))
    setup.workers.hear()
    row = _summary(setup, way, samples[1:], extra, facts)  # the first round warms up
    del way
    gc.collect()  # a baseline is as large as the weights: the next way must find room
    return row


def _round(setup: Setup, way: Way, meter: MemoryMeter) -> Sample:
    setup.weights.take_step(setup.percent)
    if setup.group.device.type == "cuda":
        torch.cuda.synchronize(setup.group.device)
    meter.begin()
    sample = way.round()
    meter.end()
    return sample


def _summary(
    setup: Setup, way: Way, samples: list[Sample], extra_bytes: tuple[int | None, int | None], facts: Facts
) -> SyncRow:
    sent_bytes = round(statistics.mean(sample.sent_bytes for sample in samples))
    densities = [sample.density for sample in samples if sample.density is not None]
    trainer_buffers, worker_buffers = samples[-1].buffer_bytes
    return SyncRow(
        link_gbits=setup.link_gbits,
        percent=setup.percent,
        method=way.method,
        audit=way.audit,
        timing="measured" if setup.link_gbits is None else "paced",
        wall_s=tuple(sample.wall_s for sample in samples),
        stages_s={name: statistics.median(s.stages_s[name] for s in samples) for name in samples[0].stages_s},
        density=statistics.mean(densities) if densities else None,
        sent_bytes=sent_bytes,
        read_floor_s=facts.read_floor_s if _reads_device(setup, way) else None,
        link_floor_s=facts.link_floor_s(sent_bytes, setup.link_gbits),
        trainer_extra_bytes=extra_bytes[0],
        worker_extra_bytes=extra_bytes[1],
        trainer_buffer_bytes=trainer_buffers,
        worker_buffer_bytes=worker_buffers,
    )


def _reads_device(setup: Setup, way: Way) -> bool:
    """Say whether a way reads the weights and what workers hold where the weights are."""
    return way.method == "peer" or (way.method != "dense" and setup.options.placement == "device")


def _computed(dense: SyncRow, link: float | None, facts: Facts) -> SyncRow:
    """Return the dense row as a slower link would have it, without sitting through it."""
    floor_s = facts.link_floor_s(dense.sent_bytes, link)
    wall_s = tuple(max(wall, floor_s) for wall in dense.wall_s)
    return replace(dense, link_gbits=link, timing="computed", wall_s=wall_s, link_floor_s=floor_s, stages_s={})


def _meet(options: SyncOptions, workers: Workers, device: torch.device, timeout_s: float) -> PayloadGroup:
    """Form the group of everything that is not our engine's."""
    rendezvous = Rendezvous(_HOST, options.world, timeout_s)
    group = PayloadGroup(
        rank=0, world_size=options.world, generation=1, device=device, timeout_s=timeout_s, interface=_HOST
    )
    workers.tell("join", rendezvous.host, rendezvous.port)
    group.meet(rendezvous.store)
    workers.hear()
    return group


def _facts(weights: LiveWeights, workers: Workers, group: PayloadGroup) -> Facts:
    device, probed = group.device, weights.words[:_PROBED_WORDS]
    gpu = device.type == "cuda"
    versions = {"torch": str(torch.__version__), "python": platform.python_version()}
    if gpu:
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    metas = weights.metas()
    return Facts(
        device="cuda" if gpu else "cpu",
        device_name=torch.cuda.get_device_name(device) if gpu else _processor(),
        versions=versions,
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        num_tensors=len(metas),
        num_words=sum(meta.num_words for meta in metas),
        model_bytes=weights.nbytes,
        copy_bytes_per_s=2 * probed.nbytes / _copy_s(probed),
        broadcast_bytes_per_s=probed.nbytes / _broadcast_s(probed, workers, group),
    )


def _copy_s(words: torch.Tensor) -> float:
    """Return the fastest of a few copies on the device: it serves as a bound."""
    target = torch.empty_like(words)

    def copy() -> None:
        target.copy_(words)
        if words.is_cuda:
            torch.cuda.synchronize(words.device)

    return min(_times(copy))


def _broadcast_s(words: torch.Tensor, workers: Workers, group: PayloadGroup) -> float:
    """Return the fastest of a few broadcasts to all workers. Collective."""
    deadline = Deadline(workers.timeout_s)

    def broadcast() -> None:
        group.post([words], deadline)
        group.wait(deadline)

    workers.tell("probe", words.numel(), _PROBES)
    fastest = min(_times(broadcast))
    workers.hear()
    return fastest


def _times(run: Callable[[], None]) -> list[float]:
    times = []
    for _ in range(_PROBES):
        started = time.perf_counter()
        run()
        times.append(max(time.perf_counter() - started, 1e-9))
    return times


def _processor() -> str:
    """Return the processor's name; Linux keeps it where the standard library does not look."""
    try:
        found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()
