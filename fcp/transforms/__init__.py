"""Transforms: each takes a model function and returns one of the same signature. None imports another."""
