"""The HTTP protocols. Each protocol has a file and an entry in PROTOCOLS. Importing this package does not import
torch."""

from dunes.serve.protocols import llama_server, mistral, ollama, openai
from dunes.serve.protocols.protocol import Protocol

PROTOCOLS: tuple[Protocol, ...] = (llama_server.PROTOCOL, openai.PROTOCOL, mistral.PROTOCOL, ollama.PROTOCOL)
ENDPOINTS = {path: endpoint for protocol in PROTOCOLS for path, endpoint in protocol.endpoints.items()}
DESCRIPTIONS = {path: write for protocol in PROTOCOLS for path, write in protocol.descriptions.items()}
"""Paths that describe the models, with functions that write the descriptions."""


def protocol_of(path: str) -> Protocol:
    """The protocol with the longest `prefix` at the start of the path."""
    return max(PROTOCOLS, key=lambda protocol: len(protocol.prefix) if path.startswith(protocol.prefix) else -1)
