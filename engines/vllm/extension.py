"""What `--worker-extension-cls` adds to vLLM's workers, so that a client can ask them what they hold."""

from __future__ import annotations

from typing import Any, Final

__all__ = ["EXTENSION", "DeltacastExtension"]

EXTENSION: Final = "deltacast.engines.vllm.extension.DeltacastExtension"
"""What to give to `--worker-extension-cls`."""


class DeltacastExtension:
    """Methods that vLLM mixes into its worker class; `self` is the worker."""

    weight_transfer_engine: Any

    def deltacast_status(self, nonce: str) -> dict[str, Any]:
        """Say what this worker holds (`engine.EngineStatus`); never raises, since that desynchronises vLLM's ranks.

        Args:
            nonce: returned as it is. A rank that answers with another one answers an earlier question.
        """
        status = getattr(self.weight_transfer_engine, "status", None)
        if status is None:
            error = "this server's weight transfer backend is not deltacast"
            return {"nonce": nonce, "serves": False, "version": None, "error": error}
        return {"nonce": nonce, **status.as_dict()}
