"""The path of Mistral's fill-in-the-middle API, which replies like OpenAI's chats.

https://docs.mistral.ai/api/#tag/fim
"""

from dunes.serve.fields import Fields
from dunes.serve.protocols.openai import CHUNK, chat_choice, endpoint
from dunes.serve.protocols.protocol import Protocol
from dunes.serve.requests import Asked, line_or_texts, read_text


def read_fim(fields: Fields) -> Asked:
    """A request for the rest of a line between a prompt and a suffix."""
    text = read_text(fields, {}, "max_tokens", seed=fields.seed(fields.first("random_seed", "seed")))
    return Asked(fields, line_or_texts(text, fields.text("prompt", None), fields.text("suffix")), "fim-")


PROTOCOL = Protocol("Mistral", {"/v1/fim/completions": endpoint(read_fim, "chat.completion", CHUNK, chat_choice)})
