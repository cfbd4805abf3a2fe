"""Prompts through a made checkpoint: the same answers under every policy, as text, and how many are right."""

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from checkpoints import write_checkpoint  # noqa: E402

from executor.cli import main  # noqa: E402
from workloads.text import Tokenizer  # noqa: E402

EOS = [1, *range(60, 120)]


def test_answers_are_text_and_equally_right_under_every_policy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_checkpoint(tmp_path / "ouro-made", eos=EOS)
    lines = [
        {"prompt": "Ann has 3 apples and buys 12 more. How many?", "answer": "#### 15"},
        {"prompt": [5, 6, 7, 8] * 6, "max_tokens": 3, "answer": "12"},
        {"prompt": "Schöne Grüße"},
    ]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    base = f"""
base:
  model: {folder}
  scheduler: {{max_num_seqs: 3, max_num_batched_tokens: 64, prefill_chunk_size: 16}}
  sampling: {{temperature: 1.0}}
  workload: {{kind: prompts, path: p.jsonl, max_tokens: 8}}
grid: {{policy.name: [wcpb, split]}}
"""
    (tmp_path / "grid.yaml").write_text(base)
    out = tmp_path / "out"
    arguments = ["sweep", str(tmp_path / "grid.yaml"), "--device", "cpu", "--no-plots", "--out", str(out)]
    assert main(arguments) == 0
    assert "last number equal" in capsys.readouterr().out
    cells = sorted(out.glob("cells/*"))
    found = [(cell / "outputs.jsonl").read_text() for cell in cells]
    assert len(cells) == 2 and found[0] == found[1]
    tokenizer, answers = Tokenizer(folder), [json.loads(line) for line in found[0].splitlines()]
    for request_id, answer in enumerate(answers):
        ids = answer["token_ids"]
        most = 3 if request_id == 1 else 8
        assert not {*EOS} & {*ids[:-1]} and (len(ids) == most or ids[-1] in EOS)
        assert answer["text"] == tokenizer.decode(ids)
    assert [answer.get("answer") for answer in answers] == ["#### 15", "12", None]
    summaries = [json.loads((cell / "summary.json").read_text()) for cell in cells]
    assert [item["accuracy"]["num_answers"] for item in summaries] == [2, 2]
    assert summaries[0]["accuracy"] == summaries[1]["accuracy"]
    assert (
        sum(answer.get("is_correct", False) for answer in answers) == summaries[0]["accuracy"]["num_correct"]
    )
