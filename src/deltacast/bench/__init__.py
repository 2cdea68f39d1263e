"""Measurements behind `deltacast bench`: each module yields rows of numbers, `deltacast.commands.bench` shows them.

Rates are bytes per second / 10^9 and are measured side by side with `memcpy` in the same run, because absolute
figures say more about the machine than about the code. Nothing here is imported by the library itself.
"""
