"""Plan packs of balanced cost: sizes and costs of examples, plans over steps and ranks, and index files of plans."""
