"""Random headers for a corpus of interleaved documents, captioned images, plain text and chats."""

import numpy as np

from mmpos.data import Headers


def mixed_corpus(count: int, seed: int = 0, max_tokens: int = 8192) -> Headers:
    """Draw the headers of examples with at most ``max_tokens`` tokens each.

    35% are interleaved documents (lognormal text around 490 tokens, 2.5 images on average, as OBELICS reports), 35%
    captions with one image, 20% text and 10% chats. Images have a median side of 448 pixels and sides of at most 1,000,
    in patches of 14 pixels that are merged in groups of four, as in Qwen2-VL.
    """
    random = np.random.default_rng(seed)
    kind = random.choice(4, count, p=[0.35, 0.35, 0.2, 0.1])
    text = np.exp(random.normal(np.array([6.2, 3.5, 6.6, 5.5])[kind], np.array([0.9, 0.7, 1.1, 0.6])[kind])).astype(int)
    drawn = [1 + random.poisson(1.5, count), np.ones(count, int), np.zeros(count, int), 1 + random.poisson(0.5, count)]
    images = np.choose(kind, drawn)
    owner = np.arange(count).repeat(images)
    side, aspect = (
        random.lognormal(np.log(448), 0.5, owner.size).clip(112, 1000),
        np.exp(random.normal(0, 0.15, owner.size)),
    )
    image_tokens = (side * aspect / 28).round().clip(1).astype(int) * (side / aspect / 28).round().clip(1).astype(int)
    tokens = text + 8 + np.bincount(owner, image_tokens, count).astype(int)
    kept = tokens <= max_tokens
    labels = (text * random.uniform(0.3, 1, count)).astype(int)
    return Headers(tokens[kept], labels[kept], 4 * image_tokens[kept[owner]], images[kept])
