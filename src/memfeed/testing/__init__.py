"""For those who test what they build on memfeed: contracts as test classes.

A contract is a class of tests over a fixture. Derive from it and say what the fixture is (this needs pytest).
``import memfeed`` does not import this.
"""

from memfeed.testing.equality import equal
from memfeed.testing.store_contract import StoreContract
from memfeed.testing.transfer_contract import TransferContract

__all__ = ["StoreContract", "TransferContract", "equal"]
