"""Tensors to a device, in as few copies as possible."""
