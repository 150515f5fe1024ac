"""Packs balanced by what they cost: sizes and costs of examples, plans over steps and ranks, and their index files."""
