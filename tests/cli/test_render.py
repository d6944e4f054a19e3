from __future__ import annotations

from tokenmill.cli.show import stage_shares


def test_shares_are_of_the_time_that_writing_does_not_take() -> None:
    seconds = {"encode": 2.0, "render": 6.0, "write": 9.0, "wait": 2.0, "check": 0.0}
    shown = "render 60.0%, encode 20.0%, wait 20.0%; writes took 9.0 s beside them"
    assert stage_shares(seconds) == shown
