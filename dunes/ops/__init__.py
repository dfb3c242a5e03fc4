"""Tensor maths that has a faster form. Each file holds the plain reference beside the fast form."""
