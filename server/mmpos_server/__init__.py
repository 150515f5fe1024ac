"""Provide mmpos as a gRPC service for clients in other languages, in other processes and on other machines."""
