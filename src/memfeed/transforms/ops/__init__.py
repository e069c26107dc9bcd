"""Transforms: each turns random numbers into parameters of a batch."""
