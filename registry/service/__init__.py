"""The registry's gRPC face."""
