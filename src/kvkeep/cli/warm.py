"""``kvkeep warm``: reads a text ahead, so that a server begins with it."""

from __future__ import annotations

import os
import time
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from kvkeep.budget import bytes_of, size
from kvkeep.cli import options
from kvkeep.cli.options import ModelOptions
from kvkeep.cli.output import interruptible, note, print_json, reading
from kvkeep.cli.serve.server_options import ConversationOptions, Keys, Quota
from kvkeep.cli.startup import startup
from kvkeep.decode.texts import read_text
from kvkeep.errors import KvkeepError, Stopped, UsageError
from kvkeep.plugins import optional


@options.command
def warm(
    *,
    file: Annotated[
        str,
        typer.Argument(metavar="FILE", help="FILE.json: the body of a recorded request; any other file: a plain text."),
    ],
    conversation: ConversationOptions,
    model: ModelOptions,
    sessions: options.Sessions = None,
    quota: Quota = None,
    keys: Keys = None,
    export: Annotated[
        Path | None,
        typer.Option(
            "--export", metavar="FILE", help="Also write the blocks to a new file, for 'kvkeep cache import'."
        ),
    ] = None,
    json: options.Json = False,
) -> None:
    """Prefill a long text, so that the next server begins with it.

    Give the same options as for the server. Ctrl-C stores the part that was read; the same command reads the rest.
    """
    from kvkeep.serve.http.keys import digest_of, keys_given, owner_of

    conversation.check()
    model.check()
    if quota is not None:
        bytes_of(quota, "quota")
    if export is not None and os.path.lexists(export):
        raise UsageError(f"There is already something at '{export}'; name another file.")
    optional("fastapi", "serve")
    text, known_keys = read_text(file), keys_given(keys)
    if len(known_keys) > 1:
        raise UsageError(
            f"There are {len(known_keys)} keys, but a text is stored for one key; put it into a file of its own "
            "(--keys), and leave KVKEEP_API_KEYS empty."
        )
    with startup():
        from kvkeep.blocks import archive
        from kvkeep.blocks.store import LOCAL_OWNER, store_folder
        from kvkeep.cli.serve.defaults import with_defaults
        from kvkeep.serve.http.errors import APIError
        from kvkeep.serve.http.protocol import encoded
        from kvkeep.serve.http.recorded import recorded_prompt
        from kvkeep.serve.http.reuse import AnswerRecords
        from kvkeep.serve.service import Service
        from kvkeep.serve.warm import read_ahead, storable, store_of, stored_text

        owner = owner_of(digest_of(known_keys[0])) if known_keys else LOCAL_OWNER
        prompt = recorded_prompt(text, file) if file.endswith(".json") else text
        given: dict[str, Any] = {
            "model": model.model, "weights": model.weights, "device": model.device, "pre": model.pre,
            "memory": conversation.memory, "sessions": store_folder(sessions).absolute(), "quota": quota,
            "as_sent": conversation.as_sent,
        }  # fmt: skip
        service = Service.parse(given, conversation.cache(), ())
    service.store()
    with startup(model.model):
        loaded = model.load()
    engine = with_defaults(service, loaded, conversation.conversations).engine(loaded)
    with closing(engine):
        answers = AnswerRecords(loaded.tokenizer, engine.geometry.vocab_size, engine.ends)
        generated = partial(answers.find, store_of(engine).records.of(owner))
        try:
            ids = encoded(prompt, loaded.tokenizer, engine.geometry.vocab_size, generated, service.as_sent).ids
        except APIError as error:
            raise UsageError(f"'{file}' cannot be read: {error.detail}") from None
        if (fitting := storable(engine, len(ids))) < len(ids):
            raise KvkeepError(
                f"Only {fitting:,} of {len(ids):,} tokens fit into the quota of {size(service.quota)}; raise --quota."
            )
        store, known = store_of(engine), stored_text(engine, owner, ids).tokens
        stopped, start = False, time.monotonic()
        if known < len(ids):
            engine.start()
            with interruptible() as interrupted, reading(len(ids), known=known, silent=json) as advance:
                try:
                    read_ahead(engine, owner, ids, known, advance, interrupted)
                finally:
                    engine.stop()
                stopped = interrupted()
        seconds, found = time.monotonic() - start, stored_text(engine, owner, ids)
    if found.tokens < len(ids):
        sentence = f"{found.tokens:,} of {len(ids):,} tokens are stored"
        if stopped:
            raise Stopped(f"Interrupted; {sentence}, and the same command reads the rest.")
        raise KvkeepError(
            f"Only the first {sentence}: the quota of {size(service.quota)} has no space for more; raise --quota."
        )
    missing = 0 if export is None else archive.export_text(store, found.blocks, export)
    if json:
        facts = {"tokens": len(ids), "read": len(ids) - known, "seconds": seconds, "blocks": len(found.blocks)}
        print_json(facts | {"bytes": found.bytes, "folder": str(store.folder), "missing": missing})
        return
    read = len(ids) - known
    how = f"{read:,} were read at {read / seconds:.0f}/s" if read else "nothing had to be read"
    note(f"{len(ids):,} tokens are stored in {len(found.blocks)} blocks, {size(found.bytes)}, in {store.folder}; {how}")
    if export is not None:
        lacks = f" without {missing} blocks that cannot be read" if missing else ""
        note(f"written to {export}{lacks}; 'kvkeep cache import {export}' adds them to another store")
