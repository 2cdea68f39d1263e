"""deltacast inside vLLM: a weight transfer engine that its workers load as a plugin, and the client that drives them.

`plugin.py` is what vLLM calls at start; `engine.py` is the worker engine, a round worker over the checkpoint's weights
in host memory; `reload.py` brings the running model after them; `extension.py` answers what a worker holds; `client.py`
is the trainer's side. `planner.py`, over `tracing.py`, `pieces.py` and `skeleton.py`, finds where a checkpoint's
elements lie in the running model; the engine does not use it yet. vLLM is imported where its workers run, and nowhere
else. Read `engine.py` first; docs/vllm.md says how to use it.
"""
