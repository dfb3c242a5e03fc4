"""Text in, text out with a loaded model: prompts, stops, chat, samples, adapters per request."""
