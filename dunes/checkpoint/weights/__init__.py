"""Files of weights: their bytes, headers and tensors, read without executing anything and written atomically."""
