"""The task of the tiny models: photos with captions, and chats about one or two photos."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import mmpos

QUESTION = "What do you see?"
CAPTIONS = {
    "chelsea.jpg": "A cat with green eyes looks past you.",
    "coffee.jpg": "A cup of coffee, with a spoon beside it.",
    "astronaut.png": "A woman in an orange suit smiles.",
    "rocket.jpg": "A rocket stands on its pad at night.",
    "motorcycle_left.png": "A motorcycle is parked in a garage.",
    "hubble_deep_field.jpg": "Many galaxies, very far away.",
    "coins.png": "Rows of old coins on a dark cloth.",
    "camera.png": "A man looks through a camera on three legs.",
}


@dataclass(frozen=True, eq=False)
class Photo:
    """Photo as a (height, width, 3) uint8 array, with its caption."""

    pixels: Any
    caption: str

    def crop(self, random: np.random.Generator) -> Photo:
        """Cut out a random part that spans at least 60 % of each side, and mirror it with probability one half."""
        height, width, _ = self.pixels.shape
        h, w = (int(side * random.uniform(0.6, 1)) for side in (height, width))
        top, left = random.integers(height - h + 1), random.integers(width - w + 1)
        part = self.pixels[top : top + h, left : left + w]
        return Photo(np.ascontiguousarray(part[:, ::-1] if random.random() < 0.5 else part), self.caption)


def load_photos() -> list[Photo]:
    """Load the two photos in mmpos, and six more if scikit-image is installed, with sides of at most 160 pixels."""
    folders = [Path(mmpos.__file__).parent / "photos"]
    spec = find_spec("skimage")
    if spec is not None and spec.origin is not None:
        folders.append(Path(spec.origin).parent / "data")
    photos = []
    for name, caption in CAPTIONS.items():
        path = next((folder / name for folder in folders if (folder / name).exists()), None)
        if path is not None:
            with Image.open(path) as image:
                image.thumbnail((160, 160))
                photos.append(Photo(np.array(image.convert("RGB")), caption))
    return photos


Shown = tuple[Photo, ...]
"""Photos of one chat."""


def pairs(photos: Sequence[Photo], random: np.random.Generator) -> list[Shown]:
    """Pair every photo with another one."""
    order = random.permutation(len(photos))
    return [(photos[i], photos[j]) for i, j in zip(order, np.roll(order, 1), strict=True)]


def chat(shown: Shown, *, answered: bool = False) -> list[dict[str, Any]]:
    """Build a chat: a question about photos, with the answer if ``answered``."""
    images = [{"type": "image", "image": photo.pixels} for photo in shown]
    messages = [{"role": "user", "content": [*images, {"type": "text", "text": QUESTION}]}]
    if answered:
        messages.append({"role": "assistant", "content": [{"type": "text", "text": answer_of(shown)}]})
    return messages


def answer_of(shown: Shown) -> str:
    """Return the correct answer about these photos."""
    return " ".join(photo.caption for photo in shown)
