"""In which order epochs visit rows, and which of them each rank reads at each step: integers alone."""

from memfeed.order.order import Blocks, Order, Sequential, Shuffled, permutation

__all__ = ["Blocks", "Order", "Sequential", "Shuffled", "permutation"]
