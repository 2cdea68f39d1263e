"""Keep a vLLM server that quantises to fp8 at a trainer's bf16 weights, over HTTP.

    python examples/vllm_fp8.py    # CPU or GPU; needs vllm and deltacast[http], no network; about a minute

Serves the tiny random model of vllm_http_sync.py with `--quantization fp8_per_channel`, and "trains" it as that does.
The trainer sends bf16; the server keeps the checkpoint's bf16 weights in host memory, proves them by digest, and
quantises the layers that changed anew. At the end a fresh server loads and quantises the checkpoint of the last step;
greedy tokens and log-probabilities, of the prompts too, are the same, number for number. Ends with status 0 only if
they are.
"""

from __future__ import annotations

import signal
import sys
import tempfile
from pathlib import Path

from vllm_http_sync import STEPS, TRANSFER, complete, label, make_model, serving, train

from deltacast import ModuleSource, TrainerInitInfo, trainer_engine
from deltacast.engines.clients import PausingClient
from deltacast.engines.vllm.client import VllmClient

QUANTISED = ["--quantization", "fp8_per_channel"]


def main() -> None:
    """Run it; raises if anything is not as promised."""
    with tempfile.TemporaryDirectory(prefix="vllm_fp8-") as scratch:
        model = Path(scratch, "model")
        policy = make_model(model)
        with serving(model, *QUANTISED, *TRANSFER) as url:
            client = VllmClient([url])
            trainer = trainer_engine("sparse_nccl").trainer_init(
                TrainerInitInfo(num_workers=1), ModuleSource(policy), PausingClient(client)
            )
            for step in range(1, STEPS + 1):
                train(policy, step)
                report = trainer.send_weights(optimizer_step=step)
                print(report.line())
                assert report.num_verified == 1
                assert label(url) == str(report.target_version)
            [rank] = client.status()[0].ranks
            print(f"held: {rank['digest']}, by strategy {rank['strategy']}")
            answers = complete(url, model)
            trainer.shutdown()
        policy.save_pretrained(model)
        with serving(model, *QUANTISED) as url:
            assert complete(url, model) == answers, "a fresh server says something else"
    print("a fresh server that quantises the same checkpoint gives the same tokens and the same log-probabilities")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that its servers end too
    main()
