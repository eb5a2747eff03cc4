"""Steps that were not finite, and spikes of the loss."""

import numpy as np

MAX_BAD_STEPS = 20  # bad steps in a row after which a run has diverged; fp16 halves its scale at each
SPIKE, SPIKE_WINDOW = 6.0, 128  # standard deviations above the mean of so many losses


def collect_steps(run, pending):
    """
    Waits for the steps in `pending` and books them: a step that was skipped never enters an average. The run has
    diverged when MAX_BAD_STEPS in a row were not finite, or, where that is a reason to roll back, spikes; at which step
    is found step by step, however many are pending, and kept in run.diverged_at.
    """
    state, rolls_back = run.state, run.cfg.on_divergence == 'rollback'
    loss_sum, targets, skipped, steps = state.logged or (0.0, 0, 0, 0)
    step = state.iter_num - len(pending)
    for loss, bad, num_targets in pending:
        step, steps = step + 1, steps + 1
        if bad.item():
            skipped += 1
            state.bad_in_a_row += 1
        else:
            loss_sum, targets = loss_sum + loss.item(), targets + num_targets
            track_loss(run, step, loss.item() / max(num_targets, 1))
        counted = state.bad_in_a_row - (0 if rolls_back else state.spikes_in_a_row)
        if counted >= MAX_BAD_STEPS and run.diverged_at is None:
            run.diverged_at = step
    pending.clear()
    state.logged = [loss_sum, targets, skipped, steps]


def track_loss(run, step, loss):
    """Books the loss of a step; a spike is told once, and spikes that stay are the new level in the end."""
    state, usual = run.state, run.state.recent
    if len(usual) < SPIKE_WINDOW // 4 or loss <= np.mean(usual) + SPIKE * max(np.std(usual), 1e-3):
        state.bad_in_a_row = state.spikes_in_a_row = 0
        state.recent = [*usual, loss][-SPIKE_WINDOW:]
        return
    if not state.spikes_in_a_row:
        run.log.write(f'step {step}: loss {loss:.4f} is a spike: the {len(usual)} steps before had '
                      f'{np.mean(usual):.4f} +- {np.std(usual):.4f}', step=step, spike=loss)
    state.bad_in_a_row, state.spikes_in_a_row = state.bad_in_a_row + 1, state.spikes_in_a_row + 1
    if run.cfg.on_divergence == 'stop' and state.spikes_in_a_row >= MAX_BAD_STEPS:
        state.bad_in_a_row, state.spikes_in_a_row, state.recent = 0, 0, []
