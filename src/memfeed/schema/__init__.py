"""The words of a sample: fields, nesting, and values as bytes."""
