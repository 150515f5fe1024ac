"""Preprocess corpora into Parquet files of ready sequences, with local processes or with Ray."""
