"""Activation memory of an engine: offload to the host, selective recomputation, fused loss, tiles of tokens."""
