"""An S3 service in this process (moto), and what is needed to speak to it."""

from __future__ import annotations

import logging
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

BUCKET = "weights"


@contextmanager
def s3_service() -> Iterator[str]:
    """Yield the endpoint of a service that has one empty bucket, `BUCKET`."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        endpoint = "http://{}:{}".format(*server.get_host_and_port())
        request(endpoint, "PUT", BUCKET)
        yield endpoint
    finally:
        server.stop()


def environment(endpoint: str) -> dict[str, str]:
    """The variables that a client of the service needs."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "anybody",
        "AWS_SECRET_ACCESS_KEY": "not-much-of-a-secret",
        "AWS_REGION": "us-east-1",
    }


def request(endpoint: str, method: str, path: str) -> bytes:
    """Send a plain request, which moto accepts unsigned, and return the answer's body."""
    asked = urllib.request.Request(f"{endpoint}/{path}", method=method)
    with urllib.request.urlopen(asked, timeout=10) as answer:
        return bytes(answer.read())
