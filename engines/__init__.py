"""How it travels: trainer and worker engines, the round protocol, control connections, payload groups.

May import `deltacast.delta` and `deltacast.store`; the only folder that imports `torch.distributed`. Read `base.py`
first (the two halves and the client between them), then `protocol.py` (states and messages), `trainer.py` and
`worker.py` (a round from either end). `registry.py` finds an engine by name. Of workers, `leave.py` and `staging.py`
are for those that generate while an update arrives, `shards.py` for ranks of a server, `pulling.py` for those that
fetch from a store, with `pull_trainer.py` at the other end.
"""
