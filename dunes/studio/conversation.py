"""A conversation as tokens, and as rows for finetuning. Messages are in OpenAI's format."""

from html import escape

from dunes.text import Tokenizer


def token_html(tokenizer: Tokenizer, ids: list[int]) -> str:
    """The tokens with their ids. Special tokens, which have a name but no text, have the accent colour."""
    chip, name = '<span class="rounded {}">{}<sub class="dim">{}</sub></span> '.format, tokenizer.inner.id_to_token
    texts = [(id, tokenizer.bytes_of(id).decode(errors="replace").replace("\n", "↵")) for id in ids]
    return "".join(chip("" if t else "bg-primary text-white", escape(t or str(name(id))), id) for id, t in texts)


def pair_rows(prompt: list[dict[str, str]], texts: list[str]) -> list[dict[str, list[dict[str, str]]]]:
    """Rows for `dunes finetune --objective dpo` that prefer the first and the second of two answers; none unless
    there are two different answers."""
    answers = [[{"role": "assistant", "content": text}] for text in dict.fromkeys(filter(None, texts))]
    pairs = [answers, answers[::-1]] if len(answers) == len(texts) == 2 else []
    return [{"prompt": prompt, "chosen": chosen, "rejected": rejected} for chosen, rejected in pairs]
