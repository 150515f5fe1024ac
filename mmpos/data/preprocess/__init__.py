"""Whole corpora made ready once: sequences in Parquet files, by processes or by Ray."""
