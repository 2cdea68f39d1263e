"""What `--worker-extension-cls` adds to vLLM's workers, so that a client can ask them what they hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from deltacast.delta.errors import StateError
from deltacast.delta.fingerprint import format_sum

__all__ = ["EXTENSION", "DeltacastExtension"]

EXTENSION: Final = "deltacast.engines.vllm.extension.DeltacastExtension"
"""What to give to `--worker-extension-cls`."""

_OTHER_BACKEND: Final = "this server's weight transfer backend is not deltacast"


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
            return {"nonce": nonce, "serves": False, "version": None, "error": _OTHER_BACKEND}
        return {"nonce": nonce, **status.as_dict()}

    def deltacast_stage(self, nonce: str, update_info: dict[str, Any], patience_s: float) -> dict[str, Any]:
        """Begin an update while this worker serves (`DeltacastEngine.stage`); never raises either.

        Args:
            nonce: as in `deltacast_status`.
            update_info: what `update_weights` is then called with, to write what is staged.
            patience_s: until that is given up.

        Returns:
            As `deltacast_status`, whose `staging` says how far it is.
        """
        return self._deltacast_call(nonce, lambda engine: engine.stage(update_info, patience_s))

    def deltacast_call_off(self, nonce: str, reason: str) -> dict[str, Any]:
        """Have this worker not write what it has staged; else as `deltacast_stage`."""
        return self._deltacast_call(nonce, lambda engine: engine.call_off(reason))

    def deltacast_parts(self, nonce: str) -> dict[str, Any]:
        """Scan what this worker holds now, and say its fingerprints (`DeltacastEngine.parts`); never raises either.

        Nothing is generated meanwhile.

        Args:
            nonce: as in `deltacast_status`.

        Returns:
            `parts`: rows of name, shape, box and fingerprint (16 hex digits); `run_id` and `version`; and why there are
            none: `damaged`, if the running model does not hold what this worker says, else `error`.
        """
        answer: dict[str, Any] = {"nonce": nonce, "version": None, "parts": [], "damaged": "", "error": ""}
        engine = self.weight_transfer_engine
        try:
            if not hasattr(engine, "parts"):
                return answer | {"error": _OTHER_BACKEND}
            rows = [[name, list(shape), [list(edges) for edges in box], format_sum(fingerprint)]
                    for name, shape, box, fingerprint in engine.parts()]  # fmt: skip
            return answer | {"run_id": engine.status.run_id, "version": engine.status.version, "parts": rows}
        except StateError as err:
            return answer | {"damaged": str(err)}
        except Exception as err:  # noqa: BLE001 - the boundary to vLLM's RPC
            return answer | {"error": f"{type(err).__name__}: {err}"}

    def _deltacast_call(self, nonce: str, call: Callable[[Any], None]) -> dict[str, Any]:
        engine, error = self.weight_transfer_engine, ""
        try:
            if hasattr(engine, "stage"):
                call(engine)
        except Exception as err:  # noqa: BLE001 - the boundary to vLLM's RPC
            error = f"{type(err).__name__}: {err}"
        answer = self.deltacast_status(nonce)
        return answer | {"error": error} if error else answer
