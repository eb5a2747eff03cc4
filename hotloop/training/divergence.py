"""Steps with a non-finite loss or gradient, and loss spikes."""

import numpy as np

from hotloop.system.text import short

MAX_BAD_STEPS = 20  # a run with this many bad steps in a row has diverged; fp16 halves its loss scale at each
SPIKE = 6.0  # a loss this many standard deviations above the mean is a spike
SPIKE_WINDOW = 128  # number of previous losses in that mean


def collect_steps(run, pending):
    """
    Waits for the steps in `pending`, a list of (StepResult, num_targets), and adds them to run.state. A
    skipped step never enters an average. Sets run.diverged_at after MAX_BAD_STEPS bad steps in a row.
    """
    state = run.state
    loss_sum, targets, skipped, steps = state.logged or (0.0, 0, 0, 0)
    for step, (result, num_targets) in enumerate(pending, state.iter_num - len(pending) + 1):
        if result.skipped.item():
            skipped += 1
            state.bad_in_a_row += 1
        else:
            loss = result.loss.item()
            loss_sum += loss
            targets += num_targets
            state.bad_in_a_row = 0
            track_loss(run, step, loss / max(num_targets, 1))
        if state.bad_in_a_row >= MAX_BAD_STEPS and run.diverged_at is None:
            run.diverged_at = step
    state.logged = [loss_sum, targets, skipped, steps + len(pending)]
    pending.clear()


def track_loss(run, step, loss):
    """Logs the first spike in a row. After MAX_BAD_STEPS spikes the new level counts as normal."""
    state, recent = run.state, run.state.recent
    if len(recent) < SPIKE_WINDOW // 4 or loss <= np.mean(recent) + SPIKE * max(np.std(recent), 1e-3):
        state.spikes_in_a_row = 0
        state.recent = [*recent, loss][-SPIKE_WINDOW:]
        return
    if state.spikes_in_a_row == 0:
        run.log.write(f'step {step}: loss {short(loss)} is a spike; the {len(recent)} before averaged '
                      f'{short(np.mean(recent))} +- {short(np.std(recent))}', step=step, spike=loss)
    state.spikes_in_a_row += 1
    if state.spikes_in_a_row >= MAX_BAD_STEPS:
        state.spikes_in_a_row, state.recent = 0, []


def divergence_message(run):
    """The error message of a run that has diverged."""
    return (f'step {run.diverged_at}: loss or gradients were not finite for {MAX_BAD_STEPS} steps in a row. '
            f'Those steps were skipped. With dtype=float16, try bfloat16 or float32. {what_next(run)}')


def what_next(run):
    """What to do after a divergence. Without a checkpoint there is nothing to resume from."""
    if run.out.checkpoints():
        muon = ' --muon_lr=...' if run.cfg.optimizer == 'muon' else ''  # it does not follow learning_rate
        command = f'{run.out.resume_command()} --learning_rate=...{muon}'
        return f'Lower the learning rate and resume with: {command}'
    return 'Start again with a lower learning_rate'
