"""Makes any model with any method of kvkeep available to lm-evaluation-harness, as the model ``kvkeep``. ``python -m``
of this module runs ``lm_eval`` with it, for versions without entry points (up to 0.4.13)."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch

from kvkeep.errors import KvkeepError, UsageError
from kvkeep.geometry import ModelGeometry
from kvkeep.models.loading import load
from kvkeep_lab.reading import takes
from kvkeep_lab.subject import AnswerCost, Subject

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, simple_parse_args_string
    from tqdm import tqdm
except ImportError as error:
    raise UsageError("lm-evaluation-harness is missing (pip install './lab[harness]' in a clone of kvkeep).") from error

Request = tuple[Any, list[int], list[int]]
"""The texts (if given), and the tokens of a context and of its continuation."""


@register_model("kvkeep")
class KeepLM(TemplateLM):
    """A subject of the lab with the harness's interface for models.

    The method reads a context within its budget, once for all consecutive requests with this context. Continuations are
    scored token by token, as in decoding (:meth:`kvkeep_lab.subject.Subject.weigh`). Texts that exceed the model's
    positions are truncated at the start, as with the harness's model ``hf``.

    subject: the model, method and budget. max_length: maximum tokens of a context and its continuation; by default the
    model's positions. costs: the cost of each reading, in order.
    """

    backend = "causal"

    def __init__(self, subject: Subject, max_length: int | None = None) -> None:
        super().__init__()
        self.subject, self.tokenizer = subject, subject.tokenizer
        positions = ModelGeometry.from_config(subject.loaded.model.config).max_positions
        self._longest = max_length or positions or 2048
        self._device = subject.loaded.model.device
        self.costs: list[AnswerCost] = []

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> KeepLM:
        """Return the model for arguments such as ``--model_args pretrained=smollm2,method=snapkv,budget=25%``; see
        :meth:`create_from_arg_obj`."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @classmethod
    def create_from_arg_obj(cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None) -> KeepLM:
        """Return the model for these arguments.

        pretrained: name of a model as in :func:`kvkeep.load`. method, budget, chunk: options of the cache ("full" by
        default). weights: "float32" by default. device: as in :func:`kvkeep.load`. max_length: as in the class. The
        harness's batch size is ignored, because the continuations of one context are a batch. Raises UsageError for
        other arguments, and the errors of loading a model.
        """
        device = (additional_config or {}).get("device")
        if not torch.cuda.is_available() and str(device).startswith("cuda"):
            device = None  # the harness's default, not the user's
        given = {"device": device, **arg_dict}
        known = {"pretrained", "method", "budget", "chunk", "weights", "device", "max_length"}
        if unknown := sorted(set(given) - known):
            raise UsageError(f"The model 'kvkeep' takes no '{unknown[0]}'; it takes {', '.join(sorted(known))}.")
        method, budget = str(given.get("method", "full")), given.get("budget")
        if "budget" not in takes(method) and budget is not None:
            raise UsageError(f"Method '{method}' takes no budget; leave it out, or take another method.")
        weights = str(given.get("weights", "float32"))
        loaded = load(given.get("pretrained"), weights=weights, device=given["device"], progress=print)
        subject = Subject(loaded, method, None if budget is None else str(budget), given.get("chunk"))
        return cls(subject, given.get("max_length"))

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context: the beginning-of-text token, or else the end-of-text token."""
        first = self.tokenizer.bos_token_id
        return self.eot_token_id if first is None else int(first)

    @property
    def max_length(self) -> int:
        """Maximum tokens of a context and its continuation."""
        return self._longest

    @property
    def tokenizer_name(self) -> str:
        """A name for the harness's caches of requests."""
        return self.subject.loaded.name.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return tokens. The tokenizer adds special tokens by default, unless ``string`` begins with the first one."""
        options = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        first = self.tokenizer.bos_token
        if add_special_tokens is None and first and string.startswith(first):
            options = {"add_special_tokens": False}
        return list(self.tokenizer(string, verbose=False, **options).input_ids)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return the conversation in the format of the model's template."""
        given = {"add_generation_prompt": add_generation_prompt, "continue_final_message": not add_generation_prompt}
        return str(self.tokenizer.apply_chat_template(chat_history, tokenize=False, **given))

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        found = []
        with tqdm(total=len(requests), disable=disable_tqdm, desc="Running loglikelihood requests") as bar:
            for context, group in self._by_context(requests):
                likely, cost = self.subject.weigh(context, [tokens for _, _, tokens in group])
                self.costs.append(cost)
                for (texts, _, _), one in zip(group, likely, strict=True):
                    found.append((sum(one.logs), one.greedy))
                    if texts is not None:
                        self.cache_hook.add_partial("loglikelihood", texts, found[-1])
                bar.update(len(group))
        return found

    def _by_context(self, requests: Sequence[Request]) -> Iterator[tuple[list[int], list[Request]]]:
        """Yield contexts, truncated to the positions of the model, and their requests."""

        def context(request: Request) -> list[int]:
            _, before, tokens = request
            if not before or not tokens:
                raise UsageError(
                    "Every context and continuation needs at least one token, and the task has an empty one; "
                    "mend the task."
                )
            longest = self.max_length + 1 - len(tokens)  # the last token is only predicted
            if longest < 1:
                raise UsageError(
                    f"The text to score has {len(tokens)} tokens, but the model's context has {self.max_length}; "
                    "shorten the text."
                )
            return before[-longest:]

        yield from ((before, list(group)) for before, group in groupby(requests, context))

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return ln p of complete texts, in windows of the model's positions; each token counts once."""
        found = []
        for (text,) in tqdm([request.args for request in requests], disable=disable_tqdm):
            windows = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, 1)
            likely = self._loglikelihood_tokens([(None, *make_disjoint_window(one)) for one in windows], True)
            found.append(sum(log for log, _ in likely))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), found[-1])
        return found

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return greedy answers up to the first stop string."""
        found = []
        for text, wanted in tqdm([request.args for request in requests], disable=disable_tqdm):
            given = normalize_gen_kwargs(wanted, self.max_gen_toks)
            if given.get("do_sample"):
                raise UsageError("Model 'kvkeep' answers greedily only; give --gen_kwargs do_sample=False.")
            until = handle_stop_sequences(list(given["until"]), self.tokenizer.decode([self.eot_token_id]))
            new = int(given["max_gen_toks"])
            if (longest := self.max_length - new) < 1:
                raise UsageError(
                    f"The model's context has {self.max_length} tokens, too few for an answer of {new}; give a "
                    "smaller max_gen_toks."
                )
            ends = [end for end in until if end]
            answer = self.subject.write(self.tok_encode(text)[-longest:], new, partial(_ended, ends))
            self.costs.append(answer.cost)
            found.append(postprocess_generated_text(answer.text, until, None))
            self.cache_hook.add_partial("generate_until", (text, wanted), found[-1])
        return found

    @property
    def max_gen_toks(self) -> int:
        """Default tokens of an answer."""
        return 256


def _ended(ends: Sequence[str], text: str) -> bool:
    return any(end in text for end in ends)


def main() -> None:
    """Run ``lm_eval`` with the registered model ``kvkeep``."""
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except KvkeepError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
