"""Tensor operations with a fast form. Each file holds the plain reference beside the fast form."""
