"""What changed: bits, fingerprints, diffs, patches, the container, and applying them.

Imports nothing else of deltacast and never `torch.distributed`. Read `bits.py` and `fingerprint.py` first, then
`patch.py` (what travels), `diff.py` and `apply.py` (how it is made and used), `codec/` (how it is written down).
"""
