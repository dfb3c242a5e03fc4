"""One file for each form on disk: Hugging Face's, PEFT's, GGUF, native, packed, ONNX, C++."""
