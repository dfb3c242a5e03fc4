"""File formats, one module for each: PEFT adapters, GGUF, Meta's native, quantized weights, ONNX, C++."""
