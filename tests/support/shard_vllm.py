"""Ranks of a vLLM model in processes of their own: pieces where vLLM's own loader put them. Needs vLLM.

Targets of spawned processes must be importable by a child, hence a module here and not in a test.
"""

from __future__ import annotations

import faulthandler
from multiprocessing.connection import Connection
from pathlib import Path

from deltacast.delta.table import ParamMeta
from engine_processes import answer_commands
from shard_processes import FaultyRank, Rank
from tensor_bytes import listed
from vllm_models import bits_of, load_model, one_group, plain_layouts, planned, weights_of


def serve_in_vllm(pipe: Connection, meeting: Path, rank: int, num_ranks: int, folder: Path) -> None:
    """Load a checkpoint as one tensor parallel rank, and answer `make`, `differing`, and a `Rank`'s commands."""
    from deltacast.engines.vllm.ranks import tensor_parallel_exchange

    faulthandler.enable()
    with one_group(meeting, num_ranks, rank), plain_layouts():
        model, weights = load_model(folder, num_ranks, rank), weights_of(folder)
        plan = planned(model, weights)
        metas: list[ParamMeta] = [meta for meta, _ in listed(weights) if meta.name not in plan.aliases]
        views = {meta.name: plan.views(meta.name) for meta in metas}
        held: list[Rank] = []

        def answer(command: str, *arguments: object) -> object:
            if command == "make":
                worker = FaultyRank(metas, plan.aliases, views, tensor_parallel_exchange())
                held.append(Rank(worker))
                return worker.state.digest
            if command == "differing":
                found, fresh = bits_of(model), bits_of(load_model(Path(str(arguments[0])), num_ranks, rank))
                return sorted(name for name in fresh if found[name] != fresh[name])
            return getattr(held[0], command)(*arguments)

        answer_commands(pipe, answer)
