"""An explicit-state model checker of the round protocol: one trainer, two workers, some faults, every interleaving.

`states.py` says what there is at one moment, `trainer_moves.py` and `worker_moves.py` what engines/ does next in it,
`faults.py` what bad luck does; `search.py` visits all that follows and knows the promise. Read `states.py` first.

Each move is what one process does between two waits, up to the message that ends it: whoever dies inside one might as
well have died before it. States change by `Machine` over the tables of engines/protocol.py, decisions by `DecisionLog`.
"""

from protocol_model.search import Exploration, explore
from protocol_model.states import Faults, Slip
from protocol_model.world_changes import Rules, Steps

__all__ = ["Exploration", "Faults", "Rules", "Slip", "Steps", "explore"]
