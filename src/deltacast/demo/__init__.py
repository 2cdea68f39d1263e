"""What `deltacast demo` runs: a small policy that learns by GRPO, and the processes that sample from it.

Read `run.py` first for the processes, `grpo.py` for the learning. The latter is torch only and knows nothing of weight
transfer: `policy.py` holds a small transformer and the sampler, `task.py` what it is asked and how answers are
verified, `hf.py` the same two for a model from a Hugging Face folder. Importing any of it has no side effects.
"""
