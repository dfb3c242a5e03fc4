"""Weight files: read safetensors and pickles without executing anything; write safetensors tensor by tensor."""
