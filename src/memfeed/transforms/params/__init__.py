"""Parameters of a batch's transforms: what was drawn, and how it changes pixels, points and values."""
