"""The view of chats: one model, or several side by side, answer a conversation."""

import asyncio
from time import perf_counter

from nicegui import ui

from dunes.files.json_file import append_record
from dunes.generate.sampling import RULES, SamplingOptions
from dunes.serve.fields import Fields
from dunes.serve.requests import TextRequest, read_text
from dunes.studio.app import Studio
from dunes.studio.conversation import pair_rows, token_html

SETTINGS = {name: getattr(SamplingOptions, name) for name in (*RULES, "max_tokens")} | {"seed": None}
"""Settings of an answer and their defaults. None is off, and a random seed."""


async def draw(studio: Studio) -> None:
    """Draw the view; `?model=` selects a model. `talk` is the system prompt, then two messages for each block in
    `history`."""
    talk, tasks = [{"role": "system", "content": ""}], list[asyncio.Task[str]]()
    paths = {entry.name: str(entry.path) for entry in await asyncio.to_thread(studio.entries) if entry.is_model}
    models = [*dict.fromkeys([*ui.context.client.request.query_params.getlist("model"), *paths])]

    def save(file: str, row: dict[str, list[dict[str, str]]], reply: dict[str, str]) -> None:
        """Append a row to a file in the studio's folder. The conversation goes on from the row's answer."""
        append_record(studio.root / file, row)
        reply.update((row.get("chosen") or row["messages"])[-1])
        ui.notify(f"appended to {studio.root / file}")

    async def edit(place: int, asks: bool = False) -> None:
        """Take a question back, and all that follows; it can be changed and sent again."""
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks)
        box.value = talk[2 * place + 1]["content"]
        for block in history.default_slot.children[place:]:
            block.delete()
        del talk[2 * place + 1 :]
        if asks:
            await ask()

    async def ask() -> None:
        """Stream the answers of the chosen models to the message."""
        if not (all(task.done() for task in tasks) and select.validate() and box.value.strip()):
            return
        prompt = [m for m in (*talk, {"role": "user", "content": box.value}) if m["content"]]
        fields = Fields({"messages": prompt} | {name: number.value for name, number in numbers.items()})
        request = read_text(fields, {}, "max_tokens", messages=fields.messages())
        with history, ui.row().classes("w-full gap-x-8") as block:
            ui.label(box.value).classes("w-full whitespace-pre-wrap break-words rounded bg-gray-500/10 px-4 py-2")
        tasks[:] = [asyncio.create_task(answer(block, model, request)) for model in select.value]
        place, reply, box.value = len(talk) // 2, {"role": "assistant", "content": ""}, ""
        talk.extend((prompt[-1], reply))
        history.client.on_delete((answers := asyncio.gather(*tasks)).cancel)
        reply["content"] = next(filter(None, texts := await answers), "")
        with block, ui.button(icon="more_horiz").props('flat round dense aria-label="More"'), ui.menu():
            ui.menu_item("Edit", lambda: edit(place))
            ui.menu_item("Regenerate", lambda: edit(place, asks=True))
            keep = lambda: save("chats.jsonl", {"messages": [*prompt, reply]}, reply)
            ui.menu_item("Save for finetuning", keep).set_visibility(any(texts))
            for i, row in enumerate(pair_rows(prompt, texts), 1):
                ui.menu_item(f"Prefer answer {i}", lambda row=row: save("pairs.jsonl", row, reply))

    async def answer(block: ui.row, model: str, request: TextRequest) -> str:
        """Stream a model's answer into a new column, whose labels change ten times a second, not by token."""
        with block, ui.column().classes("flex-1 min-w-[16rem] gap-1"):
            with ui.expansion(model, caption="tokens").props('dense header-class="px-0"') as tokens:
                html = ui.html(sanitize=False).classes("*:inline-block *:whitespace-pre *:bg-gray-500/15 *:px-1")
            shown = {"text": "", "stats": "opening"}
            ui.label().classes("whitespace-pre-wrap break-words").bind_text_from(shown, "text")
            ui.label().classes("dim").bind_text_from(shown, "stats")
        try:
            served = studio.models.worker(key := await studio.models.open(paths.get(model, model))).find("")
            ready = await asyncio.to_thread(served.with_prompt, request)
            ids, start, tokenizer = [*map(int, ready.prompt)], perf_counter(), served.require_batch().tokenizer
            tokens.on_value_change(lambda: html.set_content(token_html(tokenizer, ids)))
            async for part in studio.models.stream(key, ready):
                if not part.reason:
                    shown["text"], ids = shown["text"] + part.text, ids + part.ids
                count, seconds = len(ids) - len(ready.prompt), perf_counter() - start
                shown["stats"] = f"{len(ready.prompt):,} + {count:,} tokens, {count / seconds:,.0f} tokens/s"
        except (Exception, asyncio.CancelledError) as error:
            shown["stats"] = str(error) or f"{shown['stats']}, stopped"
        return shown["text"]

    select = ui.select(models, label="Models", value=models[:1], multiple=True, new_value_mode="add-unique")
    select.validation = {"Choose a model": bool}
    with ui.expansion("System prompt and sampling").classes("w-full").props("header-class=px-0"), ui.row():
        ui.textarea("System prompt").props("autogrow").classes("w-full").bind_value(talk[0], "content")
        numbers = {name: ui.number(name.replace("_", " "), value=value) for name, value in SETTINGS.items()}
    with ui.column().classes("w-full flex-col-reverse overflow-y-auto max-h-[60vh]"):  # stays at its end
        history = ui.column().classes("w-full gap-6")
    with ui.row().classes("w-full items-center no-wrap"):
        box = ui.textarea("Message").props("autogrow").classes("grow")
        box.on("keydown.enter.exact.prevent", ask, js_handler="event => event.isComposing || emit()")
        ui.button("Send", on_click=ask)
        ui.button("Stop", on_click=lambda: [task.cancel() for task in tasks]).props("flat")
