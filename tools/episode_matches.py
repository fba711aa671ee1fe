"""Print how often LoCoMo's questions are matched to the episode of ``epicache`` in which their evidence lies, and how
often a match by chance would be: with as many questions and segments of each episode.

    python tools/episode_matches.py DATA
"""

from __future__ import annotations

from argparse import ArgumentParser
from bisect import bisect
from itertools import accumulate
from pathlib import Path

import torch
from kvkeep_lab.experiment import load_experiment
from kvkeep_lab.published.epicache import EpiCache, clusters
from kvkeep_lab.tasks.locomo import Locomo, _read, _turns

from kvkeep.models.loading import load


@torch.no_grad()
def main(data: Path) -> None:
    """Print a line for each of the experiment's conversations."""
    experiment = load_experiment("locomo")
    loaded = load(experiment.models[0], weights=experiment.weights)
    embed, selector = loaded.model.get_input_embeddings(), EpiCache()
    for number in experiment.task.conversation:
        task = Locomo(conversation=[number])
        conversation, questions = _read(task.sources(data)[0], number)
        task = task.model_copy(update={"samples": len(questions)})
        samples = task.prepare(loaded.tokenizer, task.sources(data), {"conversation": number}, 0)
        ids = torch.tensor(samples[0].facts["text"].ids)
        segments = ids[len(ids) % selector.segment :].view(-1, selector.segment).tolist()
        texts = [loaded.tokenizer.decode(segment) for segment in segments]
        starts, text = [0, *accumulate(map(len, texts))][:-1], "".join(texts)
        places = {turn["dia_id"]: text.find(turn["text"]) for turn in _turns(conversation)}
        points, _ = selector._points(ids, None, embed)
        labels, centres = clusters(points, selector.episodes)
        chosen, pairs = [0] * len(centres), []
        for sample, asked in zip(samples, questions, strict=True):
            mean = embed(torch.tensor(sample.ids)).float().mean(0)
            episode = int((centres @ mean).argmax())
            chosen[episode] += 1
            found = (places[name] for name in asked["evidence"] if places.get(name, -1) >= 0)
            pairs += [(episode, int(labels[bisect(starts, place) - 1])) for place in found]
        sizes = labels.bincount(minlength=len(centres)).tolist()
        hits = sum(one == other for one, other in pairs) / len(pairs)
        chance = sum(size * count for size, count in zip(sizes, chosen, strict=True)) / len(labels) / len(samples)
        print(
            f"conversation {number}: segments {sizes}, questions {chosen}; evidence in the matched episode "
            f"{100 * hits:.0f} % of {len(pairs)}, by chance {100 * chance:.0f} %"
        )


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path, help="the folder with locomo/locomo_first6.json")
    main(parser.parse_args().data)
