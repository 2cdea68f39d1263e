"""The commands of `deltacast`, one module each, thin above `deltacast.delta`.

`options.py` holds the options that several share, `console.py` what is printed (tables, JSON, progress),
`failures.py` which error gives which exit code. Modules here import torch, numpy and rich only inside functions.
Read `digest.py` first; `deltacast.cli` puts them together.
"""
