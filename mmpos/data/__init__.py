"""From image-text corpora to packed batches: records, examples, packs, batches, loaders."""
