"""Parameters of a batch's transforms: what was drawn, and what it does to pixels, points and values."""
