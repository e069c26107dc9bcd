"""Stores at an address: object storage, read and written through obstore."""
