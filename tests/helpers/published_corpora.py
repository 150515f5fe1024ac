"""Random headers of corpora whose means are published."""

import numpy as np

from mmpos.data import Headers

CORPORA = {
    "OBELICS": (115e9 / 141e6, 353e6 / 141e6, 1.0),  # arXiv:2306.16527, abstract
    "MMC4": (43e9 / 101.2e6, 571e6 / 101.2e6, 1.0),  # arXiv:2304.06939, abstract
    "FineVision": (9.5e9 / 24.3e6 * 1.25, 17.3e6 / 24.3e6, 0.8),  # arXiv:2510.17269; four fifths are answers
}
"""Mean text tokens and images of a document, and the fraction of the text that is trained on."""


def corpus(name: str, count: int, seed: int = 0, max_tokens: int = 8192) -> Headers:
    """Draw headers of documents in assumed shapes, since only means are published: lognormal text and sides."""
    random = np.random.default_rng(seed)
    mean_text, mean_images, trained = CORPORA[name]
    text = random.lognormal(np.log(mean_text) - 0.5, 1.0, count).astype(int) + 1
    owner = np.arange(count).repeat(images := random.poisson(mean_images, count))
    side = random.lognormal(np.log(448), 0.5, owner.size).clip(112, 1000)
    image_tokens = (side / 28).round().astype(int) ** 2  # patches of 14 pixels, merged by four, as in Qwen2-VL
    tokens = text + 8 + np.bincount(owner, image_tokens, count).astype(int)
    kept = tokens <= max_tokens
    return Headers(tokens[kept], (text * trained).astype(int)[kept], 4 * image_tokens[kept[owner]], images[kept])
