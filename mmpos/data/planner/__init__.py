"""Plan packs of balanced cost: sizes and costs of examples, plans across steps and ranks, and plan index files."""
