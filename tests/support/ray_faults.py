"""Ray actors that do not do what they are asked. Without torch, so that they start at once."""

from __future__ import annotations

import os
import threading
from typing import Any


class FaultyActor:
    """An actor with a worker engine's four methods, the last two of which are no good."""

    def init_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Do nothing."""

    def start_weight_update(self) -> None:
        """Do nothing."""

    def receive_weights(self, update_info: dict[str, Any]) -> None:
        threading.Event().wait(60)

    def finish_weight_update(self) -> None:
        raise ValueError("no such rank")

    def die(self) -> None:
        os._exit(1)
