import signal
import subprocess
import sys

import pytest

from deploy.cli import main

HEAVY = ("torch", "ray", "transformers", "fastapi", "httpx", "rich", "router", "aggregation", "tokenizers")


@pytest.fixture(autouse=True)
def own_signals():
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_help_imports_nothing_heavy():
    code = "import sys, deploy.cli as cli; cli.make_parser().format_help(); print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {name.partition(".")[0] for name in run.stdout.split()}
    assert "deploy" in loaded
    assert loaded & set(HEAVY) == set()


@pytest.mark.parametrize("line", [[], ["serve"], ["sample"]])
def test_every_help_page_can_be_shown(line, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([*line, "--help"])
    assert stopped.value.code == 0
    assert f"usage: {' '.join(['choral', *line])}" in capsys.readouterr().out


def test_version_in_both_spellings(capsys):
    assert main(["version"]) == 0
    with pytest.raises(SystemExit):
        main(["--version"])
    first, second = capsys.readouterr().out.splitlines()
    assert first == second
    assert first.startswith("choral 0.")


def test_no_command_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as stopped:
        main([])
    assert stopped.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


def test_a_bad_configuration_is_a_line_and_exit_code_2(capsys, tmp_path):
    file = tmp_path / "choral.yaml"
    file.write_text("grops: 2\n")
    assert main(["serve", "--config", str(file)]) == 2
    assert capsys.readouterr().err == f"choral: {file}: unknown option 'grops'\n"


def test_an_error_event_is_a_line_and_exit_code_1(server, capsys):
    server.script = lambda body: [server.role(0), {"error": {"message": "rank 1 was lost"}}, server.done]
    assert main(["sample", "Hi", "--url", server.url, "--json"]) == 1
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "choral: the server reported an error: rank 1 was lost\n")
