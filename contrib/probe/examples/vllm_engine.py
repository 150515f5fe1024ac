"""Check the positions by which vLLM rotates: serve a probe checkpoint, record its keys, and read positions from them.

This requires vLLM in a separate environment (tested with 0.33.0 on a CPU) and the config.json of a Qwen-VL model. The
exit code is 0 if the positions are those of the config, and 3 otherwise.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from mmpos_probe import write_checkpoint
from mmpos_probe.command import app

PROMPT = "abc<|vision_start|><|image_pad|><|vision_end|>def"


def keep_keys(keys: dict[str, list[Any]]) -> None:
    """Make attention, whose result the checkpoint ignores, return zeros and append each layer's keys to ``keys``."""
    from vllm.model_executor.layers.attention.attention import Attention

    def forward(self: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> Any:
        keys[self.layer_name].append(key.float().numpy(force=True).reshape(len(key), -1, self.head_size))
        return query * 0

    Attention.forward = forward


def main() -> None:
    """Serve the checkpoint, generate three tokens after an image, and run ``mmpos probe run`` on the keys."""
    import vllm

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", help="config.json of the model")
    parser.add_argument(
        "--spec", default="4,11x18,7", help="the request: text, patches of the image, text and new tokens"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_checkpoint(arguments.config, Path(folder) / "probe")
        keys: dict[str, list[Any]] = defaultdict(list)
        keep_keys(keys)
        engine = vllm.LLM(str(checkpoint), dtype="float32", enforce_eager=True, max_model_len=4096)
        keys.clear()  # from the warm-up
        request = {"prompt": PROMPT, "multi_modal_data": {"image": np.zeros((300, 500, 3), np.uint8)}}
        engine.generate(request, vllm.SamplingParams(max_tokens=4, ignore_eos=True))
        archive = Path(folder) / "keys.npz"
        layers: dict[str, Any] = {name: np.concatenate(layer) for name, layer in keys.items()}
        np.savez(archive, **layers)
        app(["run", str(archive), "--config", str(checkpoint), "--spec", arguments.spec])


if __name__ == "__main__":
    main()
