"""The HTTP protocols: a file and an entry in PROTOCOLS for each. Importing this package does not import torch."""

from dunes.serve.protocols import llama_server, mistral, ollama, openai
from dunes.serve.protocols.protocol import Protocol

PROTOCOLS: tuple[Protocol, ...] = (
    llama_server.PROTOCOL,
    openai.PROTOCOL,
    mistral.PROTOCOL,
    ollama.PROTOCOL,
)


def protocol_of(path: str) -> Protocol:
    """The protocol whose prefix is the longest one that the path starts with."""
    return max(PROTOCOLS, key=lambda protocol: len(protocol.prefix) if path.startswith(protocol.prefix) else -1)
