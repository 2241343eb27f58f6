"""Tracebacks show the user's frames and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import manyhosts
from manyhosts.control import tracebacks

NATIVE = [
    "Exception raised from check at /pytorch/c10/x.h:42 (most recent call first):",
    "frame #0: c10::Error::Error(c10::SourceLocation) + 0x1a (0x7f in libc10.so)",
    "frame #27: <unknown function> + 0x94ac3 (0x7f in /lib/libc.so.6)",
    "#4 c10::detail::torchCheckFail from /pytorch/c10/Exception.cpp:42",
    "Extension modules: numpy._core._multiarray_umath, torch._C (total: 2)",
    '  File "/env/manyhosts/control/agent/worker.py", line 182 in run_main',
    '  File "<string>", line 1 in <module>',
]


@pytest.mark.parametrize("line", NATIVE)
def test_line_of_native_code_is_known(line: str) -> None:
    assert tracebacks.is_native_frame(line)


@pytest.mark.parametrize(
    "line", ["frame 3 of 10", '  File "train.py", line 3, in f', '  File "train.py", line 3 in f', "#4 in the list", ""]
)
def test_line_of_a_person_is_none(line: str) -> None:
    assert not tracebacks.is_native_frame(line)


@pytest.mark.parametrize(
    ("kind", "what"),
    [("'gloo::EnforceNotMet'", "an exchange between the workers failed"), ("'std::bad_alloc'", "C++ code failed")],
)
def test_sentence_stands_before_the_last_words_of_native_code(kind: str, what: str) -> None:
    text = f"terminate called after throwing an instance of {kind}\n  what():  [enforce fail]"
    assert tracebacks.may_hold_noise('  File "train.py", line 3 in f')
    assert tracebacks.what_gave_up(text).startswith(f"{what}, and ended the process")
    assert tracebacks.what_gave_up("a line of the script") == ""


def test_notice_that_nobody_can_do_anything_about_is_known_and_a_real_warning_is_none() -> None:
    idle = (
        "[W1121 15:39:41.141190743 socket.cpp:207] [c10d] The hostname of the client socket cannot be retrieved. err=-3"
    )
    assert tracebacks.is_idle_notice(idle)
    real = "[W1121 15:39:41.141190743 socket.cpp:207] [c10d] The server socket has failed to listen on any address."
    assert not tracebacks.is_idle_notice(real)


def caught(error: Exception, cause: Exception | None = None) -> Exception:
    try:
        raise error from cause
    except Exception as raised:
        return raised


def test_text_keeps_what_python_says_and_loses_what_native_code_says() -> None:
    text = tracebacks.text(caught(RuntimeError("\n".join(["it failed", *NATIVE]))))
    assert text.startswith("Traceback (most recent call last):\n")
    assert text.endswith("RuntimeError: it failed")


def test_error_behind_the_error_is_told_too() -> None:
    text = tracebacks.text(caught(ValueError("second"), caught(KeyError("first"))))
    assert text.index("KeyError: 'first'") < text.index("direct cause") < text.index("ValueError: second")


def test_summary_has_all_that_an_error_says_in_one_line() -> None:
    said = '\nError(s) in loading state_dict for Net:\n\tMissing key(s): "bias".\n'
    assert (
        tracebacks.summary(ValueError(said))
        == 'ValueError: Error(s) in loading state_dict for Net: Missing key(s): "bias".'
    )
    assert tracebacks.summary(ValueError()) == "ValueError"


def test_summary_of_a_long_error_keeps_its_beginning_and_its_end() -> None:
    said = tracebacks.summary(ValueError("begin " + "x" * 5000 + " end"))
    assert said.startswith("ValueError: begin xxx")
    assert said.endswith("xxx end")
    assert len(said) < 500


QUOTED = """

-- Process 1 terminated with the following error:
Traceback (most recent call last):
  File "/venv/torch/multiprocessing/spawn.py", line 90, in _wrap
    fn(i, *args)
  File "/home/me/train.py", line 3, in main
    raise KeyError("no such column")
KeyError: 'no such column'
"""


def test_summary_of_an_error_that_quotes_another_process_has_that_ones_cause() -> None:
    said = tracebacks.summary(RuntimeError(QUOTED))
    assert said == "RuntimeError: -- Process 1 terminated with the following error: KeyError: 'no such column'"
    chained = f"Caught ValueError in DataLoader worker process 0.\nOriginal {QUOTED.strip().partition(chr(10))[2]}"
    assert tracebacks.summary(ValueError(chained)) == (
        "ValueError: Caught ValueError in DataLoader worker process 0. KeyError: 'no such column'"
    )


def test_summary_of_an_error_that_came_through_c_code_has_its_cause() -> None:
    said = (
        "-- Process 0 terminated with the following error:\nTraceback (most recent call last):\n"
        '  File "train.py", line 5, in <module>\n    wait_all(futures)\nRuntimeError: On WorkerInfo(id=3):\n'
        'Traceback (most recent call last):\n  File "train.py", line 9, in train\n    fetch()\nOSError: torn file\n\n\n'
        "At:\n  internal.py(236): _handle_exception\n"
    )
    assert tracebacks.summary(RuntimeError(said)).endswith(" with the following error: OSError: torn file")


def test_summary_names_the_module_of_errors_that_are_not_pythons() -> None:
    import subprocess

    assert tracebacks.summary(subprocess.SubprocessError("x")) == "subprocess.SubprocessError: x"


OURS = "def inner(call): call()\ndef outer(call): inner(call)\ndef wrong(): inner(wrong_too)\ndef wrong_too(): 1 / 0"


def test_calls_in_manyhosts_between_those_of_the_script_take_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log has all of them. Where the error was raised in ours, it shows them."""
    ours: dict[str, Any] = {}
    exec(compile(OURS, str(Path(manyhosts.__file__).parent / "training" / "loop.py"), "exec"), ours)

    def of_the_script() -> None:
        raise ValueError("theirs")

    with pytest.raises(ValueError, match="theirs") as theirs:
        ours["outer"](of_the_script)
    full, brief = tracebacks.text(theirs.value), tracebacks.brief(theirs.value)
    assert full.count("manyhosts/training/loop.py") == 2
    assert "  … 2 calls in manyhosts; this worker's log has them\n" in brief
    assert brief.count("File ") == full.count("File ") - 2
    assert brief.endswith('raise ValueError("theirs")\nValueError: theirs')

    with pytest.raises(ZeroDivisionError) as raised_in_ours:
        ours["outer"](ours["wrong"])
    assert tracebacks.brief(raised_in_ours.value) == tracebacks.text(raised_in_ours.value)

    monkeypatch.setenv("MANYHOSTS_TRACE", "1")
    assert tracebacks.brief(theirs.value) == full
