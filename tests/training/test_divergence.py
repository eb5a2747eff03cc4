"""Steps that are not finite are counted one by one; spikes are logged once and become normal in the end."""

from types import SimpleNamespace

import torch

from hotloop.training.checkpoint import RunState
from hotloop.training.divergence import MAX_BAD_STEPS, SPIKE_WINDOW, collect_steps, divergence_message


def collected(losses, at_once=1):
    """The run after steps with these losses, None for one that was skipped, read `at_once` at a time."""
    lines, pending = [], []
    log = SimpleNamespace(write=lambda text, **numbers: lines.append(numbers))
    run = SimpleNamespace(state=RunState(), log=log, lines=lines, diverged_at=None)
    for loss in losses:
        skipped = torch.tensor(float(loss is None))
        pending.append((SimpleNamespace(loss=torch.tensor(100.0 * (loss or 0.0)), skipped=skipped), 100))
        run.state.iter_num += 1
        if len(pending) == at_once:
            collect_steps(run, pending)
    return run


def steady(n):
    """n losses near 2."""
    return [2.0 + 0.01 * (i % 7) for i in range(n)]


def test_sums_count_the_steps_that_were_not_skipped():
    state = collected([2.0, None, 4.0], at_once=3).state
    assert state.logged == [600.0, 200, 1, 3] and state.bad_in_a_row == 0


def test_the_step_of_a_divergence_does_not_depend_on_when_steps_are_read():
    losses = [*steady(10), None, 2.0, *[None] * (MAX_BAD_STEPS + 5)]
    assert {collected(losses, n).diverged_at for n in (1, len(losses))} == {12 + MAX_BAD_STEPS}
    assert collected(losses[:11 + MAX_BAD_STEPS]).diverged_at is None


def test_a_divergence_before_the_first_save_is_no_reason_to_resume():
    for saved, optimizer, remedy in (
            (['ckpt.pt'], 'adamw', 'and resume with: python train.py --learning_rate=...'),
            (['ckpt.pt'], 'muon', 'train.py --learning_rate=... --muon_lr=...'),
            ([], 'adamw', 'Start again with a lower learning_rate')):
        out = SimpleNamespace(checkpoints=lambda saved=saved: saved, resume_command=lambda: 'python train.py')
        cfg = SimpleNamespace(optimizer=optimizer)
        message = divergence_message(SimpleNamespace(diverged_at=20, out=out, cfg=cfg))
        assert message.startswith('step 20: ') and message.endswith(remedy)
        assert ('resume' in message) == bool(saved)


def test_a_spike_is_logged_once_and_does_not_enter_the_usual_losses():
    run = collected([*steady(60), 9.0, 9.5, *steady(20)])
    assert run.lines == [{'step': 61, 'spike': 9.0}] and max(run.state.recent) < 3 and run.diverged_at is None
    assert len(collected(steady(500)).state.recent) == SPIKE_WINDOW


def test_a_new_level_of_the_loss_becomes_normal():
    run = collected([*steady(60), *[7.0] * 200])
    assert len(run.lines) == 1 and run.diverged_at is None and set(run.state.recent) == {7.0}


def test_early_losses_are_never_spikes():
    assert collected([10.0, 5.0, 20.0, 3.0]).lines == []
