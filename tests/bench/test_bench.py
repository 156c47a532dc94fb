"""Tests of lp-bench: reports match the runs; a critical path of n replicas takes n replicas' steps."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from support.serving import demo_model_that_chats
from support.thinned import thinned

from lp_runtime import ConfigError, LookaheadConfig, LookaheadRuntime, SamplingConfig
from lp_runtime.bench.critical_path import CriticalPath, CriticalPathRunner
from lp_runtime.bench.methods import HuggingFace
from lp_runtime.bench.prompts import encode_prompts, read_sources
from lp_runtime.bench.report import commit
from lp_runtime.bench.rows import quartiles
from lp_runtime.calibration.calibration import Calibration
from lp_runtime.config.commands import BenchConfig
from lp_runtime.config.settings import DEMO_MODEL, ModelConfig
from lp_runtime.distributed.transport.group import Group
from lp_runtime.engine.engine import Engine
from lp_runtime.entrypoints.cli import bench_main
from lp_runtime.model.loading.loader import load_model
from lp_runtime.model.runner import ModelRunner
from lp_runtime.request.output import Report
from lp_runtime.request.request import Request

CPU = torch.device("cpu")
FIXED = ["lookahead.W=5", "lookahead.N=4", "lookahead.G=5", "lookahead.prior=none", "cache_dir=null"]


def test_report_contains_all_methods(tmp_path, capsys, one_layer_demo_dir):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"text": "def add(a, b):"}\n{"text": "import os"}\n{"text": "never read"}\n')
    out = tmp_path / "out"
    bench_main(
        [
            f"model.path={one_layer_demo_dir}",
            f"prompts={prompts}:text",
            "limit=2",
            "rounds=2",
            "max_new_tokens=8",
            "degrees=[1,2]",
            "exchange_us=[0,1e6]",
            f"output={out}",
            *FIXED,
        ]  # fmt: skip
    )
    actual = json.loads((out / "bench.json").read_text(), parse_constant=pytest.fail)
    rows = {(row["method"], row["exchange_us"]): row for row in actual["rows"]}
    assert actual["head"]["prompts"] == 2
    assert {"device", "torch", "commit", "date"} <= actual["head"].keys()
    assert [name for name, _ in rows] == [
        "hf", "hf_prompt_lookup", "plain", "paper", "default", *["critical path, 1"] * 2, *["critical path, 2"] * 2
    ]  # fmt: skip
    assert all(row["outputs_that_differ"] == 0 for row in rows.values())
    assert rows["hf", None]["S"] == rows["plain", None]["S"] == 1
    assert rows["hf", None]["over_hf"] == 1
    assert rows["default", None]["S"] == rows["critical path, 1", 0]["S"] > 1
    assert rows["default", None]["tokens_a_step"] == pytest.approx(rows["critical path, 1", 0]["tokens_a_step"])
    assert rows["critical path, 2", 0]["tokens_a_step"] < rows["critical path, 1", 0]["tokens_a_step"]
    # An exchange of one second in every step makes every step one second longer.
    free, dear = rows["critical path, 2", 0], rows["critical path, 2", 1e6]
    assert dear["step_ms"] - free["step_ms"] == pytest.approx(1000)
    for (name, _), row in rows.items():
        assert (row["other_us"] is None) == name.startswith("hf")
        assert row["other_us"] is None or 0 < row["other_us"] < 1000 * row["step_ms"]
        assert row["lower_quartile"] <= row["tokens_per_second"] <= row["upper_quartile"]
    printed = capsys.readouterr().out
    assert printed.count("\n| ") == 2 + len(rows)
    assert printed.strip() == (out / "bench.md").read_text().strip()


@pytest.mark.slow
def test_conversations_are_decoded_to_their_end_and_reported_by_task(tmp_path, capsys):
    """Turns use the chat template, and all methods stop where transformers stops.

    The report has tables by task and separate figures for prefill and decode.
    """
    folder = demo_model_that_chats(tmp_path / "chat")
    prompts = tmp_path / "prompts.jsonl"
    records = [
        {"turns": ["Write a loop.", "And a test."], "category": "coding"},
        {"turns": ["def f():"], "category": "qa"},
        {"turns": ["one too many"], "category": "qa"},
    ]
    prompts.write_text("".join(json.dumps(record) + "\n" for record in records))
    config = json.loads((folder / "generation_config.json").read_text())
    with LookaheadRuntime(folder, device="cpu") as runtime:
        messages = [{"role": "user", "content": "def f():"}]
        tokens = runtime.generate(messages=messages, max_new_tokens=12, eos=False).token_ids
    end = next(place for place in range(3, 12) if tokens[place] not in tokens[:place])  # becomes the EOS token
    (folder / "generation_config.json").write_text(json.dumps(config | {"eos_token_id": tokens[end]}))
    out = tmp_path / "out"
    settings = ["each=1", "max_new_tokens=12", "methods=[hf,hf_prompt_lookup,plain,default]", "degrees=[1]"]
    bench_main(
        [
            f"model.path={folder}",
            f"prompts={prompts}:turns",
            "chat=true",
            "turns=all",
            "exchange_us=[0]",
            f"output={out}",
            *settings,
            *FIXED,
        ]  # fmt: skip
    )
    actual = json.loads((out / "bench.json").read_text(), parse_constant=pytest.fail)
    assert actual["head"]["prompts"] == 3 and actual["head"]["end of text"] == "respected"
    assert list(actual["tasks"]) == ["multi-turn", "qa"]
    for row in actual["tasks"]["qa"]:
        assert (row["num_tokens"], row["outputs_that_differ"]) == (end + 1, 0)
    for row in actual["rows"]:
        assert row["outputs_that_differ"] == 0
        assert row["num_tokens"] == sum(
            each["num_tokens"] for rows in actual["tasks"].values() for each in rows if each["method"] == row["method"]
        )
        assert row["prefill_ms"] > 0 and row["decode_tokens_per_second"] > 0
    assert actual["rows"][0]["decode_over_hf"] == 1
    printed = capsys.readouterr().out
    assert "| multi-turn | transformers, greedy | 1.00 |" in printed and "| qa | lp_runtime, default |" in printed


@pytest.mark.parametrize(
    ("lookahead", "num_replicas"),
    thinned(
        6,
        [
            LookaheadConfig(W=4, N=3, G=4, drafter="paper"),
            LookaheadConfig(W=6, N=4, G=6, prior="none"),
            LookaheadConfig(),
        ],
        [3, 1],
    ),
)
def test_critical_path_matches_the_engine(lookahead, num_replicas, one_layer_demo_dir):
    model = ModelRunner(load_model(ModelConfig(path=str(one_layer_demo_dir)), CPU, "float32"), 2048)
    calibration = Calibration(model, Group.alone(), None)
    request = Request((5, 6, 7, 5, 6), lookahead, 16)
    *_, report = Engine(model, Group.alone(), calibration).run(request)
    assert isinstance(report, Report)
    plain = Request(request.prompt_ids, LookaheadConfig(W=0, N=2, G=0, drafter="paper"), 16)
    *outputs, _ = Engine(model, Group.alone()).run(plain)
    path = CriticalPathRunner(model, calibration, num_replicas).run(request)
    assert path.token_ids == [token for output in outputs for token in output.token_ids]
    if not lookahead.is_auto:
        assert path.num_steps == report.num_steps  # the tree does not depend on how it is partitioned
        assert (path.step_tokens < report.step_tokens) == (num_replicas > 1)


REASONS = (
    '{% for m in messages %}{{ m.role }}: {{ m.content + "\\n" }}{% endfor %}'
    "{% if add_generation_prompt %}assistant: <think>{% endif %}{# </think> #}"
)


def test_prompt_of_a_later_turn_has_no_reasoning_of_the_earlier_ones(tmp_path, one_layer_demo_dir):
    folder = shutil.copytree(one_layer_demo_dir, tmp_path / "model")
    (folder / "chat_template.jinja").write_text(REASONS)
    (tmp_path / "prompts.jsonl").write_text('{"turns": ["One", "Two"]}\n')
    config = BenchConfig(prompts=f"{tmp_path}/prompts.jsonl:turns", chat=True, turns="all", max_new_tokens=12)
    with LookaheadRuntime(folder, device="cpu", lookahead=LookaheadConfig(W=5, N=4, G=5, prior="none")) as runtime:
        prompts = [runtime.tokenizer.decode(prompt.token_ids) for prompt in encode_prompts(runtime, config)]
        message = runtime.generate(messages=[{"role": "user", "content": "One"}], max_new_tokens=12).message
    assert message["content"] == "" and message["reasoning_content"]
    assert prompts == ["user: One\nassistant: <think>", "user: One\nassistant: \nuser: Two\nassistant: <think>"]


def test_critical_path_seconds_add_up():
    path = CriticalPath([1] * 10, 4, 3.0, prefill_seconds=0.5, forward_seconds=2.0, other_seconds=0.25)
    assert path.seconds(0) == 2.75
    assert path.seconds(0.5) == 4.75


def test_quartiles_return_lower_median_and_upper():
    assert quartiles([3.0]) == (3.0, 3.0, 3.0)
    assert quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == (2.0, 3.0, 4.0)


def test_commit_matches_the_checkout():
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    head = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    if not head:
        pytest.skip("no git checkout")
    assert head.startswith(commit().removesuffix("-dirty"))


def test_files_of_prompts_may_lie_below_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("one", "two"):
        (tmp_path / name).write_text(json.dumps({"text": name}))
    prompts = read_sources(BenchConfig(prompts="~/one:text,~/two:text"))
    assert [(prompt.value, prompt.category) for prompt in prompts] == [("one", "one"), ("two", "two")]


def test_too_long_prompt_is_refused(tmp_path, capsys, one_layer_demo_dir):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"text": "import os"}\n' + json.dumps({"text": "x = 1\n" * 3000}) + "\n")
    with pytest.raises(SystemExit) as exit_status:
        bench_main([f"model.path={one_layer_demo_dir}", f"prompts={prompts}:text", *FIXED])
    assert exit_status.value.code == 2
    assert f"error: {prompts} line 2: the prompt is too long" in capsys.readouterr().err


@pytest.mark.slow
def test_model_that_samples_by_default_is_compared_greedily(tmp_path, capsys, demo_model_dir):
    shutil.copytree(demo_model_dir, tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.9}')
    bench_main(
        [
            f"model.path={tmp_path / 'model'}",
            "limit=1",
            "max_new_tokens=8",
            "methods=[hf,plain]",
            "degrees=[1]",
            f"output={tmp_path}",
            *FIXED,
        ]  # fmt: skip
    )
    rows = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert [row["outputs_that_differ"] for row in rows] == [0] * 5


@pytest.mark.slow
def test_failing_baseline_is_left_out(tmp_path, capsys, caplog, monkeypatch):
    decode = HuggingFace.decode

    def fails(self, prompt, **options):
        if "cache_implementation" in options and self._num_passes:
            raise RuntimeError("no compiler")
        return decode(self, prompt, **options)

    monkeypatch.setattr(HuggingFace, "decode", fails)
    settings = ["limit=2", "max_new_tokens=4", f"output={tmp_path}", *FIXED]
    bench_main(["methods=[hf,hf_compiled,plain]", *settings])
    rows = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert [row["method"] for row in rows] == ["hf", "plain"]
    assert "hf_compiled cannot run here, so it is left out: no compiler" in caplog.text
    with pytest.raises(SystemExit) as exit_status:
        bench_main(["methods=[hf_compiled]", *settings])
    assert exit_status.value.code == 1 and "no compiler" in capsys.readouterr().err


def test_methods_that_a_recurrent_model_cannot_run_are_left_out(tmp_path, capsys, caplog, make_model_dir):
    folder = make_model_dir("Mamba2", vocab_size=4096, state_size=8, num_heads=4, head_dim=16, n_groups=1)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / name, folder)
    settings = [f"model.path={folder}", "limit=1", "rounds=1", "max_new_tokens=6", f"output={tmp_path}", *FIXED]
    bench_main(settings)
    rows = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert [(row["method"], row["outputs_that_differ"]) for row in rows] == [("hf", 0), ("plain", 0), ("default", 0)]
    left_out = [line for line in caplog.messages if "cannot run here, so it is left out" in line]
    assert [line.partition(" ")[0] for line in left_out] == ["hf_prompt_lookup", "paper"]
    with pytest.raises(SystemExit):
        bench_main([*settings, "methods=[paper,plain]"])
    assert "lookahead.drafter=paper: must be" in capsys.readouterr().err


@pytest.mark.slow
def test_stop_strings_of_a_model_are_ignored_by_all_methods(tmp_path, capsys, one_layer_demo_dir):
    folder = shutil.copytree(one_layer_demo_dir, tmp_path / "model")
    config = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(config | {"stop_strings": ["e", " ", "\n"]}))
    methods = ["methods=[hf,plain,default]", "degrees=[1]", "exchange_us=[0]"]
    bench_main([f"model.path={folder}", "limit=1", "max_new_tokens=24", *methods, f"output={tmp_path}", *FIXED])
    rows = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert [(row["num_tokens"], row["outputs_that_differ"]) for row in rows] == [(24, 0)] * 4


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("prompts=nowhere.jsonl:text", "prompts=nowhere.jsonl: cannot be read"),
        ("prompts=file.jsonl", "prompts=file.jsonl: must be FILE:FIELD"),
        ("methods=[fastest]", "methods=fastest: must be one of hf, hf_compiled"),
        ("degree=[1]", "did you mean degrees?"),
        ("model.packing=maybe", "model.packing=maybe: must be one of auto, off"),
    ],
)
def test_invalid_bench_settings_are_refused_in_one_line(override, message, capsys):
    with pytest.raises(SystemExit) as exit_status:
        bench_main([override])
    assert exit_status.value.code == 2
    line = capsys.readouterr().err.strip()
    assert message in line
    assert "\n" not in line


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"degrees": [2, 0]}, "degrees=0: must be an integer >= 1"),
        ({"exchange_us": []}, "exchange_us=[]: must have"),
        ({"exchange_us": [-1.0]}, "exchange_us=-1"),
        ({"rounds": 0}, "rounds=0: must be"),
        ({"threads": 0}, "threads=0: must be"),
        ({"threads": 100_000}, "threads=100000: must be at most 1024"),
        ({"sampling": SamplingConfig(temperature=0.5)}, "sampling.temperature=0.5: lp-bench compares greedy"),
        ({"sampling": SamplingConfig(repetition_penalty=1.2)}, "sampling.repetition_penalty=1.2: lp-bench compares"),
        ({"chat": True}, "chat=true: only with prompts or url"),
        ({"each": 0}, "each=0: must be an integer >= 1"),
        ({"turns": "all"}, "turns=all: only with chat=true"),
        ({"prefix_cache_bytes": 1 << 30}, "prefix_cache_bytes=1073741824: must be 0, because prompts are decoded sev"),
        ({"prefix_cache_bytes": None}, "prefix_cache_bytes=None: must be 0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_bench_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ConfigError) as caught:
        BenchConfig(**settings)
    assert str(caught.value).startswith(message)
