"""Workers of a vLLM server on a CPU whose weights keep their plain layout, as on GPUs: the import sees to that.

vLLM imports a worker's extension before it loads the model.
"""

from __future__ import annotations

from deltacast.engines.vllm.extension import DeltacastExtension
from vllm_models import plain_layouts

__all__ = ["PlainExtension"]

_FOR_GOOD = plain_layouts()  # kept, since it ends with its generator
_FOR_GOOD.__enter__()


class PlainExtension(DeltacastExtension):
    """Deltacast's own; the server must find this folder in its `PYTHONPATH`."""
