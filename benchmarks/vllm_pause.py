"""How long a live vLLM server is paused for an update, and what it completes meanwhile, with and without staging.

    python benchmarks/vllm_pause.py [--layers 28] [--trainer cuda:0] [--server-gpus 1] [--wires raw container] \
        [--tensor-parallel 1] [--eager] [--steps 5]

Needs vllm and deltacast[http], and examples/ beside it. A random Qwen3 (507 million bf16 parameters at 28 layers) is
served on a free port. A request of 16 tokens is always under way. Each step changes 1 % of every tensor; printed are
the trainer's report, how long `send_weights` and the pause took, and the requests completed meanwhile. At the end what
the server holds is compared with the trainer's checkpoint by `deltacast verify`, and its tokens and log-probabilities
with those of a fresh server.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from deltacast import ModuleSource, TrainerInitInfo, trainer_engine
from deltacast.engines.clients import PausingClient
from deltacast.engines.vllm.client import VllmClient

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from vllm_http_sync import TRANSFER, complete, make_model, serving


def make_policy(folder: Path, layers: int) -> Qwen3ForCausalLM:
    """Make a random model in host memory, and its checkpoint with a tokenizer."""
    make_model(folder)  # for the tokenizer
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=32768, hidden_size=1024, intermediate_size=3072, num_hidden_layers=layers, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=1024, tie_word_embeddings=False,
        initializer_range=0.02, bos_token_id=None, eos_token_id=0,
    )  # fmt: skip
    policy = Qwen3ForCausalLM(config).bfloat16()
    policy.save_pretrained(folder)
    return policy


def train(policy: Qwen3ForCausalLM) -> None:
    """Change 1 % of every tensor."""
    with torch.no_grad():
        for weight in policy.parameters():
            flat = weight.view(-1)
            places = torch.randint(0, flat.numel(), (max(1, flat.numel() // 100),), device=flat.device)
            flat[places] += 0.01


@contextmanager
def requests(url: str, model: Path) -> Iterator[list[float]]:
    """Have a request under way all the time; yields how long each took that has ended."""
    spans: list[float] = []
    over = threading.Event()
    body = {"model": str(model), "prompt": "hello", "max_tokens": 16, "temperature": 0, "ignore_eos": True}

    def ask() -> None:
        while not over.is_set():
            started = time.monotonic()
            httpx.post(f"{url}/v1/completions", json=body, timeout=120).raise_for_status()
            spans.append(time.monotonic() - started)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield spans
    finally:
        over.set()
        thread.join()


def measure(arguments: argparse.Namespace, policy: Qwen3ForCausalLM, url: str, model: Path) -> None:
    """Send the steps over each wire, with and without staging."""
    on_gpu = arguments.trainer != "cpu"
    placed: dict[str, Any] = {"device": arguments.trainer, "placement": "cuda"} if on_gpu else {}
    for wire, stage in [(wire, stage) for wire in arguments.wires for stage in (True, False)]:
        info = TrainerInitInfo(num_workers=arguments.tensor_parallel, threads=8, wire=wire, **placed)
        client = PausingClient(VllmClient([url]), stage=stage)
        trainer = trainer_engine("sparse_nccl").trainer_init(info, ModuleSource(policy), client)
        print(f"== {wire}, {'staged' if stage else 'not staged'}")
        with requests(url, model) as spans:
            for step in range(arguments.steps):
                train(policy)
                before = len(spans)
                report = trainer.send_weights(optimizer_step=step)
                assert report.num_verified == arguments.tensor_parallel
                print(f"{report.line()}; {len(spans) - before} requests completed meanwhile", flush=True)
        print(f"requests: median {statistics.median(spans) * 1e3:.0f} ms, longest {max(spans) * 1e3:.0f} ms")
        trainer.shutdown()


def main() -> None:
    """Run it; raises if the server does not hold what it was sent."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--trainer", default="cpu", help="cpu, or cuda:N")
    parser.add_argument("--server-gpus", help="its CUDA_VISIBLE_DEVICES")
    parser.add_argument("--wires", nargs="+", default=["container"])
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--eager", action="store_true", help="no compilation and no CUDA graphs")
    parser.add_argument("--steps", type=int, default=5)
    arguments = parser.parse_args()
    options = [f"--tensor-parallel-size={arguments.tensor_parallel}"]
    options += [] if arguments.eager else ["--no-enforce-eager"]
    with tempfile.TemporaryDirectory(prefix="vllm_pause-") as scratch:
        model = Path(scratch, "model")
        policy = make_policy(model, arguments.layers)
        print(f"{sum(weight.numel() for weight in policy.parameters()) / 1e6:.0f} million parameters")
        policy.to(arguments.trainer)  # before the server's GPUs are all that can be seen
        if arguments.server_gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = arguments.server_gpus
        with serving(model, *options, *TRANSFER) as url:
            measure(arguments, policy, url, model)
            policy.cpu().save_pretrained(model)
            command = [sys.executable, "-m", "deltacast", "verify", str(model), url]
            subprocess.run(command, check=True)  # noqa: S603 - our own command
            served = complete(url, model)
        with serving(model, *options) as url:
            assert complete(url, model) == served, "a fresh server says something else"
    print("a fresh server on the same checkpoint gives the same tokens and the same log-probabilities")


if __name__ == "__main__":
    main()
