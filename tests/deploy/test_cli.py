import os
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


def test_a_reader_that_leaves_ends_the_command_without_a_traceback(server):
    # Output in one go stays in Python's buffer and meets the closed pipe at the end, in pieces earlier.
    for options in (["--json"], []):
        command = [sys.executable, "-m", "deploy.cli", "sample", "Hi", "--url", server.url, *options]
        read, write = os.pipe()
        os.close(read)
        with os.fdopen(write, "wb") as pipe:
            run = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, text=True)
        assert (run.returncode, run.stderr) == (141, "")


def test_a_gpu_asked_for_in_vain_is_a_line_before_anything_heavy_is_imported():
    code = (
        "import sys; from deploy import cli, serve; serve._gpus = lambda: 0;"
        "code = cli.main(['serve', '--device', 'cuda']); print(code, *sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    code, *loaded = run.stdout.split()
    assert code == "1"
    assert run.stderr == "choral: device is cuda, but this machine has no GPU that its NVIDIA driver offers\n"
    assert {name.partition(".")[0] for name in loaded} & set(HEAVY) == set()


def test_an_error_event_is_a_line_and_exit_code_1(server, capsys):
    server.script = lambda body: [server.role(0), {"error": {"message": "rank 1 was lost"}}, server.done]
    assert main(["sample", "Hi", "--url", server.url, "--json"]) == 1
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "choral: the server reported an error: rank 1 was lost\n")
