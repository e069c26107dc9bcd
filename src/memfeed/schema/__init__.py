"""Describe samples: their fields, their containers, and their values as bytes."""
