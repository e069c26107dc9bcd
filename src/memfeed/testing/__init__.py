"""Test what you build on memfeed: contracts as test classes.

A contract is a class of tests that use a fixture. Derive from it and define the fixture (this needs pytest).
``import memfeed`` does not import this room.
"""

from memfeed.testing.store_contract import StoreContract, equal
from memfeed.testing.transfer_contract import TransferContract

__all__ = ["StoreContract", "TransferContract", "equal"]
