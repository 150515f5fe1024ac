"""The gRPC service of mmpos, for clients in other languages, processes and machines."""
