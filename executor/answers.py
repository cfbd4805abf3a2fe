"""Answers of a run with prompts, as text: `outputs.jsonl`, and how many are right."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from results.files import drafted
from workloads.prompts import Prompts, is_correct

ANSWERS = "outputs.jsonl"


class Answers:
    """`tokens` are the output token ids by request id; a request without any was not answered."""

    def __init__(self, prompts: Prompts, tokens: Mapping[int, Sequence[int]]) -> None:
        self._prompts, self._tokens = prompts, tokens
        tokenizer = prompts.tokenizer
        self._texts = {} if tokenizer is None else {key: tokenizer.decode(ids) for key, ids in tokens.items()}
        self._is_correct = {
            key: is_correct(self._texts[key], answer)
            for key, answer in prompts.answers.items()
            if key in self._texts
        }

    def as_summary(self) -> dict[str, Any]:
        """`accuracy` of a run that has answers to compare with; what was not answered is not right."""
        num_answers = len(self._prompts.answers) if self._prompts.tokenizer is not None else 0
        if not num_answers:
            return {}
        return {"accuracy": {"num_answers": num_answers, "num_correct": sum(self._is_correct.values())}}

    def write(self, path: Path) -> None:
        """A JSON line for each answered request, in order of its id."""
        with drafted(path) as draft, open(draft, "w", encoding="utf-8") as file:
            for line in self._lines():
                file.write(json.dumps(line, ensure_ascii=False) + "\n")

    def _lines(self) -> Iterator[dict[str, Any]]:
        for key in sorted(self._tokens):
            line: dict[str, Any] = {"request_id": key, "token_ids": list(self._tokens[key])}
            if key in self._texts:
                line["text"] = self._texts[key]
            if key in self._prompts.answers:
                line["answer"] = self._prompts.answers[key]
            if key in self._is_correct:
                line["is_correct"] = self._is_correct[key]
            yield line
