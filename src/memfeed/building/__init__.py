"""Stores that are not complete yet: rows in any order, presence, crash recovery, the commit."""
