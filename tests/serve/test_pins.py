"""``--pin system``: a server counts the tokens of each conversation's instructions, and pins them."""

from __future__ import annotations

from typing import Any

import httpx
from answering import small
from running import BODY, post, serving

from kvkeep.serve.engine import Engine


def test_a_server_pins_the_system_prompt_of_each_session() -> None:
    """Another system prompt in a session has other pins; an exact method needs none."""
    engine = Engine(small(), 10**8, method="window", budget=24)
    with serving(engine=engine, pin="system") as (url, _):

        def ask(session: str, system: str, **own: Any) -> httpx.Response:
            messages = [{"role": "system", "content": system}, {"role": "user", "content": "it was for " * 9}]
            body = BODY | {"messages": messages, "kvkeep": {"session": session, **own}}
            return post(url, body)

        def pinned() -> int:
            return engine.call(lambda: next(iter(engine.sessions.memory.values())).cache.method.pin).result(10)

        for system, count in (("the of and to in", 7), ("the of and to in", 7), ("the of", 4)):
            assert ask("one", system).status_code == 200
            assert pinned() == count
        assert ask("one", "the of", method="window", budget=24).status_code == 200  # names its cache, not its pins
        refused = ask("two", "the of and to in " * 9)
        assert refused.status_code == 400 and "pinned tokens leave no room" in refused.json()["error"]["message"]
        assert ask("three", "the of and to in " * 9, method="kv-direct", budget=24).status_code == 200
