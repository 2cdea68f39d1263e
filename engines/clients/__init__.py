"""Clients: how the trainer's lifecycle calls reach the workers.

`InProcessClient` for workers in this process (tests, notebooks), `HttpClient` for servers, `RayClient` for actors, and
`PausingClient` around any of them for engines that must be told to stop generating. A client for anything else is any
object with the four methods of `deltacast.engines.base.Client`. Read `in_process.py` first, then `answers.py`: what one
call to many workers comes to. docs/clients.md has an example of each.
"""

from deltacast.engines.clients.answers import Answer
from deltacast.engines.clients.http import HttpClient
from deltacast.engines.clients.in_process import InProcessClient
from deltacast.engines.clients.pausing import CallingClient, PausingClient, StagingClient
from deltacast.engines.clients.ray import RayClient

__all__ = ["Answer", "CallingClient", "HttpClient", "InProcessClient", "PausingClient", "RayClient", "StagingClient"]
