"""Formats on disk, one file each: PEFT adapters, GGUF, Meta's native, quantized weights, ONNX, C++."""
