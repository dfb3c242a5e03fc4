"""Weight files: safetensors and pickles, read without executing anything, and written tensor by tensor."""
