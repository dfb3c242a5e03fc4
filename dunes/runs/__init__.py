"""What the verbs do: bodies of loops, progress, pictures, reports."""
