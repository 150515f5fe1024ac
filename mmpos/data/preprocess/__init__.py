"""Preprocess corpora into Parquet files of sequences, with local processes or with Ray."""
