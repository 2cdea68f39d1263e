"""deltacast inside vLLM: a weight transfer engine that its workers load as a plugin, and the client that drives them.

`plugin.py` is what vLLM calls at start; `engine.py` is the worker engine. `planner.py`, over `tracing.py` and
`skeleton.py`, finds where a checkpoint's elements lie in the running model, and `strategies.py` makes of that a worker
over this memory, or one over weights in host memory that `reload.py` brings the model after; `readback.py` looks
whether it did. `extension.py` answers what a worker holds; `client.py` is the trainer's side, `server_digest.py`
compares what servers hold with a checkpoint, and `trainer.py` is the engine in vLLM's own trainer factory. vLLM is
imported where its workers run and by `trainer.py`, and nowhere else. Read `engine.py` first; docs/vllm.md says how to
use it.
"""
