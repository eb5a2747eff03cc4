"""
Where the time of a training step goes: the profiler's table of three warm steps, and a trace.

    $ python tests/bench/profile_step.py config/quickstart.py            # the arguments of train.py
    $ torchrun --standalone --nproc_per_node=8 tests/bench/profile_step.py config/gpt2_124m.py

Writes out_dir/trace.json for chrome://tracing or perfetto; nothing else in out_dir changes.
"""

import os
import time

import bench  # noqa: F401  makes the modules below importable
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import train
from configurator import call_main

WARM, TIMED, TRACED = 5, 20, 3  # steps


def run_steps(run, first, number):
    """Train on the data of `number` steps from `first` on; returns the seconds of a step."""
    began = time.perf_counter()
    for step in range(first, first + number):
        data = run.batches.step(step)
        train.set_learning_rate(run.optimizers, run.cfg.learning_rate, run.cfg.learning_rate)
        result = train.train_step(run.train_model, data, run.optimizers, run.scaler, run.cfg, run.env)
    result.loss.item()  # waits for the device
    return (time.perf_counter() - began) / number


def main():
    settings = train.read_settings()
    cfg = settings.train
    env = train.setup(cfg)
    run = train.Run(settings, train.open_datasets(cfg.dataset, cfg.data_dir), env)
    run_steps(run, 0, WARM)
    seconds, waited = run_steps(run, WARM, TIMED), run.batches.waited
    activities, sort_by = [ProfilerActivity.CPU], 'self_cpu_time_total'
    if env.device.type == 'cuda':
        activities.append(ProfilerActivity.CUDA)
        sort_by = 'self_cuda_time_total'
    with profile(activities=activities) as profiler:
        run_steps(run, WARM + TIMED, TRACED)
    if env.rank == 0:
        print(profiler.key_averages().table(sort_by=sort_by, row_limit=25, max_name_column_width=70))
        os.makedirs(cfg.out_dir, exist_ok=True)
        profiler.export_chrome_trace(os.path.join(cfg.out_dir, 'trace.json'))
        tokens = run.batches.global_batch * run.batches.split.T
        print(f'{seconds * 1000:.1f} ms per step without the profiler, {tokens / seconds:,.0f} tok/s, data '
              f'{waited / (seconds * (WARM + TIMED)):.1%}; the table is of {TRACED} steps, and '
              f'{cfg.out_dir}/trace.json is for chrome://tracing or perfetto')
    if env.world > 1:
        dist.destroy_process_group()


if __name__ == '__main__':
    call_main(main)
