"""The forms in which a model lies in a folder: ours with its card, Meta's and Mistral's, PEFT's."""
