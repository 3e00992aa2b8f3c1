"""Three kills of the kill test (`nox -s kill` runs thirty)."""

from pathlib import Path

from tests.kill import kill_test


def test_three_kills(tmp_path: Path) -> None:
    """A checkpoint that a kill takes along; a training that goes on from another place than it was."""
    outcome = kill_test(3, tmp_path, seed=1)
    assert len(outcome.kills) == 3 and not any(each.lost for each in outcome.kills)
    assert outcome.steps > 6 and outcome.loss_error < 1e-9 and outcome.weight_error < 1e-9
