"""Flags and the file that may hold them."""

import json
from pathlib import Path

import pytest

from serving import cli
from serving.chat import REASONING_PARSERS, TOOL_PARSERS


def config(folder: Path, text: str) -> list[str]:
    file = folder / "server.toml"
    file.write_text(text)
    return ["--config", str(file)]


def test_a_file_sets_flags_and_the_command_line_wins(tmp_path):
    flags = config(
        tmp_path,
        'model = "demo"\nmax-seqs = 64\nmax_queue = 7\ndrain-seconds = 1.5\nprefix-cache = false\ndp_encoder = true\n'
        'tool-parser = "glm"\n[mm-process-config.image]\nmin_image_tokens = 16\n',
    )
    args = cli.arguments([*flags, "--max-seqs", "3", "--prefix-cache"])
    assert (args.model, args.max_seqs, args.max_queue, args.drain_seconds) == ("demo", 3, 7, 1.5)
    assert (args.prefix_cache, args.dp_encoder, args.tool_parser) == (True, True, "glm")
    assert json.loads(args.mm_process_config) == {"image": {"min_image_tokens": 16}}
    assert cli.encoder_config(args).min_image_tokens == 16


def test_what_a_file_leaves_out_has_its_default(tmp_path):
    plain = vars(cli.arguments(["--model", "demo"]))
    assert vars(cli.arguments(config(tmp_path, 'model = "demo"'))) | {"config": None} == plain


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("max-seq = 3", "'max-seq' is not a setting; the nearest one is 'max-seqs'"),
        ("[devices]\ntp = 2", "'devices' is not a setting"),
        ('config = "other.toml"', "'config' is not a setting"),
        ("h = true", "'h' is not a setting"),
        ("prefix-cache = 1", "prefix-cache is 1; it must be true or false"),
        ("max-seqs = [1]", "max-seqs is [1]; it must be a text or a number"),
        ("max-seqs = true", "max-seqs is True; it must be a text or a number"),
        ("[max-seqs]\na = 1", "max-seqs is {'a': 1}; it must be a text or a number"),
        ("max-seqs 3", "not readable as TOML"),
        ("max-seqs = 3", "no --model is given"),
    ],
)
def test_a_file_that_cannot_be_meant_says_what_to_change(tmp_path, text: str, says: str):
    with pytest.raises(cli.UsageError) as caught:
        cli.arguments(config(tmp_path, text))
    assert says in str(caught.value)


def test_a_value_that_does_not_fit_its_flag_is_told_by_the_flag(tmp_path, capsys):
    with pytest.raises(SystemExit):
        cli.arguments(config(tmp_path, 'model = "demo"\nmax-seqs = "many"'))
    assert "--max-seqs: invalid int value: 'many'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "value"), [("--port", "65536"), ("--port", "-1"), ("--drain-seconds", "inf"), ("--profile-seconds", "nan")]
)
def test_a_number_that_the_system_would_choke_on_later_is_refused_at_once(capsys, flag: str, value: str):
    with pytest.raises(SystemExit):
        cli.arguments(["--model", "demo", f"{flag}={value}"])
    assert f"{flag}: {value} is not a" in capsys.readouterr().err


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(cli.UsageError, match=r"absent\.toml: No such file"):
        cli.arguments(["--config", str(tmp_path / "absent.toml")])


def test_clients_and_probes_wait_for_a_device_call_as_long_as_the_watchdog():
    args = cli.arguments(["--model", "demo", "--step-seconds", "450"])
    assert cli.limits(args).heartbeat_seconds == cli.engine_config(args, {}).step_seconds == 450


def test_flags_are_not_guessed_from_their_beginnings(capsys):
    with pytest.raises(SystemExit):
        cli.arguments(["--model", "demo", "--max-que", "3"])
    assert "--max-que" in capsys.readouterr().err


def test_help_has_groups_examples_choices_and_no_senseless_defaults():
    text = cli.parser().format_help()
    flat = " ".join(text.split())
    for group in ("devices:", "capacity:", "images:", "answers:", "access:", "profiling:", "shutdown:", "examples:"):
        assert f"\n{group}\n" in text
    for choice in (*TOOL_PARSERS, *REASONING_PARSERS):
        assert choice in flat
    assert "default: 512" in flat
    assert "default: None" not in flat
    assert max(map(len, text.splitlines())) <= 120


def test_keys_and_traces_come_from_their_flags(tmp_path):
    args = cli.arguments(["--model", "demo", "--api-key", "a", "--profile-dir", str(tmp_path / "traces")])
    assert cli.keys(args, {"VITSTRIPE_ADMIN_KEY": "b"}) == cli.keys(args, {"VITSTRIPE_ADMIN_KEY": "b"})
    assert cli.keys(args, {}).api == {"a"}
    assert cli.profiler(args, lambda work: work()) is not None
    assert cli.profiler(cli.arguments(["--model", "demo"]), lambda work: work()) is None
    with pytest.raises(cli.UsageError, match="also an API key"):
        cli.keys(args, {"VITSTRIPE_ADMIN_KEY": "a"})
    with pytest.raises(cli.UsageError, match="--profile-dir"):
        cli.profiler(
            cli.arguments(["--model", "demo", "--profile-dir", "x", "--profile-seconds", "0"]), lambda work: work()
        )


def test_a_model_is_an_embedded_one_by_its_name_or_else_a_folder():
    assert cli.model_folder("digits") == cli.DIGITS_FOLDER
    assert cli.model_folder("demo") == cli.model_folder("sight")
    assert cli.model_folder("./sight") == Path("./sight")
    assert cli.model_folder("elsewhere/demo") == Path("elsewhere/demo")


@pytest.mark.parametrize("name", ["sight", "recall"])
def test_an_embedded_model_that_is_not_there_is_told_with_what_would_do(monkeypatch, tmp_path, name):
    monkeypatch.setitem(cli.EMBEDDED, name, tmp_path / name)
    with pytest.raises(cli.UsageError) as caught:
        cli.model_folder(name)
    assert f"the embedded model {name!r} is not in this copy" in str(caught.value)
    assert "digits" in str(caught.value)


def test_a_folder_of_an_embedded_models_name_is_pointed_out(monkeypatch, tmp_path, caplog):
    (tmp_path / "digits").mkdir()
    (tmp_path / "digits" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert cli.model_folder("digits") == cli.DIGITS_FOLDER
    assert "write ./digits for the folder of that name" in caplog.text


def test_the_page_is_off_unless_it_is_asked_for(tmp_path):
    assert not cli.arguments(["--model", "demo"]).page
    assert cli.arguments(["--model", "demo", "--page"]).page
    assert cli.arguments(config(tmp_path, 'model = "demo"\npage = true')).page
