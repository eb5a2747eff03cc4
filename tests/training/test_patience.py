"""Patience: a run stops after evaluations without improvement, and can be continued."""

import os
import signal

from conftest import at_step, load, same, scripted_losses

NAN = float('nan')
SETTINGS = dict(max_iters=12, eval_interval=2, patience=2)


def test_a_run_out_of_patience_stops_saves_and_says_how_to_go_on(train_tiny, tmp_path, monkeypatch, capsys):
    """Also if it was stopped and resumed meanwhile."""
    scripted_losses(monkeypatch, 4.0, 4.5, 3.0, NAN, 3.0)  # after steps 2 to 10
    at_step(monkeypatch, 9, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert train_tiny(always_save_checkpoint=False, **SETTINGS) == 143
    assert 'patience=' not in capsys.readouterr().out.split('stopped: ')[1]
    assert train_tiny(init_from='resume', **SETTINGS) == 0
    *_, why, done, _, to_sample = capsys.readouterr().out.splitlines()
    assert done.startswith('done: best val loss 3.0000') and to_sample.startswith('to sample: python')
    out = tmp_path / 'out'
    assert why == ('stopped: patience=2: no lower val loss than 3.0000 in 2 evaluations; '
                   f'step 10 is saved in {out}/ckpt.pt; resume with: python train.py --init_from=resume '
                  f'--out_dir={out} --device=cpu --patience=None')
    saved, best = load(out / 'ckpt.pt'), load(out / 'best.pt')
    assert (saved['iter_num'], saved['state']['evals_since_best'], best['iter_num']) == (10, 2, 6)


def test_losses_of_other_windows_are_not_compared(train_tiny, tmp_path, monkeypatch):
    """A resume with another eval_tokens evaluates its first step again and counts from there."""
    scripted_losses(monkeypatch, 2.0, 2.0)
    train_tiny(max_iters=4, eval_interval=2, eval_tokens=64)
    scripted_losses(monkeypatch, 9.0, 8.0)
    train_tiny(init_from='resume', max_iters=6, eval_interval=2, eval_tokens=128)
    assert load(tmp_path / 'out' / 'best.pt')['best_val_loss'] == 8.0
    assert load(tmp_path / 'out' / 'best-before.pt')['best_val_loss'] == 2.0


def test_the_same_command_does_not_go_on_and_without_patience_it_finishes_with_the_same_bits(
        train_tiny, tmp_path, monkeypatch, capsys):
    losses = 4.0, 4.5, 4.2, 3.0, 2.0, 2.0
    scripted_losses(monkeypatch, *losses)
    train_tiny('whole', **{**SETTINGS, 'patience': None})
    scripted_losses(monkeypatch, *losses)
    for _ in range(2):
        assert train_tiny(resume=True, **SETTINGS) == 0
        assert 'step 6 is saved' in capsys.readouterr().out.split('stopped: patience=2')[1]
    assert train_tiny(init_from='resume', **{**SETTINGS, 'patience': None}) == 0
    ours, theirs = (load(tmp_path / out / 'ckpt.pt') for out in ('out', 'whole'))
    assert ours['iter_num'] == 12 and same(ours['model'], theirs['model'])
    assert ours['state'] == theirs['state'] and ours['state']['evals_since_best'] == 1
