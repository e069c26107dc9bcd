"""The transforms themselves: each turns draws into parameters."""
