"""Headers of a corpus of interleaved documents, captioned images, plain text and chats, drawn from a seed."""

import numpy as np

from mmpos.data import Headers


def mixed_corpus(count: int, seed: int = 0, max_tokens: int = 8192) -> Headers:
    """Draw the headers of examples of at most ``max_tokens``.

    A third are interleaved (lognormal text around 490 tokens, 2.5 images on average, as OBELICS reports), a third
    captions with one image, a fifth text, the rest chats. Images have a median side of 448 pixels, at most 1,000, in
    patches of 14 that are merged by four, as Qwen2-VL has them.
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
    of_image = (side * aspect / 28).round().clip(1).astype(int) * (side / aspect / 28).round().clip(1).astype(int)
    tokens = text + 8 + np.bincount(owner, of_image, count).astype(int)
    kept = tokens <= max_tokens
    labels = (text * random.uniform(0.3, 1, count)).astype(int)
    return Headers(tokens[kept], labels[kept], 4 * of_image[kept[owner]], images[kept])
