"""Prompts from a file, in both worlds: text or token ids in, text and an accuracy out."""

import json
from pathlib import Path
from typing import Any

import pytest

from policies.config.runconfig import load_config
from policies.core.errors import InputError
from sim.cli import main as sim_main
from workloads.prompts import is_correct, last_number, read_prompts
from workloads.spec import PromptsSpec
from workloads.text import ChatTemplate, StopStrings, TextStream


def write(folder: Path, *lines: Any) -> Path:
    path = folder / "p.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ({"prompt": "text"}, "line 2: prompt: is a text and there is no tokenizer.json"),
        ({"prompt": []}, "line 2: prompt: \\[\\], expected at least one token"),
        ({"prompt": [-1]}, "line 2: prompt: \\[-1\\], expected a text or a list of token ids"),
        ({"prompt": [True]}, "line 2: prompt"),
        ({}, "line 2: prompt: None"),
        ({"prompt": [1], "max_tokens": 0}, "line 2: max_tokens: 0, expected a whole number from 1"),
        ({"prompt": [1], "answer": [5]}, "line 2: answer: \\[5\\], expected a text or a number"),
        ({"prompt": [1], "promt": 5}, "line 2: unknown key 'promt'.*did you mean 'prompt'"),
        ([1], "line 2: \\[1\\], expected a JSON object"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: Any, sentence: str) -> None:
    path = write(tmp_path, {"prompt": [1, 2]}, line)
    with pytest.raises(InputError, match=sentence):
        read_prompts(PromptsSpec(path=str(path)), 0, tmp_path)


@pytest.mark.parametrize(
    ("text", "answer", "is_right"),
    [
        ("3 + 12 = 15", "#### 15", True),
        ("so 1,015.0 in all.", "1015", True),
        ("first 15, then 16", "15", False),
        ("none", "15", False),
        ("-4", "4", False),
        ("yes", " yes ", True),
    ],
)
def test_an_answer_is_right_when_its_last_number_is(text: str, answer: str, is_right: bool) -> None:
    assert is_correct(text, answer) == is_right
    assert last_number("9" * 2000) is not None


def test_a_simulation_takes_their_lengths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, {"prompt": [5] * 40, "max_tokens": 4}, {"prompt": [1], "priority": 3})
    (tmp_path / "run.yaml").write_text(
        "model: ouro-tiny\nworkload: {kind: prompts, path: p.jsonl, max_tokens: 6}"
    )
    assert sim_main(["run", str(tmp_path / "run.yaml"), "--no-plots", "--out", str(tmp_path / "run")]) == 0
    assert "samples no token" in capsys.readouterr().err
    lines = (tmp_path / "run" / "requests.csv").read_text().splitlines()[1:]
    assert [line.split(",")[2:4] for line in lines] == [["40", "4"], ["1", "6"]]


def test_an_early_exit_that_a_model_was_made_for_is_not_passed_over(tmp_path: Path) -> None:
    config = {
        "model_type": "ouro", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 176,
        "num_hidden_layers": 2, "num_attention_heads": 4, "total_ut_steps": 4, "eos_token_id": [2, 3],
        "max_position_embeddings": 4096, "rope_theta": 1e6, "rms_norm_eps": 1e-6, "early_exit_threshold": 0.7,
        "bos_token_id": 1,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    path = tmp_path / "run.yaml"
    text = f"model: {tmp_path}\nworkload: {{kind: preset, name: chat}}\n"
    path.write_text(text)
    with pytest.raises(
        InputError, match=r"early_exit_threshold 0.7; expected exit: {mode: gate, threshold: 0.7}"
    ):
        load_config(path)
    path.write_text(text + "exit: {mode: fixed}\n")
    assert load_config(path).exit.mode == "fixed"


class Letters:
    """Decodes bytes: a letter may take several tokens."""

    def decode(self, ids: Any) -> str:
        return bytes(ids).decode("utf-8", "replace")


def test_text_is_told_when_it_is_whole_and_adds_up() -> None:
    text = "Grüße, 你好 🙂!"
    stream = TextStream(Letters())
    pieces = [stream.push(byte) for byte in text.encode()]
    assert "".join(pieces) + stream.rest() == text and all(
        "\N{REPLACEMENT CHARACTER}" not in item for item in pieces
    )
    cut = TextStream(Letters())
    for byte in "a🙂".encode()[:3]:
        cut.push(byte)
    assert cut.rest().startswith("\N{REPLACEMENT CHARACTER}")


@pytest.mark.parametrize("size", [1, 2, 3, 50])
def test_a_stop_string_is_cut_however_the_text_comes(size: int) -> None:
    text = "one END two STOP three"
    stops = StopStrings(["STOP", "ENDING", "nowhere"])
    told = "".join(stops.push(text[at : at + size]) for at in range(0, len(text), size))
    assert told + stops.rest() == "one END two " and stops.is_stopped
    other = StopStrings(["ENDING"])
    told = "".join(other.push(text[at : at + size]) for at in range(0, len(text), size))
    assert told + other.rest() == text and not other.is_stopped


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception('no') }}",
        "{{ 'a' * 10**9 }}",
        "{{ range(10**9) | list }}",
        "{% for i in range(10**5) %}{{ messages[0].content }}{% endfor %}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ messages[0]['content'] % 5 }}",
        "{{ 1 // 0 }}",
        "{{ self.x.y }}",
    ],
)
def test_a_template_reaches_nothing_but_its_messages(source: str) -> None:
    template = ChatTemplate(source, {}, "here")
    try:
        found = template.render([{"role": "user", "content": "hello"}])
    except InputError as error:
        assert str(error).startswith("messages: the chat template refuses them") and len(str(error)) < 400
    else:
        assert found == "" or ("built-in" not in found and "class" not in found)
