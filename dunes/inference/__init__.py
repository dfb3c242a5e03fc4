"""Generate text with a loaded model: prompts, stops, chat, samples, adapters per request.

Start with `text_generator.TextGenerator`, `chat.load_chat_engine` and `chat.Chat`.
"""
