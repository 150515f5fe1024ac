"""Preparation of whole corpora: ready sequences in Parquet files, made by processes or by Ray."""
